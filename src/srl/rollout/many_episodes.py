"""Many episodes at once, independent of each other: a slow search delays its own episode only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from srl.protocol import Template
from srl.rollout.codec import Codec
from srl.rollout.engine import Engine
from srl.rollout.episode import EpisodeOptions, run_episode
from srl.trajectory import Phase, Question, SearchTool, Trajectory

ATTEMPTS = 2
"""The most often that an episode is sampled while its searches, or the engine, fail."""


async def resample_if_failed(episode: Callable[[int], Awaitable[Trajectory]]) -> Trajectory:
    """`episode(attempt)`, sampled once more if a fault ended it. The second may be `failed` too."""
    for attempt in range(ATTEMPTS):
        trajectory = await episode(attempt)
        if trajectory.valid:
            break
    return trajectory


async def rollout(
    questions: Sequence[Question],
    engine: Engine,
    search: SearchTool | None,
    *,
    codec: Codec,
    template: Template,
    options: EpisodeOptions,
    n: int = 1,
    seed: int = 0,
    step: int = 0,
    phase: Phase = "train",
    on_done: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """`n` trajectories for each question, in the order of the questions, samples of a question together.

    `on_done` is called with each trajectory as it ends. The first exception cancels the other episodes and
    is raised.
    """
    sample_episode = _sampler(engine, search, codec, template, options, seed, step, phase)

    async def one(question: Question, sample: int) -> Trajectory:
        trajectory = await sample_episode(question, sample)
        if on_done is not None:
            on_done(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(question, sample)) for question in questions for sample in range(n)
            ]
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    return [task.result() for task in tasks]


async def stream(
    wanted: Iterable[tuple[Question, int]],
    engine: Engine,
    search: SearchTool | None,
    *,
    codec: Codec,
    template: Template,
    options: EpisodeOptions,
    at_once: int,
    on_done: Callable[[Trajectory], Awaitable[None]],
    seed: int = 0,
    step: int = 0,
    phase: Phase = "eval",
) -> None:
    """Run an episode for each question and sample number of `wanted`, at most `at_once` at a time.

    An ended one is given to `on_done` and forgotten; the next begins when that has returned. The first
    exception cancels the other episodes and is raised.
    """
    sample_episode = _sampler(engine, search, codec, template, options, seed, step, phase)
    waiting = iter(wanted)

    async def take() -> None:
        for question, sample in waiting:
            await on_done(await sample_episode(question, sample))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(take())
    except ExceptionGroup as several:
        raise several.exceptions[0] from several


def _sampler(
    engine: Engine,
    search: SearchTool | None,
    codec: Codec,
    template: Template,
    options: EpisodeOptions,
    seed: int,
    step: int,
    phase: Phase,
) -> Callable[[Question, int], Awaitable[Trajectory]]:
    """A function that runs the episode of a question and sample number."""

    def run(question: Question, sample: int) -> Awaitable[Trajectory]:
        def episode(attempt: int) -> Awaitable[Trajectory]:
            return run_episode(
                question, engine, search, codec=codec, template=template, options=options,
                seed=seed, step=step, sample=sample, phase=phase, attempt=attempt,
            )  # fmt: skip

        return resample_if_failed(episode)

    return run
