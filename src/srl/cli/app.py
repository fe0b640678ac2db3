"""The command `srl`: global options, and sub-commands that are imported when they are called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from srl import __version__
from srl.errors import UserError

COMMANDS = {
    "data": "Get questions and corpora: make a world, read published formats.",
    "index": "Build, import, search, measure and compare indexes.",
    "serve": "Serve searches over HTTP, and check search servers.",
    "train": "Train a model to search.",
    "eval": "Evaluate a model on questions.",
    "ask": "Ask a model a question, and see it search.",
    "inspect": "Inspect runs: trajectories, curves, SQL.",
    "plugins": "List, check and create plugins.",
}
"""Each sub-command, which is a module of this package, and its line in the help."""

_LEFT_OUT = (None, 0)
"""Values of options that were not given: 0 for a flag or a count, None for others."""

_WHOLE = 1000
"""Longest line of a command in a help, in characters; typer fits it to the terminal."""


class _Lean:
    """A command that converts only the values that were given.

    Typer imports pydantic to convert a value; without this it would on every start, for options left out.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        return [_lean(parameter) for parameter in super().get_params(ctx)]  # type: ignore[misc]


def _lean(parameter: Any) -> Any:
    many = parameter.nargs != 1 or parameter.multiple
    if parameter.required or many or "process_value" in vars(parameter):
        return parameter
    convert = parameter.process_value

    def process_value(ctx: Any, value: Any) -> Any:
        if value not in _LEFT_OUT:
            return convert(ctx, value)
        return parameter.callback(ctx, parameter, value) if parameter.callback else value

    parameter.process_value = process_value
    return parameter


class LeanCommand(_Lean, TyperCommand):
    """One command of `srl`."""


class LeanGroup(_Lean, TyperGroup):
    """A sub-command of `srl` with commands of its own; its help shows their whole first sentences."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        if rows := self.summaries(ctx):
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def summaries(self, ctx: Any) -> list[tuple[str, str]]:
        commands: dict[str, Any] = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: command for name, command in commands.items() if not command.hidden}
        return [(name, command.get_short_help_str(_WHOLE)) for name, command in shown.items()]


class LazyGroup(LeanGroup):
    """The sub-commands of `srl`; each is imported when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name) if cmd_name in COMMANDS else None

    def summaries(self, ctx: Any) -> list[tuple[str, str]]:
        return list(COMMANDS.items())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _workspace_first(args))

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*arguments, **extra)
        except _USAGE as error:
            raise _in_one_line(error) from error

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, EOFError, OSError) as error:
            raise CarriedError(error) from error
        except _USAGE as error:
            raise _in_one_line(error) from error


def _workspace_first(arguments: list[str]) -> list[str]:
    """`arguments` with `--workspace` before the command, where it may also be typed after it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for place, argument in enumerate(arguments[:end]):
        if argument == _WORKSPACE or argument.startswith(f"{_WORKSPACE}="):
            after = place + (2 if argument == _WORKSPACE else 1)
            rest = _workspace_first(arguments[:place] + arguments[after:])
            return [*arguments[place:after], *rest]
    return arguments


_WORKSPACE = "--workspace"
_USAGE: Any = typer.BadParameter.__mro__[1]
"""click's UsageError, from whichever package this version of typer takes it."""


def _in_one_line(error: Any) -> Exception:
    """A usage error as one line that says what to type; requested help is left as it is."""
    message = error.format_message()
    if errors := getattr(error.__cause__, "errors", None):  # pydantic's, by which typer converts a value
        message = message.replace(error.message, _expected(errors()[0]))
    if "\n" in message:
        return error
    if message.endswith("?"):
        return UserError(message)
    command = error.ctx.command_path if error.ctx else "srl"
    name = getattr(error, "option_name", None)
    above = error.ctx.find_root().command.params if error.ctx and error.ctx.parent else []
    if any(name in parameter.opts for parameter in above):
        return UserError(f"{name} goes before the command: srl {name} {command.removeprefix('srl ')} …")
    if hasattr(error, "possibilities") and hasattr(error.ctx.command, "commands"):
        after = f"{command} COMMAND {error.option_name}"
        return UserError(f"{message.removesuffix('.')}; an option of a command goes after it: {after}")
    return UserError(f"{message.removesuffix('.')}; type: {command} --help")


def _expected(found: Any) -> str:
    from srl.errors import expected

    said = expected(found)
    return f"{found['input']!r:.60}, {said}" if said.startswith("expected ") else said


class CarriedError(BaseException):
    """Carries an error past typer, which would turn it into `Aborted!` and exit code 1."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _command(name: str) -> Any:
    """The command of one sub-module, with plain help and without typer's own options."""
    from importlib import import_module

    app = import_module(f"srl.cli.{name}").app
    app.rich_markup_mode = None
    app._add_completion = False
    app.info.cls = LeanGroup
    for registered in app.registered_commands:
        registered.cls = LeanCommand
    command = typer.main.get_command(app)
    command.name = name
    return command


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
def _frame(
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
