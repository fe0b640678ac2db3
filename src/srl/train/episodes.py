"""Runs the episodes of a local run (training, validation, test), scores them and logs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from srl import process
from srl.config import Config
from srl.errors import UserError
from srl.evaluate import summarise
from srl.models.weights import merged_weights
from srl.progress import counted
from srl.reward import RewardMix
from srl.rollout.delivery import NotDelivered, check_held, sampled
from srl.rollout.engine import Engine
from srl.rollout.environment import Environment, Key
from srl.serve.named_retrievers import aclose
from srl.store import LogWriter, Record
from srl.train.background_writes import BackgroundWrites
from srl.train.report import Reporter, Terminal
from srl.train.resume import resume_with, too_many_failures
from srl.trajectory import Phase, Question, Score, Trajectory, failed_episodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Splits:
    """The questions of a run by phase."""

    train: list[Question]
    val: list[Question] = field(default_factory=list)
    test: list[Question] = field(default_factory=list)


@dataclass(slots=True)
class TrainingEnvironment(Environment):
    """An environment with a reward, and the questions of a run."""

    reward: RewardMix
    splits: Splits


@dataclass(slots=True)
class EpisodeRunner:
    """Runs episodes with the policy's engine and writes them to the log.

    One event loop lasts the whole run, so that connections to a search server are kept between steps.
    """

    config: Config
    environment: TrainingEnvironment
    engine: Engine
    log: LogWriter
    terminal: Terminal
    reporters: Sequence[Reporter] = ()
    event_loop: asyncio.Runner = field(default_factory=asyncio.Runner)
    ended: list[Trajectory] = field(default_factory=list)
    """The episodes that have ended since the last call of `roll_out`."""
    _writes: BackgroundWrites = field(default_factory=BackgroundWrites)
    _scoring: dict[int, asyncio.Task[list[Score]]] = field(default_factory=dict)
    """The scores of episodes that have ended, by the identity of the trajectory."""
    _warned: bool = False
    """Whether the user knows of a reward that gave no score."""

    def roll_out(
        self, questions: Sequence[Question], phase: Phase, step: int, n: int = 1
    ) -> list[Trajectory]:
        """`n` episodes per question with the engine's weights; it forgets them at the end.

        All but those to train on are sampled as in an evaluation.

        The reward of each begins when it ends; `score` waits for it.
        """
        environment, self.ended, self._scoring = self.environment, [], {}
        if phase != "train":
            environment = environment.for_evaluation(self.config.eval.temperature)
        environment.reward.load()
        try:
            with self._how_to_go_on(), counted(f"{phase} episodes", n * len(questions)) as count:

                def on_done(trajectory: Trajectory) -> None:
                    self.ended.append(trajectory)
                    task = asyncio.ensure_future(environment.reward.score([trajectory]))
                    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # raised later
                    self._scoring[id(trajectory)] = task
                    count(len(self.ended))

                key = Key(self.config.trainer.seed, phase, step)
                episodes = environment.play_all(self.engine, questions, key, n, on_done)
                return process.run_async(episodes, self.event_loop)
        finally:
            self.engine.reset()

    def give_weights(self, model: PreTrainedModel) -> None:
        """Have the engine generate with the weights of `model` where it has a copy of its own.

        Raises NotDelivered where it holds others afterwards.
        """
        if self.engine.same_weights:
            return
        try:
            sample: dict[str, Any] = {}
            self.engine.sync(sampled(merged_weights(model), sample))
            check_held(sample, self.engine.digests(sample))
        except NotDelivered as error:
            error.add_note(resume_with(self.log.directory.parent))
            raise

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        """One score for each trajectory of the last `roll_out`, in order. A missing one is told."""

        async def scored() -> list[Score]:
            return [(await self._scoring[id(trajectory)])[0] for trajectory in trajectories]

        with self._how_to_go_on():
            scores = process.run_async(scored(), self.event_loop)
        fault = next((score.error for score in scores if score.error), "")
        if fault and not self._warned:
            self.terminal.note(f"warning: {fault}")
            self._warned = True
        return scores

    @contextmanager
    def _how_to_go_on(self) -> Iterator[None]:
        """Adds what to type to an error of what episodes depend on, such as a judge's server or a plugin."""
        try:
            yield
        except UserError as error:
            error.add_note(f"once it works again, {resume_with(self.log.directory.parent)}")
            raise

    def check_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises UserError where too many of these scored episodes failed: a reward may have failed one."""
        failures = failed_episodes(trajectories)
        if not failures.failed:
            return
        if error := too_many_failures(self.log.directory.parent, failures, self.config.search.max_failed):
            raise error

    def evaluate(self, phase: Phase, step: int) -> dict[str, float]:
        """Metrics of one episode per question of `val` or `test` at `eval.temperature`; {} without questions.

        Raises UserError, and logs nothing, where too many episodes failed.
        """
        questions: list[Question] = getattr(self.environment.splits, phase)
        if not questions:
            return {}
        start = time.perf_counter()
        trajectories = self.roll_out(questions, phase, step)
        scores = self.score(trajectories)
        self.check_failures(trajectories)
        metrics = summarise(trajectories, scores, phase)
        metrics["timing_s/testing"] = time.perf_counter() - start
        self.record(step, phase, list(map(Record, trajectories, scores)), metrics)
        self.terminal.evaluation(phase, step, metrics)
        return metrics

    def record(
        self, step: int, phase: Phase, records: Sequence[Record], metrics: Mapping[str, float]
    ) -> None:
        """Write a finished step or evaluation to the log and the external loggers.

        The log is written while training goes on, one step at a time. Raises the error of an earlier write.
        """
        self.wait_for_log()
        self._writes.do(self.log.write, step, phase, records, dict(metrics))
        for reporter in self.reporters:
            reporter.metrics(step, metrics)

    def wait_for_log(self) -> None:
        """Wait until the log has all that was recorded, as before a checkpoint is saved and the log is read.

        Raises the error of a failed write.
        """
        self._writes.wait()

    def close(self) -> None:
        """Wait for the log, and close the engine and the connections to a search server."""
        with ExitStack() as last:
            last.callback(self.event_loop.close)
            last.callback(lambda: process.run_async(aclose(self.environment.search), self.event_loop))
            last.callback(self.engine.close)
            last.callback(self._writes.close)
