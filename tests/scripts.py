"""Scripted episodes for tests: an engine that says given texts, a search that answers from a table."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from srl.protocol import TEMPLATES, Template
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Engine, Sampling, ScriptedEngine
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions, Key, run_episode
from srl.trajectory import Hit, Passage, Question, Search, SearchTool, Trajectory

QUESTION = Question("q/0", "Who built the lighthouse of Velmar?", ("Ossa Trell",), "made-up")
PAGE = Passage("velmar", '"Velmar"\nThe lighthouse of Velmar was built by Ossa Trell.')


class TableSearch:
    """Answers every query from a table; `outcomes` are returned first, one a call."""

    def __init__(self, passages: Sequence[Passage] = (PAGE,), outcomes: Sequence[Search] = ()) -> None:
        self.hits = tuple(Hit(passage, 1.0 / rank) for rank, passage in enumerate(passages, start=1))
        self.outcomes = list(outcomes)
        self.queries: list[str] = []

    async def search(self, query: str) -> Search:
        self.queries.append(query)
        if not query:
            return Search(query, status="rejected", error="empty query")
        return self.outcomes.pop(0) if self.outcomes else Search(query, self.hits)


class RecordingEngine(ScriptedEngine):
    """A scripted engine that keeps the contexts and samplings it was called with."""

    def __init__(self, codec: Codec, turns: Sequence[str]) -> None:
        super().__init__(codec, lambda request, turn: turns[turn] if turn < len(turns) else "")
        self.contexts: list[tuple[int, ...]] = []
        self.samplings: list[Sampling] = []
        self.finished: list[str] = []

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.contexts.append(tuple(token_ids))
        self.samplings.append(sampling)
        return await super().generate(request_id, token_ids, sampling)

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)
        super().finish(request_id)


def play(
    codec: Codec,
    turns: Sequence[str],
    search: TableSearch | None = None,
    *,
    question: Question = QUESTION,
    template: Template = TEMPLATES["search-r1"],
    engine: RecordingEngine | None = None,
    options: Mapping[str, Any] | None = None,
) -> Trajectory:
    """One episode in which the engine says `turns`."""
    limits = EpisodeOptions(**{"max_turn_tokens": 200, **(options or {})})
    return asyncio.run(
        run_episode(
            question, engine or RecordingEngine(codec, turns), options=limits,
            protocol=Environment(codec, template, limits, search).protocol,
        )
    )  # fmt: skip


def rollout(
    questions: Sequence[Question],
    engine: Engine,
    search: SearchTool | None,
    *,
    codec: Codec,
    template: Template,
    options: EpisodeOptions,
    n: int = 1,
    **key: Any,
) -> Coroutine[Any, Any, list[Trajectory]]:
    """`n` episodes of each question in an environment of these parts."""
    environment = Environment(codec, template, options, search)
    return environment.play_all(engine, questions, Key(**key), n, lambda trajectory: None)
