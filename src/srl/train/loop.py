"""A run in this process: it samples, scores, steps, logs, validates, saves and resumes.

Reinforcement learning (`srl.train.rl`), fine-tuning (`srl.train.sft`) and rejection sampling
(`srl.train.rejection_sampling`) differ in the step. The log alone has the results of steps and evaluations, a
checkpoint the state to go on from; so a resumed run makes nothing again that its log has up to its
checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from srl import process
from srl.config import Config
from srl.errors import UserError, first_line
from srl.evaluate import summarise
from srl.models.check import OutputsNotFinite
from srl.models.weights import merged_weights
from srl.progress import counted
from srl.reward import RewardMix
from srl.rollout.delivery import check_held, sampled
from srl.rollout.engine import Engine, LogitsNotFinite
from srl.rollout.environment import Environment
from srl.rollout.episode import Key
from srl.serve.named_retrievers import aclose
from srl.store import LogWriter, Record, RunInfo
from srl.train.checkpoint import delete_checkpoints, load_checkpoint, save_checkpoint
from srl.train.load_protocol import card_of_run
from srl.train.questions import Splits
from srl.train.report import Reporter, Terminal, reporters
from srl.train.resume import too_many_failures, without_damaged
from srl.train.run_directory import (
    LOG,
    Progress,
    checkpoint_path,
    checkpoints,
    due,
    superseded_checkpoints,
)
from srl.train.search import index_digests
from srl.train.watches import Fired, Watcher, how_to_start_again, to_act_on
from srl.trajectory import Phase, Question, Score, Trajectory, failed_episodes
from srl.update.critic import Critic
from srl.update.optimiser import Optimiser

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True, kw_only=True)
class Loop:
    """A run that is loaded and checked; `train` makes its steps.

    All randomness is keyed by seed and step, so a resumed run continues as if it had not stopped. One event
    loop lasts the whole run, so that connections to a search server are kept between steps.
    """

    config: Config
    terminal: Terminal
    splits: Splits
    environment: Environment
    reward: RewardMix
    engine: Engine
    actor: PreTrainedModel
    critic: Critic | None = None
    optimisers: dict[str, Optimiser] = field(default_factory=dict)
    where: str = ""
    """What the run computes on, in words."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Digests of what it is made from, as in `run.json`."""
    watcher: Watcher | None = None
    progress: Progress = field(default_factory=Progress)
    run: Path = Path()
    log: LogWriter = field(init=False)
    ended: list[Trajectory] = field(default_factory=list)
    """The episodes that have ended since the last call of `roll_out`."""
    event_loop: asyncio.Runner = field(default_factory=asyncio.Runner)
    _reporters: Sequence[Reporter] = ()
    _writer: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    _written: Future[None] | None = None
    """The step that is being written to the log, or was last."""
    _scoring: dict[int, asyncio.Task[list[Score]]] = field(default_factory=dict)
    """The scores of episodes that have ended, by the identity of the trajectory."""
    _warned: bool = False
    """Whether the user knows of a reward that gave no score."""
    _asleep: bool = False

    # What differs.

    def step(self, number: int) -> dict[str, float]:
        """Make a step, log it and show it; its metrics."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.config.trainer.total_training_steps

    def begin(self) -> None:
        """Get ready for the first step, or for that after the step of `progress`."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps besides weights and optimisers, as JSON has it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""

    # The skeleton.

    @property
    def questions(self) -> int:
        return len(self.splits.train)

    def train(self, run: Path, info: RunInfo, resumed_from: int | None) -> Progress:
        """Train to the end of the run, from the checkpoint of the step `resumed_from` if there is one (−1:
        from the start; None: a new run). An interruption leaves log and checkpoints to be resumed."""
        self.run = run
        with (
            reporters(self.config, run, resumed_from) as self._reporters,
            LogWriter(run / LOG, info, warn=lambda text: self.terminal.note(f"warning: {text}")) as self.log,
            closing(self),
        ):
            if resumed_from is not None:
                self.resume(max(0, resumed_from))
            self.begin()
            self.give_weights()
            self._to_the_end()
            self.wait_for_log()
        return self.progress

    def close(self) -> None:
        """Wait for the log, and close the engine and the connections to a search server."""
        with ExitStack() as last:
            last.callback(self.event_loop.close)
            last.callback(lambda: process.run_async(aclose(self.environment.search), self.event_loop))
            last.callback(self.engine.close)
            last.callback(self._writer.shutdown)

    def resume(self, step: int) -> None:
        """Load the checkpoint of `step`, and drop from the log what came after it."""
        if step:
            checkpoint = checkpoint_path(self.run, step)
            with without_damaged(checkpoint):
                self.load_state(load_checkpoint(checkpoint, self, self.optimisers))
            self.terminal.note(f"from {checkpoint.name}")
        self.log.drop_steps_after(step)
        self.progress = Progress.of_log(self.run / LOG, step)
        if self.watcher:
            self.watcher.look_back(self.run / LOG)
            self.log.write_watches(self.watcher.rows())

    def _to_the_end(self) -> None:
        """The steps that are left; evaluations before the first one and after the last."""
        try:
            if self.progress.step == 0 and self.config.trainer.val_before_train:
                if 0 not in self.progress.val_em:
                    self._act_on(self._validate())
                self._test()
            if self.progress.step:
                self._save_and_validate()
            while self.progress.step < self.steps:
                self._make_step(self.progress.step + 1)
                self._save_and_validate()
            self._test()
        except (LogitsNotFinite, OutputsNotFinite) as error:
            if self.progress.step:
                error.add_note(self._how_to_start_again(self.progress.step))
            raise

    def _make_step(self, number: int) -> None:
        with self._saved_if_stopped():
            metrics = self.step(number)
        self.progress.note(number, "train", metrics)
        if self.watcher:
            self._act_on(self.watcher.observe(number, "train", metrics))

    def _save_and_validate(self) -> None:
        """What is due after the last step and not done: its checkpoint, before the validation, which may take
        long. The validation decides which checkpoints stay, and a watch whether the run goes on."""
        step, fired, trainer = self.progress.step, list[Fired](), self.config.trainer
        with self._saved_if_stopped():
            if self._is_due(trainer.save_freq):
                self._save()
            if trainer.test_freq and self._is_due(trainer.test_freq) and step not in self.progress.val_em:
                fired = self._validate()
        self._act_on(fired)
        delete_checkpoints(
            self.run, superseded_checkpoints(self.run, trainer.max_ckpt_to_keep, val_em=self.progress.val_em)
        )

    def _is_due(self, every: int) -> bool:
        return self.progress.step == self.steps or due(self.progress.step, every)

    # Episodes, with the engine of the policy.

    def roll_out(
        self, questions: Sequence[Question], phase: Phase, step: int, n: int = 1
    ) -> list[Trajectory]:
        """`n` episodes per question with the engine's weights; it forgets them at the end.

        All but those to train on are sampled as in an evaluation. Each is scored from when it ends on;
        `score` waits for that.
        """
        environment, self.ended, self._scoring = self.environment, [], {}
        if phase != "train":
            environment = environment.for_evaluation(self.config.eval.temperature)
        self.reward.load()
        try:
            with counted(f"{phase} episodes", n * len(questions)) as count:

                def on_done(trajectory: Trajectory) -> None:
                    self.ended.append(trajectory)
                    task = asyncio.ensure_future(self.reward.score([trajectory]))
                    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # raised later
                    self._scoring[id(trajectory)] = task
                    count(len(self.ended))

                key = Key(self.config.trainer.seed, phase, step)
                episodes = environment.play_all(self.engine, questions, key, n, on_done)
                return process.run_async(episodes, self.event_loop)
        finally:
            self.engine.reset()

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        """One score for each trajectory of the last `roll_out`, in order. A missing one is told.

        A reward that cannot score an episode marks it failed: which are valid is settled only here.
        """

        async def scored() -> list[Score]:
            return [(await self._scoring[id(trajectory)])[0] for trajectory in trajectories]

        scores = process.run_async(scored(), self.event_loop)
        fault = next((score.error for score in scores if score.error), "")
        if fault and not self._warned:
            self.terminal.note(f"warning: {fault}")
            self._warned = True
        return scores

    def check_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises UserError where too many of these scored episodes failed: a reward may have failed one."""
        limit = self.config.search.max_failed
        if error := too_many_failures(self.run, failed_episodes(trajectories), limit):
            raise error

    def evaluate(self, phase: Phase, step: int) -> dict[str, float]:
        """Metrics of one episode per question of `val` or `test` at `eval.temperature`; {} without questions.

        Raises UserError, and logs nothing, where too many episodes failed.
        """
        questions: list[Question] = getattr(self.splits, phase)
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
        self._written = self._writer.submit(self.log.write, step, phase, records, dict(metrics))
        for reporter in self._reporters:
            reporter.metrics(step, metrics)

    def wait_for_log(self) -> None:
        """Wait until the log has all that was recorded, as before a checkpoint is saved and the log is read.

        Raises the error of a failed write.
        """
        if self._written is not None:
            self._written.result()

    # The engine, which has the memory while the weights do not change.

    def put_to_sleep(self) -> None:
        if not self._asleep:
            self.engine.sleep()
            self._asleep = True

    def wake(self) -> None:
        """Have the engine generate with the weights as they are."""
        if self._asleep:
            self.give_weights()
            self.engine.wake()
            self._asleep = False

    def give_weights(self) -> None:
        """Have the engine generate with the policy's weights where it has a copy of its own.

        Raises NotDelivered where it holds others afterwards.
        """
        if self.engine.same_weights:
            return
        sample: dict[str, Any] = {}
        self.engine.sync(sampled(merged_weights(self.actor), sample))
        check_held(sample, self.engine.digests(sample))

    # Evaluations, whose results are in the log.

    def _validate(self) -> list[Fired]:
        """Evaluate the validation questions; the watches that fire."""
        self.wake()
        metrics = self.evaluate("val", self.progress.step)
        if not metrics:
            return []
        self.progress.note(self.progress.step, "val", metrics)
        return self.watcher.observe(self.progress.step, "val", metrics) if self.watcher else []

    def _test(self) -> None:
        """Evaluate the test questions, unless the log has them; they choose nothing."""
        if self.progress.step in self.progress.test_em:
            return
        self.wake()
        if metrics := self.evaluate("test", self.progress.step):
            self.progress.note(self.progress.step, "test", metrics)

    def _act_on(self, fired: list[Fired]) -> None:
        """Note the watches that fired. Raises UserError where one stops the run."""
        for watch in fired:
            self.terminal.note(f"warning: {watch}")
        if fired and self.watcher:
            self.log.write_watches(self.watcher.rows())
        if stops := to_act_on(fired):
            raise UserError(f"stopped by {stops}", hint=self._how_to_start_again(stops.since))

    def _how_to_start_again(self, since: int) -> str:
        return how_to_start_again(self.run, self.config, self.progress.val_em, since)

    # Checkpoints.

    def _save(self, state: dict[str, Any] | None = None) -> None:
        """Save the checkpoint of the last step, unless it is there, once the log has the step."""
        path, saved = checkpoint_path(self.run, self.progress.step), checkpoints(self.run)
        if self.progress.step in saved:
            return
        self.wait_for_log()
        environment = self.environment
        digests = index_digests(environment.search)
        card = {"step": self.progress.step, **card_of_run(self.config, environment.protocol, digests)}
        save_checkpoint(
            path, self, environment.codec.tokenizer, self.optimisers, state or self.state(), card,
            is_first=not saved,
        )  # fmt: skip

    @contextmanager
    def _saved_if_stopped(self) -> Iterator[None]:
        """A run that is stopped loses only the step under way: save the state before the body where a signal,
        a UserError or a GPU without memory ends it.

        Not once the body has begun to change weights, since the state before is gone, and not at step 0 or
        where `trainer.save_freq` is 0. A checkpoint that cannot be written is noted, and the body's error
        raised.
        """
        step, state = self.progress.step, self.state()
        begun = [optimiser.begun for optimiser in self.optimisers.values()]
        try:
            yield
        except (KeyboardInterrupt, UserError, torch.OutOfMemoryError):
            is_whole = begun == [optimiser.begun for optimiser in self.optimisers.values()]
            if self.config.trainer.save_freq and step > 0 and is_whole and step not in checkpoints(self.run):
                self.terminal.note(f"stopping: saving the checkpoint of step {step}")
                try:
                    self._save(state)
                except (UserError, OSError) as error:
                    self.terminal.note(
                        f"warning: the checkpoint of step {step} was not saved: {first_line(error)}"
                    )
            raise
