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
from signal import SIGINT, Signals
from typing import Any

from srl import process
from srl.errors import (
    EXIT_BUG,
    EXIT_OK,
    EXIT_SIGNAL,
    EXIT_USER,
    SrlError,
    first_line,
    in_words,
    is_out_of_memory,
    with_notes,
)

EXIT_BROKEN_PIPE = 141
_LONGEST_WORD = 400
"""Characters of a word in an error; what was typed may be longer."""
_LIBRARIES = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


def command() -> Any:
    """The whole of `srl` as a click command, for the generated documentation."""
    from srl.cli import app

    return app.command()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `srl` with `arguments` (the process's own by default) and return its exit code."""
    for name, value in _LIBRARIES.items():
        os.environ.setdefault(name, value)
    _escape_unencodable()
    try:
        with process.signals_handled():
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
    """Run a command. `plugins list` runs without typer, which takes longer to import than the list takes."""
    if arguments == ["plugins", "list"]:
        from srl.cli.plugins_table import print_list

        print_list()
        return EXIT_OK
    from srl.cli import app

    try:
        app.command().main(args=arguments, prog_name="srl")
    except app.CarriedError as carried:
        return _report(carried.error)
    return EXIT_OK


def _code(stop: SystemExit) -> int:
    if stop.code == EXIT_SIGNAL + SIGINT and process.signal_received():  # typer's
        return _report(stop)
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    _say(stop.code)
    return 1


def _report(error: BaseException) -> int:
    """Print one line for an error and return its exit code."""
    if (signal := process.signal_received()) or isinstance(error, KeyboardInterrupt):
        return _interrupted(error, signal)
    if isinstance(error, BrokenPipeError):
        return EXIT_BROKEN_PIPE
    if isinstance(error, SrlError):
        _say(with_notes(error))
        return error.exit_code
    if message := _environment_error(error):
        _say(with_notes(error, message))
        return EXIT_USER
    _say(_write_traceback(error))
    return EXIT_BUG


def _environment_error(error: BaseException) -> str | None:
    """One line for an error of a file or of the machine (no such file, disk full), else None."""
    from srl.files import is_disk_full, target_of

    if is_out_of_memory(error):
        return f"{first_line(error)} Free the GPU, or lower rollout.max_num_seqs"
    where = getattr(error, "filename", None)
    if is_disk_full(error):
        return f"the disk is full{f' at {where}' if where else ''}; free some space and try again"
    if isinstance(error, OSError):
        return f"{in_words(error)}: {target_of(where)}" if where else in_words(error)
    return None


def _write_traceback(error: BaseException) -> str:
    """Write the traceback to a file; one line with the error and the path of the file."""
    import tempfile
    import traceback

    from srl.safe import safe_message

    what = f"{type(error).__name__}: {error}".partition("\n")[0]
    lines = safe_message("".join(traceback.format_exception(error)))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="srl-traceback-", suffix=".txt", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.write(lines)
    except OSError:
        return f"internal error, {what}; the traceback could not be written:\n{lines}"
    return f"internal error, {what}; please report it with the traceback in {file.name}"


def _interrupted(error: BaseException, signal: Signals | None) -> int:
    """Print what ended the command, and the notes of the error, such as how to resume."""
    what = process.SIGNALS[signal] if signal else "interrupted"
    with suppress(OSError):  # the terminal may be the one that was closed
        _say(with_notes(error, what))
    return EXIT_SIGNAL + (signal or SIGINT)


def _say(message: object) -> None:
    import re

    from srl.cli import output

    text = re.sub(rf"(\S{{{_LONGEST_WORD // 2}}})\S{{{_LONGEST_WORD},}}", r"\1…", str(message))
    output.warn(" ".join(["srl:", *text.split("\n")]))


def _escape_unencodable() -> None:
    """Write characters that the encoding of stdout lacks as escapes, instead of failing."""
    if getattr(sys.stdout, "errors", None) == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _flush() -> int:
    """Flush stdout. If that fails, discard the rest, so that the interpreter exits without another error."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _report(error)
    return EXIT_OK
