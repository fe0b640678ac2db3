"""The command `srl`: what runs it, and the exit codes it ends with.

0; 1 a check failed; 2 the user or the environment; 70 our bug, its traceback in a file; 129, 130 and 143
a signal; 141 whoever read the output stopped reading. Importing this imports nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from signal import SIGINT, Signals
from typing import Any

from srl import interrupts
from srl.errors import EXIT_BUG, EXIT_OK, EXIT_SIGNAL, EXIT_USER, SrlError

EXIT_BROKEN_PIPE = 141
_LIBRARIES = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


def command() -> Any:
    """The whole of `srl` as a click command, for those who write its documentation."""
    from srl.cli import app

    return app.command()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `srl` with `arguments` (the process's own by default) and return its exit code."""
    for name, value in _LIBRARIES.items():
        os.environ.setdefault(name, value)
    _escape_what_stdout_lacks()
    try:
        with interrupts.handled():
            code = _guarded(sys.argv[1:] if arguments is None else list(arguments))
            flushed = _flush()
    except KeyboardInterrupt as error:
        return _report(error)
    return code or flushed


def _guarded(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except SystemExit as stop:
        return _code(stop)
    except (Exception, KeyboardInterrupt) as error:
        return _report(error)


def _run(arguments: list[str]) -> int:
    """What every script asks first is answered without typer, which takes longer to import than to list."""
    if arguments == ["plugins", "list"]:
        from srl.cli.listing import print_list

        print_list()
        return EXIT_OK
    from srl.cli import app

    try:
        app.command().main(args=arguments, prog_name="srl")
    except app.Carried as carried:
        return _report(carried.error)
    return EXIT_OK


def _code(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    _say(stop.code)
    return 1


def _report(error: BaseException) -> int:
    """Say in one line what went wrong; the exit code for it."""
    if (signal := interrupts.received()) or isinstance(error, KeyboardInterrupt):
        return _interrupted(error, signal)
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    if isinstance(error, SrlError):
        _say(_with_notes(error, error))
        return error.exit_code
    from srl.cli.crash import environment_error, write_traceback

    if message := environment_error(error):
        _say(_with_notes(message, error))
        return EXIT_USER
    _say(write_traceback(error))
    return EXIT_BUG


def _interrupted(error: BaseException, signal: Signals | None) -> int:
    """Say what ended the command, and what whoever was at work noted: how to go on."""
    what = interrupts.SIGNALS[signal] if signal else "interrupted"
    with suppress(OSError):  # the terminal may be the one that was closed
        _say(_with_notes(what, error))
    return EXIT_SIGNAL + (signal or SIGINT)


def _with_notes(what: object, error: BaseException) -> str:
    return "; ".join([str(what), *getattr(error, "__notes__", [])])


def _say(message: object) -> None:
    from srl.cli import output

    output.warn(" ".join(["srl:", *str(message).split("\n")]))


def _escape_what_stdout_lacks() -> None:
    """A letter that the terminal's encoding does not have is written as its escape, and ends no command."""
    if getattr(sys.stdout, "errors", None) == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _flush() -> int:
    """Write out what stdout still holds. When that fails the rest goes nowhere, so that exit stays quiet."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _report(error)
    return EXIT_OK
