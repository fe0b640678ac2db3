"""A cache of results and pages, and the SQLite files of cache and ledger, which processes share."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from srl.errors import UserError
from srl.files import check_format
from srl_web.api import Result

log = logging.getLogger("srl.web")

_FORMAT = 1
_DAY = 86400.0


def open_file(path: Path, option: str) -> sqlite3.Connection:
    """Open a SQLite file in write-ahead mode, and create it if necessary.

    Raises UserError that names the option if the file cannot be written, is not a SQLite file, or has a
    newer format.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found:
            check_format(path, found)
        connection.execute(f"PRAGMA user_version={_FORMAT}")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; choose another {option}=PATH"
        ) from error
    except sqlite3.Error as error:
        raise UserError(
            f"{path} cannot be used ({error}); remove it or choose another {option}=PATH"
        ) from error
    return connection


def cache_path(chosen: str | Path | None) -> Path | None:
    """The path of the cache; `user` is a file in the user's cache directory."""
    if chosen is None or isinstance(chosen, Path):
        return chosen
    return user_cache() / "web.sqlite"


def user_cache() -> Path:
    """The directory of the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "srl"


class Cache:
    """Results by request, and page texts by URL. Without a file it is empty.

    If the cache fails, a warning is logged and searches continue without it.
    """

    def __init__(
        self,
        connection: sqlite3.Connection | None,
        days: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._connection = connection
        self._seconds = None if days is None else days * _DAY
        self._clock = clock
        if connection is not None:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS kept "
                "(key TEXT PRIMARY KEY, value TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID"
            )

    def results(self, key: str) -> list[Result] | None:
        """The results stored as `key`; None if there are none or they are too old."""
        found = self._get("results:" + key)
        return None if found is None else [Result(*item) for item in json.loads(found)]

    def keep_results(self, key: str, results: list[Result]) -> None:
        self._put("results:" + key, json.dumps(results, ensure_ascii=False))

    def page(self, url: str) -> str | None:
        """The text of the page at `url`; None if it is not stored or too old."""
        return self._get("page:" + url)

    def keep_page(self, url: str, text: str) -> None:
        self._put("page:" + url, text)

    def _get(self, key: str) -> str | None:
        since = 0.0 if self._seconds is None else self._clock() - self._seconds
        rows = self._run("SELECT value FROM kept WHERE key = ? AND at >= ?", (key, since))
        return str(rows[0][0]) if rows else None

    def _put(self, key: str, value: str) -> None:
        self._run("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", (key, value, self._clock()))

    def _run(self, statement: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        if self._connection is None:
            return []
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            log.warning("the cache of web search failed and is no longer used: %s", error)
            self._connection = None
            return []
