"""`srl eval`: evaluate models on questions."""

from __future__ import annotations

import typer

from srl.cli.eval import compare, run

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Evaluate a model on questions.")
app.command("run")(run.run)
app.command("compare")(compare.compare)
