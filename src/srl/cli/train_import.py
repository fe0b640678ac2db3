"""`srl train import`: a configuration of verl's or Search-R1's becomes ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from srl.cli import output
from srl.errors import UserError


def import_config(
    file: Annotated[Path, typer.Argument(help="YAML of verl's, a list of overrides, or a training script.")],
    out: Annotated[Path | None, typer.Option(help="File to write; else stdout.")] = None,
    define: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Value of a shell variable of the script.")
    ] = None,
) -> None:
    """Make our configuration of verl's, or of a training script of Search-R1's, and say what changes.

    Nothing in a script is run. What is said on stderr also stands at the head of the file.

    \b
    Example:
      srl train import train_grpo.sh --out grpo.yaml
      srl train --config grpo.yaml --dry-run
    """
    from srl.train.importing import import_file

    made = import_file(file, _defined(define or []))
    if out is None:
        output.verbatim(made.text)
    else:
        _write(out, made.text)
    for line in made.report:
        output.note(line)


def _defined(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.replace("_", "").isalnum():
            raise UserError(f"--define {text}: expected NAME=VALUE, as in --define DATA_DIR=data/nq")
        found[name] = value
    return found


def _write(out: Path, text: str) -> None:
    from srl.files import atomic_file

    if out.exists():
        raise UserError(f"{out} exists already; choose another name, or remove it first")
    with atomic_file(out) as file:
        file.write(text)
