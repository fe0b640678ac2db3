"""The local backend: reinforcement learning, or fine-tuning, in this process.

`check` and `prepare` load everything for `srl.train.run`; `LocalTrainer` is the loop: roll out, score,
estimate, update, log.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from srl.config import Config
from srl.config.cross_checks import local_errors, truncation_errors
from srl.errors import UserError
from srl.evaluate import step_metrics
from srl.rollout.engine import Engine, LogitsNotFinite
from srl.store import LogWriter, Record, RunInfo
from srl.train.checkpoint import load_newest, save_checkpoint, save_validated
from srl.train.cold_start import demonstration_file, is_cold_started
from srl.train.disk_space import checkpoint_bytes, lack_of_room
from srl.train.dynamic_sampling import REWARD, GroupChoice, Returns, compared, with_metric
from srl.train.episodes import EpisodeRunner, TrainingEnvironment
from srl.train.experience import Learner, make_experience, update_metrics
from srl.train.fine_tuning import Loop, sft_loop
from srl.train.load_components import (
    engine_name,
    load_engine,
    load_environment,
    load_learner,
    load_optimisers,
    load_policy,
    reference_digest,
    samples_as_trained,
)
from srl.train.make_missing import BASE_MODELS, Note
from srl.train.model_card import card_of_run
from srl.train.model_check import check_model
from srl.train.question_order import QuestionOrder, order_of
from srl.train.questions import load_splits
from srl.train.rejection_sampling import rft_loop
from srl.train.report import Terminal, reporters
from srl.train.resume import (
    checkpoint_notes,
    new_run_command,
    tells_how_to_resume_after_faults,
    total_steps,
)
from srl.train.run_directory import LOG, RFT, SFT, Progress, checkpoint_path, due
from srl.train.search import IndexDigests
from srl.train.stopped_run import newest_once_stopped, saved_if_stopped
from srl.train.threads import in_words, set_threads
from srl.train.watched_run import drop_checkpoints_after, how_to_start_again, last_good_checkpoint
from srl.train.watches import Fired, Watcher, to_act_on
from srl.trajectory import Question, Score, Trajectory
from srl.update.actor import ActorLoss, Experience, rows_with_gradient, update_actor
from srl.update.compiling import compile_updates
from srl.update.critic import update_critic
from srl.update.logits import trunk
from srl.update.logprobs import TokenStats
from srl.update.optimiser import Optimiser
from srl.update.rollout_correction import NO_CORRECTION, RolloutCorrection
from srl.workspace import Workspace


@dataclass(slots=True)
class Sampled:
    """All episodes of a step, scored, and the choice of groups that it trains on."""

    choice: GroupChoice
    trajectories: list[Trajectory] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    asked: int = 0
    """The place in the order of questions after those that were asked."""

    def add(self, trajectories: list[Trajectory], scores: list[Score], metric: str, turn_level: bool) -> None:
        """One more generation batch. Raises UserError where the reward has no part `metric`."""
        groups: dict[str, list[Returns]] = {item.question.id: [] for item in trajectories}
        for trajectory, score in with_metric(trajectories, scores, metric, "algorithm.filter_groups.metric"):
            groups[trajectory.question.id].append(compared(score, metric, turn_level))
        self.choice.add(groups)
        self.trajectories += trajectories
        self.scores += scores

    @property
    def kept(self) -> tuple[list[Trajectory], list[Score]]:
        """What is trained on."""
        chosen = self.choice.kept()
        rows = [row for row, item in enumerate(self.trajectories) if item.question.id in chosen]
        return [self.trajectories[row] for row in rows], [self.scores[row] for row in rows]


@dataclass(slots=True)
class LocalTrainer:
    """Trains from `progress.step` to `trainer.total_training_steps`.

    All randomness is keyed by seed and step, so a resumed run continues as if it had not stopped.
    """

    config: Config
    run_directory: Path
    runner: EpisodeRunner
    learner: Learner
    optimisers: dict[str, Optimiser]
    card: dict[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    watcher: Watcher = field(init=False)
    _timings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watcher = Watcher(self.config)

    def run(self) -> Progress:
        """Train to the end and return the progress. Ctrl-C leaves log and checkpoints ready to resume."""
        questions, seed = self.runner.environment.splits.train, self.config.trainer.seed
        order = order_of(questions, self.config.data, seed)
        if self.progress.step == 0:
            self._before()
        try:
            self._to_the_end(order)
        except LogitsNotFinite as error:
            if done := self.progress.step:
                error.add_note(self._how_to_start_again(done))
            raise
        return self.progress

    def _to_the_end(self, order: QuestionOrder) -> None:
        """What is left from `progress` on: a validation that is due, the steps, and the test."""
        if self.progress.awaits_validation:
            self._conclude(self.progress.step, [], saved=True)
        while self.progress.step < self.config.trainer.total_training_steps:
            self._next_step(order)
        if self.progress.step > 0 or self.progress.test_em_start is None:
            self.progress.test_em_end = self.runner.test(self.progress.step)

    def _next_step(self, order: QuestionOrder) -> None:
        step = self.progress.step + 1
        with self._saved_if_stopped():
            fired = self._step(step, order)
        self._conclude(step, fired)

    def _before(self) -> None:
        """Validate before the first step."""
        known = self.progress.val_em or self.progress.test_em_start is not None
        if self.config.trainer.val_before_train and not known:
            self._validate()
            self.progress.test_em_start = self.runner.test(0)

    def _step(self, step: int, order: QuestionOrder) -> list[Fired]:
        """One training step, and its entry in the log; the watches that fire on it."""
        self._timings = {}
        with self._timed("step"):
            sampled = self._sample(step, order)
            with self._engine_asleep():
                experience, metrics = make_experience(self.learner, *sampled.kept, self._timed)
                experience, updated = self._update(step, experience)
                metrics |= updated
        self._note_made(step, sampled)
        metrics |= step_metrics(sampled.trajectories, sampled.scores) | sampled.choice.metrics()
        metrics |= {f"timing_s/{name}": seconds for name, seconds in self._timings.items()}
        self.runner.record(step, "train", _all_records(sampled, experience), metrics)
        self.runner.terminal.step(step, self.config, metrics)
        if due(step, self.config.trainer.sample_freq):
            self.runner.terminal.samples(*sampled.kept, self.config.trainer.sample_count)
        return self.watcher.observe(step, "train", metrics)

    def _note_made(self, step: int, sampled: Sampled) -> None:
        """Count the step, with what it asked. A step that was stopped before asks the same again."""
        self.progress.step = step
        self.progress.seconds += self._timings["step"]
        self.progress.asked = sampled.asked

    def _conclude(self, step: int, fired: list[Fired], saved: bool = False) -> None:
        """Save and validate where due, and do what the watches ask for that fired on the step or now.

        A checkpoint is saved before the validation, which may take long, and gets its result afterwards. It
        is `saved` already where the run was stopped between the two.
        """
        trainer, acts = self.config.trainer, to_act_on(fired) is not None
        saves, validates = self._is_last_or_due(step, trainer.save_freq), self._validates(step)
        if validates and not acts:
            self.progress.awaits_validation = True
            if saves and not saved:
                saved = True
                self._save_whole(None)
        with nullcontext() if acts else self._saved_if_stopped():
            found = [*fired, *(self._validate() if validates else [])]
        self.progress.awaits_validation = False
        if saved and to_act_on(found):
            drop_checkpoints_after(self.run_directory, step - 1)
        self._act_on(found)
        if saved:
            self._note_state()
            save_validated(
                self.run_directory, self.progress, trainer.max_ckpt_to_keep, trainer.keep_best_ckpt
            )
        elif saves:
            self._save_whole(trainer.max_ckpt_to_keep)

    def _validates(self, step: int) -> bool:
        every = self.config.trainer.test_freq
        return every > 0 and self._is_last_or_due(step, every)

    def _validate(self) -> list[Fired]:
        with tells_how_to_resume_after_faults(self.run_directory):
            metrics = self.runner.validate(self.progress)
        return self.watcher.observe(self.progress.step, "val", metrics)

    def _saved_if_stopped(self) -> AbstractContextManager[None]:
        """`saved_if_stopped` for the state as it is now."""
        self._note_controllers()
        return saved_if_stopped(
            self.run_directory, self.config.trainer, self.progress, self.optimisers.values(),
            self._save_as_noted, self.runner.terminal.note,
        )  # fmt: skip

    def _is_last_or_due(self, step: int, every: int) -> bool:
        return step == self.config.trainer.total_training_steps or due(step, every)

    def _save_whole(self, keep: int | None) -> None:
        """`_save`, anew where a signal stops it."""
        try:
            self._save(keep)
        except KeyboardInterrupt:
            with self._saved_if_stopped():
                raise

    def _save(self, keep: int | None) -> None:
        """Save a checkpoint, and delete all but the newest `keep` (None: delete none)."""
        self._note_state()
        self._write(keep)

    def _save_as_noted(self) -> None:
        """Save the state in `progress`; a step that was stopped may have moved the KL controller since."""
        self.runner.wait_for_log()
        self._write(self.config.trainer.max_ckpt_to_keep)

    def _write(self, keep: int | None) -> None:
        save_checkpoint(
            self.run_directory, self.progress, self.learner, self.runner.environment.codec.tokenizer,
            self.optimisers, self.card, keep, self.config.trainer.keep_best_ckpt,
        )  # fmt: skip

    def _note_state(self) -> None:
        """Bring the progress up to date for a checkpoint, once the log has its step."""
        self.runner.wait_for_log()
        self._note_controllers()

    def _note_controllers(self) -> None:
        self.progress.kl = self.learner.kl_control.state_dict()
        self.progress.watch = self.watcher.state_dict()

    def _act_on(self, fired: list[Fired]) -> None:
        """Note the watches that fired. Raises UserError where one stops the run."""
        for each in fired:
            self.runner.terminal.note(f"warning: {each}")
        if fired:
            self.runner.log.write_watches(self.watcher.rows())
        if stops := to_act_on(fired):
            raise UserError(f"stopped by {stops}", hint=self._how_to_start_again(stops.since))

    def _how_to_start_again(self, since: int) -> str:
        good = last_good_checkpoint(self.run_directory, self.config, self.progress.val_em, since)
        return how_to_start_again(self.run_directory, self.config, good)

    def _sample(self, step: int, order: QuestionOrder) -> Sampled:
        """The scored episodes of a step, in as many generation batches as it takes. Raises UserError when too
        many of them failed.

        An error puts those that have ended in the log, which a resumed run samples again.
        """
        section, position = self.config.algorithm.filter_groups, self.progress.asked
        turn_level = self.learner.algorithm.turn_level
        if position is None:
            position = (step - 1) * order.batch_size
        sampled = Sampled(GroupChoice(section, order.batch_size))
        try:
            while count := sampled.choice.next_batch():
                questions, position = order.further(position, count, sampled.choice.groups)
                if not questions:
                    break
                found = self._roll_out(step, questions)
                self.runner.check_failures([*sampled.trajectories, *found[0]])
                sampled.add(*found, section.metric if section.enable else REWARD, turn_level)
            sampled.asked = position
            sampled.choice.require_differing(step, self._new_run(f"rollout.n={2 * self.config.rollout.n}"))
        except Exception:
            ended = {item.id: item for item in [*sampled.trajectories, *self.runner.ended]}
            self._log_unfinished(step, [item for item in ended.values() if item.step == step])
            raise
        return sampled

    def _new_run(self, setting: str) -> str:
        """How to go on with another setting; a run that is resumed keeps its own."""
        run, trainer = self.run_directory, self.config.trainer
        newest = newest_once_stopped(run, trainer, self.progress.step)
        start = "" if newest is None else " from the newest checkpoint"
        return f"start a new run{start}: {new_run_command(run, setting, newest)}"

    def _roll_out(self, step: int, questions: list[Question]) -> tuple[list[Trajectory], list[Score]]:
        """The episodes of one generation batch, and their scores."""
        with tells_how_to_resume_after_faults(self.run_directory):
            with self._timed("gen"):
                trajectories = self.runner.roll_out(questions, "train", step, self.config.rollout.n)
            with self._timed("reward"):
                scores = self.runner.score(trajectories)
        return trajectories, scores

    def _log_unfinished(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log the episodes of a step that ends the run; a resumed run samples them again."""
        if trajectories:
            self.runner.record(step, "train", list(map(Record, trajectories)), step_metrics(trajectories))

    def _update(self, step: int, experience: Experience) -> tuple[Experience, dict[str, float]]:
        """The experience, with the old log-probs where the update computed them, and the metrics."""
        config, metrics = self.config, dict[str, float]()
        if self.learner.critic is not None:
            with self._timed("update_critic"):
                metrics |= update_critic(
                    self.learner.critic, self.optimisers["critic"], experience,
                    clip=config.critic.cliprange_value, normalise=config.critic.loss_agg_mode,
                    horizon=config.actor.loss_agg_constant or config.data.max_response_length,
                    mini_batch_rows=config.critic.ppo_mini_batch_size * config.rollout.n,
                    epochs=config.critic.ppo_epochs, max_tokens=config.critic.ppo_max_token_len,
                )  # fmt: skip
        if step > config.trainer.critic_warmup:
            experience, updated = self._update_actor(experience)
            metrics |= updated
        return experience, metrics

    def _update_actor(self, experience: Experience) -> tuple[Experience, dict[str, float]]:
        config, seen = self.config, None
        loss = actor_loss(config, self.learner.correction)
        if experience.old_logprobs is None:
            seen = TokenStats(torch.zeros_like(experience.mask), torch.zeros_like(experience.mask))
        with self._timed("update_actor"):
            metrics = update_actor(
                self.learner.actor, self.optimisers["actor"], experience,
                loss=loss,
                mini_batch_rows=config.actor.ppo_mini_batch_size * config.rollout.n,
                epochs=config.actor.ppo_epochs, max_tokens=config.actor.ppo_max_token_len, seen=seen,
            )  # fmt: skip
        if seen is None:
            return experience, metrics
        read = rows_with_gradient(experience, loss)[:, None]
        found = update_metrics(self.learner, experience, seen, experience.mask * read)
        return replace(experience, old_logprobs=seen.logprobs, entropies=seen.entropy), metrics | found

    @contextmanager
    def _engine_asleep(self) -> Iterator[None]:
        """Inside, the update has the engine's memory; afterwards the engine has the new weights."""
        self.runner.engine.sleep()
        yield
        with self._timed("update_weights"):
            self.runner.give_weights(self.learner.actor)
            self.runner.engine.wake()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._timings[name] = self._timings.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A run in this process with everything loaded and checked; `loop` trains in an open log."""

    config: Config
    terminal: Terminal
    environment: TrainingEnvironment
    engine: Engine
    loop: Loop
    where: str
    steps: int
    """Of the whole run."""
    checkpoint_size: int
    """Bytes on disk of a checkpoint."""
    reference: str = ""
    """The digest of the reference policy."""

    @property
    def questions(self) -> int:
        return len(self.environment.splits.train)

    @property
    def digests(self) -> IndexDigests:
        return IndexDigests.of(self.environment.search)

    def train(self, run: Path, info: RunInfo, resumed_from: int | None) -> Progress:
        """Train to the end of the run. An interruption leaves log and checkpoints to be resumed."""
        trainer, best = self.config.trainer, info.algo == SFT and self.config.sft.patience is not None
        lack = lack_of_room(
            trainer, self.steps, run, self.checkpoint_size, saves_best=best, each_step=info.algo == RFT
        )
        if lack:
            self.terminal.note(f"warning: {lack}")
        with (
            reporters(self.config, run, resumed_from) as also,
            LogWriter(run / LOG, info, warn=lambda text: self.terminal.note(f"warning: {text}")) as log,
        ):
            runner = EpisodeRunner(self.config, self.environment, self.engine, log, self.terminal, also)
            try:
                progress = self.loop(run, runner, resumed_from)
                runner.wait_for_log()
                return progress
            finally:
                runner.close()


def check(config: Config) -> None:
    """Raises UserError for what this backend does not train with, or does not find here."""
    for error in local_errors(config):
        raise UserError(error)
    if config.rollout.engine == "vllm":
        from srl.rollout.vllm_engine import version_problem

        if problem := version_problem():
            raise UserError(f"rollout.engine = vllm: {problem}")


def prepare(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> LocalRun:
    """Load and check everything, the rewards last."""
    made = _prepare(config, algo, workspace, terminal)
    made.environment.reward.load()
    return made


def _prepare(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> LocalRun:
    """What is trained, and with what. The seed is set first, for new weights such as an adapter's."""
    torch.manual_seed(config.trainer.seed)
    policy = load_policy(config.model, _note_of_tokenizer(config, workspace, terminal))
    where = in_words(set_threads(policy.model, config))
    splits = load_splits(config, policy.codec, terminal.note, algo)
    environment = load_environment(config, workspace, policy.codec, terminal.note, splits)
    for error in truncation_errors(config, engine_name(config)):
        raise UserError(error)
    engine = load_engine(config, policy, terminal.note)
    if not engine.token_ids:
        raise UserError(
            f"rollout.engine = {config.rollout.engine} returns text, and training needs the sampled token "
            "ids; set rollout.engine=torch"
        )
    longest, steps = config.data.max_episode_tokens, total_steps(config, algo)
    check_model(policy.model, longest, terminal.note)
    if algo in (SFT, RFT):
        size = checkpoint_bytes(policy.model, optimiser=algo == SFT)
        if config.actor.use_torch_compile:
            compile_updates([trunk(policy.model)], longest, workspace.compiled, terminal.note)
    if algo == RFT:
        return LocalRun(config, terminal, environment, engine, rft_loop(config, policy), where, steps, size)
    if algo == SFT:
        file = partial(demonstration_file, config, workspace, terminal.note)
        loop = sft_loop(config, policy, environment, file, terminal.note)
        return LocalRun(config, terminal, environment, engine, loop, where, steps, size)
    learner = load_learner(config, policy, samples_as_trained(engine, policy.model))
    if config.actor.use_torch_compile:
        compile_updates(learner.trunks, longest, workspace.compiled, terminal.note)
    optimisers = load_optimisers(config, learner, len(splits.train))
    reference = reference_digest(config, learner.reference)
    loop = rl_loop(config, learner, optimisers)
    size = checkpoint_bytes(learner.actor, learner.critic)
    return LocalRun(config, terminal, environment, engine, loop, where, steps, size, reference)


