"""What was paid for once: a SQLite file, by default in the user's cache directory, that processes share."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import FORMAT, check_format

log = logging.getLogger(__name__)


class UserCache:
    """`tables`, made by these statements of SQL, in the file `chosen`; None: nothing is kept.

    `user` stands for the file `name` in the user's cache directory. Each access opens the file, so threads
    and forked processes may share it. One that fails later is given up with a warning. Raises UserError, with
    the setting `key`, if the file is no such cache.
    """

    def __init__(self, location: Path | str | None, name: str, tables: str, key: str) -> None:
        if location == "user":
            location = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "srl", name)
        self._path, self._key = None if location is None else Path(location), key
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=30)) as connection:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                check_format(self._path, version or FORMAT)
                connection.execute("PRAGMA journal_mode=WAL")
                connection.executescript(f"{tables}; PRAGMA user_version={FORMAT};")
        except (OSError, sqlite3.Error) as error:
            what = f"{self._path} cannot be used as a cache: {error}"
            raise UserError(what, key=key, hint="choose another file, or null for none") from error

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of one statement; none without a file."""
        if self._path is None:
            return []
        try:
            with closing(sqlite3.connect(self._path, timeout=30, isolation_level=None)) as connection:
                return connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            log.warning("%s: %s failed and is no longer used: %s", self._key, self._path, error)
            self._path = None
            return []
