"""The command `srl`: global options, and sub-commands that are imported when they are called."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from srl import __version__

COMMANDS = {
    "data": "Get questions and corpora: make a world, read published formats.",
    "index": "Build, import, search and measure indexes.",
    "serve": "Serve searches over HTTP, and check search servers.",
    "train": "Train a model to search.",
    "eval": "Evaluate a model on questions.",
    "ask": "Ask a model a question, and see it search.",
    "inspect": "Inspect runs: trajectories, curves, SQL.",
    "plugins": "List, check and create plugins.",
}
"""Each sub-command, which is a module of this package, and its line in the help."""

_WHOLE = 1000
"""Longest summary of a command in a help, in characters: none is cut."""


class Group(TyperGroup):
    """Commands whose whole first sentences stand in the help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.summaries(ctx))

    def summaries(self, ctx: Any) -> list[tuple[str, str]]:
        commands: dict[str, Any] = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        return [(name, command.get_short_help_str(_WHOLE)) for name, command in commands.items()]


class LazyGroup(Group):
    """The sub-commands of `srl`; each is imported when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # typer names the nearest of them

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        sub_app = import_module(f"srl.cli.{cmd_name}").app
        sub_app.rich_markup_mode, sub_app._add_completion = None, False
        sub_app.info.cls = Group
        command = typer.main.get_command(sub_app)
        command.name = cmd_name
        return command

    def summaries(self, ctx: Any) -> list[tuple[str, str]]:
        return list(COMMANDS.items())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _workspace_first(args))


def _workspace_first(arguments: list[str]) -> list[str]:
    """`arguments` with `--workspace` before the command, where it may also be typed after it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for place, argument in enumerate(arguments[:end]):
        if argument.partition("=")[0] == "--workspace":
            after = place + (1 if "=" in argument else 2)
            return [*arguments[place:after], *arguments[:place], *arguments[after:]]
    return arguments


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    from srl.cli import output

    if wanted:
        output.line(f"srl {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    workspace: Annotated[
        Path | None,
        typer.Option(
            help="Workspace directory, also after the command; default $SRL_WORKSPACE or ./srl-workspace."
        ),
    ] = None,
    verbose: Annotated[
        int,
        typer.Option(
            "-v", "--verbose", count=True, show_default=False, help="Log more; -vv logs everything."
        ),
    ] = 0,
    quiet: Annotated[
        int,
        typer.Option("-q", "--quiet", count=True, show_default=False, help="Log less; -qq only errors."),
    ] = 0,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Train language models to search.

    Results go to stdout, everything else to stderr.

    \b
    Example:
      srl train --preset tiny
    """
    from srl.cli import output

    if workspace is not None:
        os.environ["SRL_WORKSPACE"] = str(workspace)
    output.set_verbosity(verbose - quiet)


def command() -> Any:
    """The whole of `srl` as one click command."""
    return typer.main.get_command(app)
