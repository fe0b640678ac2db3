"""Logs on stderr, in which nothing acts on a terminal and no secret is shown."""

from __future__ import annotations

import io
import logging
import sys

from srl.safe_text import safe_message


class Stderr(io.TextIOBase):
    """Whatever stderr is when it is written to: while a bar is shown, what stands above the bar."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


class SafeFormatter(logging.Formatter):
    """Formats a record, its traceback too, as text that is safe to show."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_message(super().format(record))


def handle_logs() -> None:
    """Write this process's logs to stderr. Handlers that the root logger has already stay as they are."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(Stderr())
        handler.setFormatter(SafeFormatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)


def log_to_stderr(everything: int, ours: int) -> None:
    """Log what is at least of level `everything`, and from `srl` of level `ours`, to stderr."""
    handle_logs()
    logging.getLogger().setLevel(everything)
    logging.getLogger("srl").setLevel(ours)
