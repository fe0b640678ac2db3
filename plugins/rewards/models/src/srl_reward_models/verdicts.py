"""The verdicts of judges, kept in a SQLite file by what was asked, which processes share."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from srl.errors import UserError
from srl.files import check_format

log = logging.getLogger(__name__)
_FORMAT = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS prompts (version TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, verdict TEXT NOT NULL, model TEXT NOT NULL, prompt_version TEXT NOT NULL,
    question TEXT NOT NULL, golden_answers TEXT NOT NULL, answer TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cost REAL, written REAL NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Case:
    """What a verdict depends on: the question, its golden answers, the answer, and who judges how."""

    question: str
    golden_answers: tuple[str, ...]
    answer: str
    prompt_version: str
    model: str

    @property
    def key(self) -> str:
        """32 hex digits, the same for the same contents."""
        parts = (self.question, self.golden_answers, self.answer, self.prompt_version, self.model)
        return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge said, and what asking took; `cost` is in the currency of the prices, None without."""

    verdict: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None


class Verdicts:
    """The verdicts known so far: those of this process, and those in the file at `path`, if there is one.

    Used by one thread. A file that fails later is given up with a warning: what it held is asked again.
    Raises UserError for a file that cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._known = path, dict[str, str]()
        self._file = None if path is None else _open(path)

    def get(self, case: Case) -> str | None:
        """The verdict on `case`; None if nobody has asked."""
        if case.key not in self._known and self._file is not None:
            try:
                found = self._file.execute(
                    "SELECT verdict FROM verdicts WHERE key = ?", (case.key,)
                ).fetchone()
            except sqlite3.Error as error:
                self._give_up(error)
                return None
            if found:
                self._known[case.key] = found[0]
        return self._known.get(case.key)

    def keep(self, case: Case, found: Verdict, prompt: str) -> None:
        """Remember a verdict, with the text of the prompt that its version stands for."""
        self._known[case.key] = found.verdict
        if self._file is None:
            return
        row = (
            case.key, found.verdict, case.model, case.prompt_version, case.question,
            json.dumps(case.golden_answers, ensure_ascii=False), case.answer, found.prompt_tokens,
            found.completion_tokens, found.cost, time.time(),
        )  # fmt: skip
        try:
            with self._file:
                self._file.execute(
                    "INSERT OR IGNORE INTO prompts VALUES (?, ?)", (case.prompt_version, prompt)
                )
                self._file.execute(
                    f"INSERT OR IGNORE INTO verdicts VALUES ({', '.join('?' * len(row))})", row
                )
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: sqlite3.Error) -> None:
        log.warning("reward.judge.cache: %s failed and is no longer used (%s)", self._path, error)
        self._file = None


def cache_path(chosen: str | Path | None) -> Path | None:
    """The path of the cache; `user` is a file in the user's cache directory."""
    if chosen != "user":
        return None if chosen is None else Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "srl" / "verdicts.sqlite"


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=30)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        if found := connection.execute("PRAGMA user_version").fetchone()[0]:
            check_format(path, found)
        connection.executescript(_TABLES + f"PRAGMA user_version={_FORMAT};")
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"reward.judge.cache: {path} cannot be written: {why}; name another file") from error
    except sqlite3.Error as error:
        raise UserError(
            f"reward.judge.cache: {path} cannot be used ({error}); remove it, or name another file"
        ) from error
    return connection
