"""`srl index`: build, import, download, inspect, search and measure indexes."""

from __future__ import annotations

from collections.abc import Callable

import typer

from srl.cli.index import build, pull, search
from srl.cli.index import eval as eval_

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Build, import, search and measure indexes.")

_COMMANDS: dict[str, Callable[..., None]] = {
    "build": build.build,
    "import": build.import_,
    "pull": pull.pull,
    "info": build.info,
    "search": search.search,
    "eval": eval_.evaluate,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)
