"""Runs the command `srl`: any error becomes one line on stderr and an exit code.

0 success; 1 a check failed; 2 an error in the input or the environment; 70 a bug in srl, with the traceback
in a file; 129, 130 and 143 a signal; 141 the reader of the output closed the pipe. Importing this imports
nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from signal import SIGINT
from typing import Any

from srl import process
from srl.errors import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_SIGNAL,
    EXIT_USER,
    SrlError,
    UserError,
    error_line,
    first_line,
    is_out_of_memory,
    with_notes,
)

EXIT_BROKEN_PIPE = 141
_LONGEST = 2000
"""Characters of an error's line; what was typed or read may be longer."""
_LIBRARIES = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `srl` with `arguments` (the process's own by default) and return its exit code."""
    for name, value in _LIBRARIES.items():
        os.environ.setdefault(name, value)
    if getattr(sys.stdout, "errors", None) == "strict":  # a letter that its encoding lacks is no error
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        with process.signals_handled():
            code = _guarded(sys.argv[1:] if arguments is None else list(arguments))
            return _flush() or code
    except KeyboardInterrupt as error:
        return _report(error)


def _guarded(arguments: list[str]) -> int:
    try:
        return _run(arguments)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            _say(stop.code)
            return 1
        return stop.code or EXIT_OK
    except (Exception, KeyboardInterrupt) as error:
        return _report(error)


def _run(arguments: list[str]) -> int:
    """Parse and call a command. Typer's own `main` has other exit codes, and several lines for an error."""
    import typer

    from srl.cli import app, output

    usage_error: Any = typer.BadParameter.__mro__[1]
    command = app.command()
    try:
        with command.make_context("srl", arguments) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    except usage_error as error:
        message = error.format_message().replace(": Value error, ", ": ")
        if "\n" in message:  # the help of a command that was typed alone
            output.warn(message)
        else:
            path = error.ctx.command_path if error.ctx else "srl"
            _say(UserError(message.removesuffix("."), hint=f"type: {path} --help"))
        return EXIT_USER
    return EXIT_OK


def _report(error: BaseException) -> int:
    """Print one line for an error and return its exit code."""
    if (signal := process.signal_received()) or isinstance(error, KeyboardInterrupt):
        with suppress(OSError):  # the terminal may be the one that was closed
            _say(with_notes(error, process.SIGNALS[signal] if signal else "interrupted"))
        return EXIT_SIGNAL + (signal or SIGINT)
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    if isinstance(error, SrlError):
        _say(with_notes(error))
        return error.exit_code
    if what := _of_the_machine(error):
        _say(with_notes(error, what))
        return EXIT_USER
    _say(_write_traceback(error))
    return EXIT_BUG


def _of_the_machine(error: BaseException) -> str:
    """One line for an error of a file or of the machine (no such file, disk full), else empty."""
    from srl.files import is_disk_full, target_of

    if is_out_of_memory(error):
        return f"{first_line(error)} Free the GPU, or lower rollout.max_num_seqs"
    what = error_line(error) if isinstance(error, OSError) else ""
    if is_disk_full(error):
        what = "the disk is full"
    where = getattr(error, "filename", None)
    return f"{what}: {target_of(where)}" if what and where else what


def _write_traceback(error: BaseException) -> str:
    """Write the traceback to a file; one line with the error and the path of the file."""
    import traceback
    from tempfile import mkstemp

    from srl.cli import output
    from srl.safe import safe_message

    what = f"internal error, {type(error).__name__}: {first_line(error)}"
    lines = safe_message("".join(traceback.format_exception(error)))
    try:
        descriptor, name = mkstemp(".txt", "srl-traceback-")
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(lines)
    except OSError:
        output.warn(lines)
        return f"{what}; the traceback could not be written"
    return f"{what}; please report it with the traceback in {name}"


def _say(message: object) -> None:
    """One line on stderr; of a longer one the beginning and the end, which says what to do."""
    from srl.cli import output

    line = " ".join(str(message).splitlines())
    half = _LONGEST // 2
    output.warn(f"srl: {line if len(line) <= _LONGEST else f'{line[:half]} … {line[-half:]}'}")


def _flush() -> int:
    """Flush stdout. If that fails, discard the rest, so that the interpreter exits without another error."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _report(error)
    return EXIT_OK
