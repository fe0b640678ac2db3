"""Keeps what an API answered, so that it is paid for once: an SQLite file that processes share."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from srl.errors import UserError
from srl.files import FORMAT, check_format
from srl_web.api import Result

log = logging.getLogger("srl.web")
_TABLE = "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT, at REAL)"
DAYS = 30
"""Results older than this are requested again."""


class Cache:
    """Results by key, in the file `path`; None: nothing is kept.

    Each access opens the file, so threads and forked processes may share a cache. If it fails later, a
    warning is logged once and searches go on without it. Raises UserError if the file cannot be used.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open(path)) as connection:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                check_format(path, version or FORMAT)
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(f"PRAGMA user_version={FORMAT}")
                connection.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"{path} cannot be used as a cache: {error}",
                key="retriever.web.cache",
                hint="choose another cache=PATH, or cache=null for none",
            ) from error

    def get(self, key: str) -> list[Result] | None:
        """The results stored as `key`; None if there are none or they are too old."""
        since = self._clock() - DAYS * 86400
        rows = self._run("SELECT value FROM kept WHERE key = ? AND at >= ?", (key, since))
        return [Result(*parts) for parts in json.loads(str(rows[0][0]))] if rows else None

    def put(self, key: str, results: list[Result]) -> None:
        self._run("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", (key, json.dumps(results), self._clock()))

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=30, isolation_level=None)

    def _run(self, statement: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        if self._path is None:
            return []
        try:
            with closing(self._open(self._path)) as connection:
                return connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            log.warning("the cache of web search failed and is no longer used: %s", error)
            self._path = None
            return []


def users_cache() -> Path:
    """The file in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "srl", "web.sqlite")
