"""The environment of a policy: codec, template, limits and tools. All that generates plays episodes in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from srl.protocol import Template
from srl.rollout.codec import Codec
from srl.rollout.engine import Engine
from srl.rollout.episode import EpisodeOptions, Key, OnProgress, run_episode
from srl.rollout.native import Native
from srl.rollout.protocol import Protocol, SearchCall
from srl.rollout.tags import Tags
from srl.trajectory import Question, SearchTool, Trajectory

ATTEMPTS = 2
"""The most often that an episode is sampled while its searches, or the engine, fail."""


@dataclass(slots=True)
class Environment:
    """Everything around the policy in an episode; `search` is the tool, None where nothing can be searched.

    `native` is the model's own way to call tools; without it policy and tools talk by Search-R1's tags.

    Episodes are independent of each other: a slow search delays its own only. One that a fault of a search or
    of the engine ended is sampled anew, `attempts` times in all; the last may be `failed` too.
    """

    codec: Codec
    template: Template
    options: EpisodeOptions
    search: SearchTool | None
    attempts: int = field(default=ATTEMPTS, kw_only=True)
    native: Native | None = field(default=None, kw_only=True)

    @property
    def protocol(self) -> Protocol:
        """How policy and tools talk here."""
        tools = {} if self.search is None else {"search": SearchCall(self.search)}
        return self.native or Tags(self.codec, self.template, tools, self.options.stop)

    def for_evaluation(self, temperature: float) -> Self:
        """This environment with the sampling of validation, test and evaluation."""
        return replace(self, options=self.options.for_evaluation(temperature))

    async def play(
        self, engine: Engine, question: Question, key: Key = Key(), on_progress: OnProgress | None = None
    ) -> Trajectory:
        """The episode in which `engine` answers `question`."""
        for attempt in range(self.attempts):
            trajectory = await run_episode(
                question, engine, protocol=self.protocol, options=self.options, key=key,
                attempt=attempt, on_progress=on_progress,
            )  # fmt: skip
            if trajectory.valid:
                break
        return trajectory

    async def play_all(
        self,
        engine: Engine,
        questions: Sequence[Question],
        key: Key = Key(),
        n: int = 1,
        on_done: Callable[[Trajectory], object] = lambda trajectory: None,
    ) -> list[Trajectory]:
        """`n` trajectories for each question at once, in the order of the questions, samples together.

        `on_done` is called with each as it ends. The first exception cancels the others and is raised.
        """
        episodes = [(question, key._replace(sample=k)) for question in questions for k in range(n)]
        ended: dict[int, Trajectory] = {}

        async def keep(place: int, trajectory: Trajectory) -> None:
            ended[place] = trajectory
            on_done(trajectory)

        await self.play_each(engine, episodes, keep, len(episodes))
        return [ended[place] for place in range(len(episodes))]

    async def play_each(
        self,
        engine: Engine,
        episodes: Iterable[tuple[Question, Key]],
        on_done: Callable[[int, Trajectory], Awaitable[None]],
        at_once: int,
    ) -> None:
        """Play `episodes`, `at_once` at a time.

        `on_done` gets the place of an ended one, and the next begins when it has returned. The first
        exception cancels the other episodes and is raised.
        """
        waiting = enumerate(episodes)

        async def take() -> None:
            for place, (question, key) in waiting:
                await on_done(place, await self.play(engine, question, key))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(take())
        except ExceptionGroup as several:
            raise several.exceptions[0] from several
