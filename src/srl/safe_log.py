"""Logging to stderr, without control characters and secrets."""

from __future__ import annotations

import io
import logging
import sys

from srl.safe_text import safe_message


class Stderr(io.TextIOBase):
    """The current `sys.stderr` at each write; a progress bar replaces it while it is shown."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


class SafeFormatter(logging.Formatter):
    """Formats a record and its traceback as safe text."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_message(super().format(record))


def handle_logs() -> None:
    """Write the logs of this process to stderr, unless the root logger already has handlers."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(Stderr())
        handler.setFormatter(SafeFormatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)


def log_to_stderr(everything: int, ours: int) -> None:
    """Log to stderr: from level `everything`, and for `srl` from level `ours`."""
    handle_logs()
    logging.getLogger().setLevel(everything)
    logging.getLogger("srl").setLevel(ours)
