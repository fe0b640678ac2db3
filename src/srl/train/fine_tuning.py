"""A run of supervised fine-tuning, `srl train --algo sft`: steps, validations, checkpoints, early end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.errors import UserError
from srl.progress import counted
from srl.store import reading
from srl.train.checkpoint import load_newest, save_checkpoint, save_validated
from srl.train.episodes import EpisodeRunner, TrainingEnvironment
from srl.train.load_components import LoadedModel
from srl.train.logged_episodes import check_tokens, episodes_of_log
from srl.train.make_missing import Note
from srl.train.model_card import card_of_run
from srl.train.resume import checkpoint_notes
from srl.train.run_directory import LOG, Progress, best_step, checkpoint_path, due, validations_without_rise
from srl.train.search import IndexDigests
from srl.train.sft import (
    batches,
    demonstrated,
    digest_of_episodes,
    fine_tune_step,
    sft_optimiser,
    with_epochs,
)
from srl.train.stopped_run import saved_if_stopped
from srl.trajectory import Trajectory
from srl.update.optimiser import Optimiser

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Loop = Callable[[Path, EpisodeRunner, int | None], Progress]
"""Trains a run in its directory; the last argument is as in `srl.train.run.Trainer.train`."""
_CHANGED = "the episodes that {run} is fine-tuned on have changed ({what}): put them back, or start a new run"


@dataclass(frozen=True, slots=True)
class Tuned:
    """The network of fine-tuning, as a checkpoint holds it."""

    config: Config
    actor: PreTrainedModel
    critic: None = None
    kl_control: None = None


@dataclass(slots=True)
class FineTuning:
    """Fine-tunes from `progress.step` to `sft.steps`, or until the validation EM stops rising.

    The order of the episodes depends on the seed only, so a resumed run continues as if it had not stopped.
    """

    run_directory: Path
    runner: EpisodeRunner
    tuned: Tuned
    optimiser: Optimiser
    episodes: list[Trajectory]
    card: dict[str, Any]
    progress: Progress = field(default_factory=Progress)

    @property
    def config(self) -> Config:
        return self.tuned.config

    def run(self) -> Progress:
        """Train to the end and return the progress. Raises UserError where `sft.mix` does not fit."""
        data = batches(self.episodes, self.config.sft, self.config.trainer.seed)
        if self.progress.step == 0 and self.config.trainer.val_before_train:
            self.runner.validate(self.progress)
            self.progress.test_em_start = self.runner.test(0)
        self._train(data)
        self.progress.test_em_end = self.runner.test(self.progress.step)
        return self.progress

    def _train(self, data: Iterator[list[Trajectory]]) -> None:
        sft, first = self.config.sft, self.progress.step
        if self.progress.awaits_validation:
            self._validate_and_save(saved=True)
        left = itertools.islice(data, first, None)
        while self.progress.step < sft.steps and not self._stops_early():
            self.runner.engine.sleep()
            self._steps_to_validation(left)
            self.runner.give_weights(self.tuned.actor)
            self.runner.engine.wake()
            self._validate_and_save()
        if self.progress.step < sft.steps:
            best = best_step(self.progress.val_em)
            self.runner.terminal.note(
                f"stopped at step {self.progress.step}: validation EM has not risen since step {best} "
                f"({self.progress.val_em_best:.3f}), sft.patience={sft.patience}"
            )

    def _steps_to_validation(self, data: Iterator[list[Trajectory]]) -> None:
        """Steps up to the next validation, or to the last step; checkpoints between them where due."""
        steps, trainer = self.config.sft.steps, self.config.trainer
        with counted("fine-tuning steps", steps, self.progress.step) as count:
            while True:
                step = self.progress.step + 1
                with self._saved_if_stopped():
                    self._step(step, next(data))
                count(step)
                if step == steps or self._validates(step):
                    return
                if due(step, trainer.save_freq):
                    self._save(trainer.max_ckpt_to_keep)

    def _step(self, step: int, trajectories: list[Trajectory]) -> None:
        sft = self.config.sft
        metrics = fine_tune_step(
            self.tuned.actor, self.optimiser, trajectories, observation_weight=sft.observation_weight,
            max_tokens=self.config.actor.ppo_max_token_len,
        )  # fmt: skip
        self.progress.step = step
        self.progress.seconds += metrics["timing_s/step"]
        self.runner.record(step, "sft", [], metrics)
        if step in (1, sft.steps) or step % 10 == 0:
            self.runner.terminal.fine_tuning_step(step, sft.steps, metrics)

    def _validates(self, step: int) -> bool:
        every = self.config.trainer.test_freq
        return every > 0 and step > 0 and (step == self.config.sft.steps or step % every == 0)

    def _validate_and_save(self, saved: bool = False) -> None:
        """Save where a checkpoint is due and at the end, before the validation, which may take long; it gets
        the result afterwards. With `sft.patience` the best is saved too, once it is known.

        It is `saved` already where the run was stopped in the validation.
        """
        step, trainer, sft = self.progress.step, self.config.trainer, self.config.sft
        saves, validates = step == sft.steps or due(step, trainer.save_freq), self._validates(step)
        if validates:
            self.progress.awaits_validation = True
            if saves and not saved:
                saved = True
                self._save(None)
            with self._saved_if_stopped():
                self.runner.validate(self.progress)
        self.progress.awaits_validation = False
        is_best = sft.patience is not None and best_step(self.progress.val_em) == step
        if saved:
            self.runner.wait_for_log()
            save_validated(
                self.run_directory, self.progress, trainer.max_ckpt_to_keep, trainer.keep_best_ckpt
            )
        elif saves or is_best or self._stops_early():
            self._save(trainer.max_ckpt_to_keep)

    def _stops_early(self) -> bool:
        patience = self.config.sft.patience
        return patience is not None and validations_without_rise(self.progress.val_em) >= patience

    def _saved_if_stopped(self) -> AbstractContextManager[None]:
        trainer = self.config.trainer
        save, note = partial(self._save, trainer.max_ckpt_to_keep), self.runner.terminal.note
        return saved_if_stopped(self.run_directory, trainer, self.progress, [self.optimiser], save, note)

    def _save(self, keep: int | None) -> None:
        trainer, tokenizer = self.config.trainer, self.runner.environment.codec.tokenizer
        self.runner.wait_for_log()
        save_checkpoint(
            self.run_directory, self.progress, self.tuned, tokenizer, {"actor": self.optimiser}, self.card,
            keep, trainer.keep_best_ckpt,
        )  # fmt: skip


def sft_loop(
    config: Config, policy: LoadedModel, place: TrainingEnvironment, file: Callable[[], Path], note: Note
) -> Loop:
    """Fine-tuning on the episodes of `sft.log`, or on the demonstrations in `file()`, which are run here
    first; from the newest checkpoint where the run is resumed. Raises UserError for patience without
    questions for validations, and an `sft.mix` that does not fit."""
    if config.sft.patience and not place.splits.val:
        raise UserError("sft.patience counts validations, and there are none: data.val_files is not set")
    if config.sft.log is not None:
        episodes, counts = _logged(config, policy, note)
    else:
        shown = demonstrated(file(), place, note, place.splits.train)
        episodes, counts = shown, {}
    counts |= {
        "sft/episodes": len(episodes),
        "sft/policy_tokens": sum(item.policy_tokens for item in episodes),
    }
    digest = digest_of_episodes(episodes)
    config = config.model_copy(update={"sft": with_epochs(config.sft, len(episodes))})
    batches(episodes, config.sft, config.trainer.seed)  # raises where sft.mix does not fit
    tuned, optimiser = Tuned(config, policy.model), sft_optimiser(config.sft, policy.model)

    def loop(run: Path, runner: EpisodeRunner, resumed_from: int | None) -> Progress:
        card = card_of_run(config, place.template, IndexDigests.of(place.search))
        tuning = FineTuning(run, runner, tuned, optimiser, episodes, card)
        if resumed_from is not None and resumed_from >= 0:
            checkpoint = checkpoint_path(run, resumed_from)
            tuning.progress = load_newest(checkpoint, tuned, {"actor": optimiser})
            for line in checkpoint_notes(checkpoint):
                runner.terminal.note(line)
        if resumed_from is not None:
            runner.log.drop_steps_after(resumed_from)
        _note_episodes(run, runner, counts)
        if tuning.progress.episodes not in ("", digest):
            raise UserError(_CHANGED.format(run=run.name, what="other texts"))
        tuning.progress.episodes = digest
        runner.give_weights(policy.model)
        return tuning.run()

    return loop


def _logged(config: Config, policy: LoadedModel, note: Note) -> tuple[list[Trajectory], dict[str, float]]:
    """The episodes of `sft.log`, and their counts. Raises UserError where they are of another tokenizer."""
    found = episodes_of_log(config)
    check_tokens(found.episodes, policy.codec, str(config.sft.log))
    for line in found.lines():
        note(line)
    return found.episodes, found.metrics()


def _note_episodes(run: Path, runner: EpisodeRunner, counts: dict[str, float]) -> None:
    """Log the counts of the episodes before the first step. Raises UserError where a resumed run has other
    episodes than it started with."""
    query = "SELECT name, value FROM metrics WHERE phase = 'sft' AND step = 0"
    known: dict[str, float] = dict(reading([run / LOG], lambda log: log.execute(query).fetchall()))
    if not known:
        runner.record(0, "sft", [], counts)
        return
    changed = [
        f"{name} {known.get(name, 0):,.0f} then, {counts.get(name, 0):,.0f} now"
        for name in sorted(known.keys() | counts.keys())
        if known.get(name) != counts.get(name)
    ]
    if changed:
        raise UserError(_CHANGED.format(run=run.name, what="; ".join(changed)))
