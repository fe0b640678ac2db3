"""Options that several commands share, and how `--set KEY=VALUE` is read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from srl.errors import UserError

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]


def exclude(options: Mapping[str, bool], why: str) -> None:
    """Raises UserError if two of these options are typed (True); `why` says what they exclude."""
    typed = [name for name, is_typed in options.items() if is_typed]
    if len(typed) > 1:
        raise UserError(f"{' and '.join(typed[:2])} exclude each other: {why}")


def check_new(file: Path | None, overwrite: bool | None, inputs: Iterable[Path | str | None] = ()) -> None:
    """Raises UserError if `--out` names what is not to be replaced; None: the command has no --overwrite.

    That is a file or a filled directory; and, also with `overwrite`, one of the command's `inputs`, a part of
    one, what has one in it, and any path in the directory of a run.
    """
    if file is None:
        return
    is_taken = any(file.iterdir()) if file.is_dir() else file.exists()
    if is_taken and not overwrite:
        either = "" if overwrite is None else ", or --overwrite"
        raise UserError(f"{file} exists; give another --out{either}")
    real = Path(os.path.realpath(file))
    for path in (Path(os.path.realpath(path)) for path in inputs if path is not None and is_taken):
        if real.is_relative_to(path) or path.is_relative_to(real):
            raise UserError(f"{file}: this command reads it; give another --out")
    for folder in (real, *real.parents):
        if any((folder / name).is_file() for name in ("run.json", "log/manifest.json")):
            raise UserError(f"{file} is in the directory of a run, {folder}; give another --out")


def whole_settings(settings: list[str] | None) -> list[str] | None:
    """The values of `--set`. Raises UserError for one that is typed as two words."""
    for text in settings or []:
        if "=" not in text:
            raise UserError(f"--set {text}: expected KEY=VALUE in one word")
    return settings


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any configuration key (repeatable).",
        callback=whole_settings,
    ),
]
RetrieverSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Option of the retriever (repeatable).",
        callback=whole_settings,
    ),
]
ModelToRun = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Model directory, ORG/NAME of the Hugging Face hub, or run (newest checkpoint; "
        "RUN@best: best by validation; RUN@30: step 30). A server's model needs none.",
    ),
]
IndexToSearch = Annotated[Path | None, typer.Option(help="Index directory to search.")]
ServerUrl = Annotated[str | None, typer.Option(help="URL of a search server, instead of --index.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")]
TemplateName = Annotated[
    str | None, typer.Option(help="Prompt template: a name, or a text file with {question}.")
]


def read_settings(plugin: str, settings: list[str], kind: str = "retriever") -> dict[str, Any]:
    """The options of a plugin from `k1=.9` or `retriever.bm25.k1=.9`; values are YAML. Raises UserError.

    A dotted key sets a nested option: `retrievers.e5.model=DIR` is `{"retrievers": {"e5": {"model": …}}}`.
    """
    from srl.config.yaml12 import parse

    options: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        *outer, last = key.strip().removeprefix(f"{kind}.{plugin}.").split(".")
        place = options
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise UserError(f"--set {setting}: {name} already has a value, so it cannot have keys")
        place[last] = parse(value, f"--set {setting}")
    return options
