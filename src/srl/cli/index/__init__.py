"""`srl index`: build, import, download, inspect, search and measure indexes."""

from __future__ import annotations

import typer

from srl.cli.index import build, pull, search
from srl.cli.index import eval as eval_

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Build, import, search and measure indexes.")
app.command("build")(build.build)
app.command("import")(build.import_)
app.command("pull")(pull.pull)
app.command("info")(build.info)
app.command("search")(search.search)
app.command("eval")(eval_.evaluate)
