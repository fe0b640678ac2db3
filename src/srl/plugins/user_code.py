"""Errors that a plugin's code raises, in one line with the file and line where they were raised."""

from __future__ import annotations

import logging
import sysconfig
from pathlib import Path
from traceback import walk_tb

from srl.safe import quoted

log = logging.getLogger(__name__)


def in_one_line(error: BaseException) -> str:
    """`KeyError: 'x' (mine.py:3)`; the log gets the traceback at level DEBUG, which `-v` shows."""
    log.debug("a plugin's code raised an error", exc_info=error)
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    where = _raised_at(error)
    return quoted(what.partition("\n")[0]) + (f" ({where})" if where else "")


def _raised_at(error: BaseException) -> str:
    """File and line of the innermost call in neither `srl` nor a library, else of the innermost call.

    For a syntax error, file and line of the source that could not be read.
    """
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{error.filename}:{error.lineno}"
    calls = [(frame, line) for frame, line in walk_tb(error.__traceback__)]
    places = [
        (f"{frame.f_code.co_filename}:{line}", frame.f_globals.get("__name__", ""))
        for frame, line in calls
        if not frame.f_code.co_filename.startswith("<")
    ]
    users = [place for place, module in places if not _is_library(place, module)]
    return next(reversed(users or [place for place, _ in places]), "")


def _is_library(file: str, module: str) -> bool:
    if module.partition(".")[0] == "srl":
        return True
    folders = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return any(file.startswith(f"{folder}/") for folder in folders)
