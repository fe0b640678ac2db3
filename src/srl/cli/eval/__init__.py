"""`srl eval`: evaluate models on questions."""

from __future__ import annotations

from collections.abc import Callable

import typer

from srl.cli.eval import compare, rescore, run, suite

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Evaluate a model on questions.")


@app.callback()
def _group() -> None:
    """Evaluate a model on questions."""


_COMMANDS: dict[str, Callable[..., None]] = {
    "run": run.run,
    "compare": compare.compare,
    "rescore": rescore.rescore,
    "suite": suite.suite,
}
for _name, _function in _COMMANDS.items():
    app.command(_name)(_function)
