"""The episodes of an evaluation, written to its log as they end; memory does not grow with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from srl.answers import exact_match
from srl.evaluate import wilson_interval
from srl.progress import Count
from srl.rollout.engine import Engine
from srl.rollout.environment import Environment, Key
from srl.serve.named_retrievers import aclose, connect
from srl.store import LogWriter, Record
from srl.trajectory import Question, Trajectory

PAUSE_S = 0.25
"""Seconds between the end of a write to the log and the next one."""

OnWritten = Callable[[Sequence[Trajectory]], None]


async def generate(
    wanted: Sequence[tuple[Question, int]],
    engine: Engine,
    environment: Environment,
    log: LogWriter,
    *,
    at_once: int,
    seed: int = 0,
    on_written: OnWritten = lambda trajectories: None,
) -> None:
    """Run an episode for each question and sample number of `wanted`, `at_once` at a time, into `log`.

    All episodes that have ended are written together, then those that ended meanwhile, and so on: a kill
    loses only the episodes that ran, and those of the last fraction of a second. `on_written` is called with
    those that were written. Raises UserError if a search server does not answer.
    """
    ended: asyncio.Queue[Trajectory | None] = asyncio.Queue(at_once)
    writer = _Writer(log, ended, on_written)

    async def run_episodes() -> None:
        keyed = ((question, Key(seed, "eval", 0, sample)) for question, sample in wanted)
        await environment.play_each(
            engine, keyed, lambda place, trajectory: ended.put(trajectory), min(at_once, len(wanted))
        )
        await ended.put(None)

    try:
        await connect(environment.search)
        async with asyncio.TaskGroup() as group:
            group.create_task(run_episodes())
            group.create_task(writer.run())
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    finally:
        try:
            writer.finish()
        finally:
            await aclose(environment.search)


class RunningEm:
    """Shows the progress of an evaluation with the exact match so far and its interval.

    Wilson's interval with as many trials as questions, as if each had a document of its own, to be quick; the
    table's interval counts samples and documents (`em_interval`).
    """

    def __init__(self, count: Count, done: Iterable[tuple[str, float]]) -> None:
        self._count, self._questions, self._correct, self._episodes = count, set[str](), 0.0, 0
        self._add(done)

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Count these as well."""
        self._add((item.question.id, _exact(item)) for item in trajectories)

    def _add(self, episodes: Iterable[tuple[str, float]]) -> None:
        for question, em in episodes:
            self._questions.add(question)
            self._correct += em
            self._episodes += 1
        if not self._episodes:
            self._count(0)
            return
        mean = self._correct / self._episodes
        low, high = wilson_interval(mean, len(self._questions))
        self._count(self._episodes, f"EM {mean:.3f} ({low:.3f} to {high:.3f})")


def _exact(trajectory: Trajectory) -> float:
    return exact_match(trajectory.answer, trajectory.question.golden_answers) if trajectory.valid else 0.0


class _Writer:
    """Writes the episodes of a queue to the log, again and again, in a thread of its own; None ends them."""

    def __init__(
        self, log: LogWriter, ended: asyncio.Queue[Trajectory | None], on_written: OnWritten
    ) -> None:
        self._log, self._ended, self._on_written = log, ended, on_written
        self._thread = ThreadPoolExecutor(1)
        self._under_way: tuple[Future[None], list[Trajectory]] | None = None

    async def run(self) -> None:
        last = False
        while not last:
            found = [await self._ended.get(), *self._taken()]
            last = None in found
            await asyncio.shield(asyncio.wrap_future(self._start(found)))
            self._end()
            await asyncio.sleep(0 if last else PAUSE_S)

    def finish(self) -> None:
        """Write what is left where `run` was cancelled. Raises the error of a write."""
        try:
            self._end()
            if self._ended.qsize():
                self._start(self._taken())
                self._end()
        finally:
            self._thread.shutdown()

    def _taken(self) -> list[Trajectory | None]:
        return [self._ended.get_nowait() for _ in range(self._ended.qsize())]

    def _start(self, found: Sequence[Trajectory | None]) -> Future[None]:
        batch = [trajectory for trajectory in found if trajectory is not None]
        future = self._thread.submit(self._write, batch)
        self._under_way = future, batch
        return future

    def _end(self) -> None:
        """Wait for the write that is under way, if there is one. Raises its error."""
        if self._under_way is None:
            return
        (future, batch), self._under_way = self._under_way, None
        future.result()
        self._on_written(batch)

    def _write(self, batch: Sequence[Trajectory]) -> None:
        if batch:
            self._log.write(0, "eval", [Record(trajectory) for trajectory in batch], {})
