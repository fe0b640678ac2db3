"""Many episodes at once, independent of each other: a slow search delays its own episode only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NotRequired, TypedDict, Unpack

from srl.protocol import Template
from srl.rollout.codec import Codec
from srl.rollout.engine import Engine
from srl.rollout.episode import EpisodeOptions, run_episode
from srl.trajectory import Phase, Question, SearchTool, Trajectory

ATTEMPTS = 2
"""The most often that an episode is sampled while its searches, or the engine, fail."""


class Shared(TypedDict):
    """The arguments of `run_episode` that many episodes share."""

    codec: Codec
    template: Template
    options: EpisodeOptions
    seed: NotRequired[int]
    step: NotRequired[int]
    phase: NotRequired[Phase]


async def run_again_if_failed(
    question: Question, sample: int, engine: Engine, search: SearchTool | None, **shared: Unpack[Shared]
) -> Trajectory:
    """The episode, sampled once more if a fault ended it. The second may be `failed` too."""
    for attempt in range(ATTEMPTS):
        trajectory = await run_episode(question, engine, search, sample=sample, attempt=attempt, **shared)
        if trajectory.valid:
            break
    return trajectory


async def rollout(
    questions: Sequence[Question],
    engine: Engine,
    search: SearchTool | None,
    *,
    n: int = 1,
    on_done: Callable[[Trajectory], None] | None = None,
    **shared: Unpack[Shared],
) -> list[Trajectory]:
    """`n` trajectories for each question, in the order of the questions, samples of a question together.

    `on_done` is called with each trajectory as it ends. The first exception cancels the other episodes and
    is raised.
    """

    async def one(question: Question, sample: int) -> Trajectory:
        trajectory = await run_again_if_failed(question, sample, engine, search, **shared)
        if on_done is not None:
            on_done(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(question, k)) for question in questions for k in range(n)]
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    return [task.result() for task in tasks]


async def stream(
    wanted: Iterable[tuple[Question, int]],
    engine: Engine,
    search: SearchTool | None,
    *,
    at_once: int,
    on_done: Callable[[Trajectory], Awaitable[None]],
    **shared: Unpack[Shared],
) -> None:
    """Run an episode for each question and sample number of `wanted`, at most `at_once` at a time.

    An ended one is given to `on_done` and forgotten; the next begins when that has returned. The first
    exception cancels the other episodes and is raised.
    """
    waiting = iter(wanted)

    async def take() -> None:
        for question, sample in waiting:
            await on_done(await run_again_if_failed(question, sample, engine, search, **shared))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(take())
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
