"""What the commands that run a model on questions have in common: its directory, checks, a server's usage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from srl.config import Config
    from srl.workspace import Workspace


def read_model(model: str | None) -> tuple[Path | None, Workspace]:
    """The directory of the model that was named, and the workspace around it. Raises UserError."""
    from srl.cli.output import note
    from srl.train.named_checkpoint import model_directory
    from srl.workspace import Workspace

    workspace = Workspace.resolve()
    directory = None if model is None else model_directory(model, workspace, note)
    return directory, (directory and Workspace.around(directory)) or workspace


def check_inputs(data: Iterable[Path], index: Path | None, url: str | None, templates: Iterable[str]) -> None:
    """Check the inputs before torch is imported. Raises UserError."""
    from srl.cli.options import exclude
    from srl.files import check_input
    from srl.index import check_index
    from srl.protocol import template

    exclude({"--index": index is not None, "--url": url is not None}, "search either an index or a server")
    for file in data:
        check_input(file)
    for name in templates:
        template(name)
    if index is not None:
        check_index(index)


def check_search(settings: Config, baselines: Iterable[str] = (), typed: object = None) -> None:
    """There is something to search, if the model or a baseline searches. Raises UserError.

    Warns where an index or a URL was `typed` and nothing searches.
    """
    from srl.cli.output import warn
    from srl.errors import UserError
    from srl.train.baselines import BASELINES

    search = settings.search
    target = search.url or search.index or settings.data.corpus or search.replays
    if settings.rollout.search and not target:
        raise UserError("nothing to search: give --index DIR or --url URL, or --set rollout.search=false")
    searching = [name for name in baselines if BASELINES[name].searches]
    if typed and not searching and not settings.rollout.search:
        warn(
            "warning: this model was trained without search, so --index and --url are not used; to let it "
            "search: --set rollout.search=true --set data.template=search-r1"
        )
    if searching and not target:
        raise UserError(f"--baseline {searching[0]} has nothing to search: give --index DIR or --url URL")


def tell_changed_indexes(now: Mapping[str, str], trained: Mapping[str, str], verb: str, so: str) -> None:
    """Warn of the indexes, by their retriever's name, that are not those of training: `verb`, what is done
    with them, and `so` what."""
    from srl.cli.output import note

    for name, digest in now.items():
        before = trained.get(name)
        if digest and before and digest != before:
            index = f"the index of the retriever {name!r}" if name else "the index"
            note(f"warning: trained with {index} {before[:12]}, {verb} {digest[:12]}: {so}")