def _note_of_tokenizer(config: Config, workspace: Workspace, terminal: Terminal) -> Note:
    """Reports the flaws of a tokenizer, except for the small model that comes with `srl`."""
    path = Path(str(config.model.path))
    ours = path in BASE_MODELS.values() or is_cold_started(path, workspace)
    return (lambda text: None) if ours else terminal.note


def rl_loop(config: Config, learner: Learner, optimisers: dict[str, Optimiser]) -> Loop:
    """Reinforcement learning, from the newest checkpoint where the run is resumed."""

    def loop(run: Path, runner: EpisodeRunner, resumed_from: int | None) -> Progress:
        place = runner.environment
        card = card_of_run(config, place.template, IndexDigests.of(place.search))
        trainer = LocalTrainer(config, run, runner, learner, optimisers, card)
        if resumed_from is not None and resumed_from >= 0:
            checkpoint = checkpoint_path(run, resumed_from)
            trainer.progress = load_newest(checkpoint, learner, optimisers)
            trainer.watcher.load_state_dict(trainer.progress.watch)
            for line in checkpoint_notes(checkpoint):
                runner.terminal.note(line)
        if resumed_from is not None:
            runner.log.drop_steps_after(resumed_from)
            runner.log.write_watches(trainer.watcher.rows())
        runner.give_weights(learner.actor)
        return trainer.run()

    return loop


