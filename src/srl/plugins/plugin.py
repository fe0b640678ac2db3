"""What is known of a plugin before it is used, and what its code raises, in one line."""

from __future__ import annotations

import logging
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

from srl.safe import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plugin:
    """One registered plugin, or one with an `error`: it could not be imported, or its name is taken."""

    kind: str
    name: str
    package: str
    version: str
    summary: str
    error: str = ""
    factory: str | Callable[..., object] | None = None
    options: str | type[BaseModel] | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.package} {self.version})"


def in_one_line(error: BaseException) -> str:
    """`KeyError: 'x' (mine.py:3)`; the log gets the traceback at level DEBUG, which `-v` shows."""
    _logger.debug("a plugin's code raised an error", exc_info=error)
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    what = f"{type(error).__name__}: {message}" if message else type(error).__name__
    where = _raised_at(error)
    return quoted(what) + (f" ({where})" if where else "")


def _raised_at(error: BaseException) -> str:
    """File and line of the innermost call in the user's files, else of that in an installed package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    root, python = f"{Path(__file__).parent.parent}/", f"{sysconfig.get_path('stdlib')}/"
    packages = (f"{sysconfig.get_path('purelib')}/", f"{sysconfig.get_path('platlib')}/")
    calls = [call for call in extract_tb(error.__traceback__) if not call.filename.startswith(("<", root))]
    users = [call for call in calls if not call.filename.startswith((python, *packages))]
    installed = [call for call in calls if call.filename.startswith(packages)]
    return next((f"{call.filename}:{call.lineno}" for call in reversed(users or installed)), "")
