"""A search with scripted outcomes, for cassettes to record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from srl.serve.cassette import Recorder, Replay
from srl.serve.named_retrievers import aclose
from srl.trajectory import Hit, Passage, Search, current_episode


class Scripted:
    """Answers from a list of outcomes for each query, one after the other, the last for ever."""

    def __init__(self, **outcomes: Sequence[Search]) -> None:
        self.outcomes = {query: list(found) for query, found in outcomes.items()}
        self.index_digest = "d" * 32
        self.closed = 0

    async def search(self, query: str) -> Search:
        found = self.outcomes[query]
        return found.pop(0) if len(found) > 1 else found[0]

    async def aclose(self) -> None:
        self.closed += 1


def hit(text: str, score: float = 1.0) -> Hit:
    return Hit(Passage(text, f'"{text}"\n{text}'), score)


def ok(query: str, *texts: str, **fields: Any) -> Search:
    return Search(query, tuple(hit(text) for text in texts), index_digest="d" * 32, **fields)


def ask(search: Recorder | Replay, *queries: str, episode: str = "") -> list[Search]:
    async def in_turn() -> list[Search]:
        current_episode.set(episode)
        try:
            return [await search.search(query) for query in queries]
        finally:
            await aclose(search)

    return asyncio.run(in_turn())
