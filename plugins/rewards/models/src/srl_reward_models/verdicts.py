"""The verdicts of judges, kept in a SQLite file by what was asked, which processes share."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from srl.user_cache import UserCache

_TABLES = """
CREATE TABLE IF NOT EXISTS prompts (version TEXT PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, verdict TEXT NOT NULL, model TEXT NOT NULL, prompt_version TEXT NOT NULL,
    question TEXT NOT NULL, golden_answers TEXT NOT NULL, answer TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cost REAL, written REAL NOT NULL)
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
    """The verdicts so far: those of this process, and those in the file `chosen` (`user`: the user's cache).

    Raises UserError for a file that is no cache.
    """

    def __init__(self, cache: str | Path | None) -> None:
        self._words = dict[str, str]()
        self._cache = UserCache(cache, "verdicts.sqlite", _TABLES, "reward.judge.cache")

    def get(self, case: Case) -> str | None:
        """The verdict on `case`; None if nobody has asked."""
        if case.key not in self._words:
            rows = self._cache.run("SELECT verdict FROM verdicts WHERE key = ?", case.key)
            self._words.update((case.key, verdict) for (verdict,) in rows)
        return self._words.get(case.key)

    def keep(self, case: Case, verdict: Verdict, prompt: str) -> None:
        """Remember a verdict, with the text of the prompt that its version stands for."""
        self._words[case.key] = verdict.verdict
        row = (
            case.key, verdict.verdict, case.model, case.prompt_version, case.question,
            json.dumps(case.golden_answers, ensure_ascii=False), case.answer, verdict.prompt_tokens,
            verdict.completion_tokens, verdict.cost, time.time(),
        )  # fmt: skip
        self._cache.run("INSERT OR IGNORE INTO prompts VALUES (?, ?)", case.prompt_version, prompt)
        self._cache.run(f"INSERT OR IGNORE INTO verdicts VALUES ({', '.join('?' * len(row))})", *row)