def actor_loss(config: Config, correction: RolloutCorrection = NO_CORRECTION) -> ActorLoss:
    """The loss configured in the section `actor`."""
    actor = config.actor
    return ActorLoss(
        temperature=config.rollout.temperature,
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        loss_mode=actor.policy_loss.loss_mode,
        normalise=actor.loss_agg_mode,
        horizon=actor.loss_agg_constant or config.data.max_response_length,
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
        correction=correction,
    )


def _all_records(sampled: Sampled, experience: Experience) -> list[Record]:
    """Log entries of all episodes of a step in the order asked, those that are not trained on marked."""
    trained, chosen = iter(_records(*sampled.kept, experience)), sampled.choice.kept()
    return [
        next(trained) if item.question.id in chosen else Record(item, score, left_out=True)
        for item, score in zip(sampled.trajectories, sampled.scores, strict=True)
    ]


def _records(
    trajectories: Sequence[Trajectory], scores: Sequence[Score], experience: Experience
) -> list[Record]:
    """Log entries of trajectories: score and numbers of the tokens, without padding.

    An episode that no pass has read (it failed, or has no gradient) has no log-probs and entropies.
    """
    always = {"advantages": experience.advantages, "returns": experience.returns}
    learnt = {"trainer_logprobs": experience.old_logprobs, "entropies": experience.entropies}
    old = experience.old_logprobs
    read = [False] * len(trajectories) if old is None else old.any(dim=1).tolist()
    return [
        Record(item, score, **_of_row(always | (learnt if known else {}), row, len(item.token_ids)))
        for row, (item, score, known) in enumerate(zip(trajectories, scores, read, strict=True))
    ]


def _of_row(columns: Mapping[str, Tensor | None], row: int, length: int) -> dict[str, Any]:
    """The first `length` numbers of a row of each column that there is."""
    return {name: values[row, :length].tolist() for name, values in columns.items() if values is not None}
