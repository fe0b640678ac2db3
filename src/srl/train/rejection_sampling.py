"""Rounds of rejection-sampling fine-tuning, `srl train --algo rft`.

A round samples episodes of its questions with the last policy, keeps those that pass `sft.filter`, and
fine-tunes on them (RFT: Yuan et al. 2023; RAFT: Dong et al. 2023; ReST-EM: Singh et al. 2023).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from srl.config import Config
from srl.errors import UserError
from srl.evaluate import step_metrics
from srl.progress import counted
from srl.store import Record, read_records, reading
from srl.train.checkpoint import (
    load_newest,
    put_weights,
    save_checkpoint,
    save_validated,
    trained_weights,
)
from srl.train.episodes import EpisodeRunner
from srl.train.fine_tuning import Loop, Tuned
from srl.train.load_components import LoadedModel
from srl.train.logged_episodes import Selection, check_filter, check_kept, select_episodes
from srl.train.model_card import card_of_run
from srl.train.question_order import order_of
from srl.train.resume import checkpoint_notes, new_run_command
from srl.train.run_directory import LOG, RFT, Progress, checkpoint_path
from srl.train.search import IndexDigests
from srl.train.sft import batches, fine_tune, sft_optimiser, with_epochs
from srl.trajectory import Question, Score, Trajectory

Weights = dict[str, torch.Tensor]


@dataclass(slots=True)
class RejectionSampling:
    """Runs the rounds from `progress.step` to `trainer.total_training_steps`; a round is a step of the log.

    Sampling is keyed by seed and round, so a resumed run continues as if it had not stopped. `first` are the
    trained weights before round 1, where rounds start from them. `sampled` are the episodes of the next
    round that the log had when the run was resumed.
    """

    run_directory: Path
    runner: EpisodeRunner
    tuned: Tuned
    card: dict[str, Any]
    first: Weights | None
    progress: Progress = field(default_factory=Progress)
    sampled: list[Record] = field(default_factory=list)

    @property
    def config(self) -> Config:
        return self.tuned.config

    def run(self) -> Progress:
        """Run all rounds and return the progress."""
        config, questions = self.config, self.runner.environment.splits.train
        rounds = config.trainer.total_training_steps
        order = order_of(questions, config.data, config.trainer.seed, config.rft)
        if self.sampled:  # before anything that may be stopped
            self._keep_sampled(self.progress.step + 1, order.batch(self.progress.step + 1))
        if self.progress.step == 0 and config.trainer.val_before_train:
            self.runner.validate(self.progress)
            self.progress.test_em_start = self.runner.test(0)
        if self.progress.awaits_validation:
            self._validate()
        for number in range(self.progress.step + 1, rounds + 1):
            self._round(number, order.batch(number))
            self.progress.awaits_validation = True
            self._save()
            self._validate()
        self.progress.test_em_end = self.runner.test(self.progress.step)
        return self.progress

    def _round(self, number: int, questions: Sequence[Question]) -> None:
        """Sample, filter and fine-tune; the round's metrics are logged with its episodes."""
        began = time.perf_counter()
        records = list(self._sample(number, questions))
        seconds = {"timing_s/gen": time.perf_counter() - began}
        found = self._select(number)
        self.runner.engine.sleep()
        metrics = found.metrics() | self._fine_tune(number, found.episodes)
        self.runner.give_weights(self.tuned.actor)
        self.runner.engine.wake()
        seconds["timing_s/step"] = time.perf_counter() - began
        self.progress.step, self.progress.seconds = number, self.progress.seconds + seconds["timing_s/step"]
        episodes = [record.trajectory for record in records]
        scores = [record.score or Score(0.0) for record in records]
        metrics |= step_metrics(episodes, scores) | seconds
        valid = [score.value for episode, score in zip(episodes, scores, strict=True) if episode.valid]
        metrics["critic/score/mean"] = fmean(valid) if valid else 0.0
        self.runner.record(number, "train", [], metrics)
        self.runner.terminal.step(number, self.config, metrics)

    def _keep_sampled(self, number: int, questions: Sequence[Question]) -> None:
        """Log again what the log had of a round that was cut off: whole batches, the others are lost."""
        known = {record.trajectory.id: record for record in self.sampled}
        whole = [ids for _, ids in self._batches(number, questions) if known.keys() >= set(ids)]
        self.sampled = [known[name] for ids in whole for name in ids]
        self.runner.record(number, "train", self.sampled, {})

    def _batches(
        self, number: int, questions: Sequence[Question]
    ) -> Iterator[tuple[Sequence[Question], list[str]]]:
        """The questions of a round, by `data.train_batch_size`, with the ids of their episodes."""
        size, samples = self.config.data.train_batch_size, range(self.config.rollout.n)
        for start in range(0, len(questions), size):
            batch = questions[start : start + size]
            pairs = [(question, sample) for question in batch for sample in samples]
            yield batch, [Trajectory(item, sample=sample, step=number).id for item, sample in pairs]

    def _sample(self, number: int, questions: Sequence[Question]) -> Iterator[Record]:
        """The scored episodes of the round; each batch is logged at once. Those that the log has are not
        sampled again. Raises UserError when too many of them failed."""
        known, ended = {record.trajectory.id: record for record in self.sampled}, list[Trajectory]()
        self.sampled = []
        for batch, ids in self._batches(number, questions):
            is_known = known.keys() >= set(ids)
            records = [known[name] for name in ids] if is_known else self._roll_out(number, batch)
            ended += [record.trajectory for record in records]
            self.runner.check_failures(ended)
            if not is_known:
                self.runner.record(number, "train", records, {})
            yield from records

    def _roll_out(self, number: int, questions: Sequence[Question]) -> list[Record]:
        trajectories = self.runner.roll_out(questions, "train", number, self.config.rollout.n)
        scores = self.runner.score(trajectories)
        return list(map(Record, trajectories, scores))

    def _select(self, number: int) -> Selection:
        """What the filter keeps of the round. Raises UserError where that is nothing."""
        sft, seed = self.config.sft, self.config.trainer.seed
        self.runner.wait_for_log()
        found = select_episodes(
            self.run_directory / LOG, sft.filter, sft.max_per_question, seed + number, step=number
        )
        try:
            check_kept(found, sft.filter)
        except UserError as error:
            before = number - 1 if number > 1 else None
            command = new_run_command(self.run_directory, "sft.filter=CONDITION", before, "--algo", RFT)
            raise UserError(
                f"round {number}: {error}; a resumed run keeps its filter, so start another: {command}"
            ) from error
        for line in found.lines():
            self.runner.terminal.note(f"round {number}: {line}")
        return found

    def _fine_tune(self, number: int, episodes: list[Trajectory]) -> dict[str, float]:
        """Fine-tune with a new optimiser and schedule; the metrics of the last step, and all tokens."""
        sft, model = with_epochs(self.config.sft, len(episodes)), self.tuned.actor
        if self.first is not None:
            put_weights(model, self.first)
        data = batches(episodes, sft, self.config.trainer.seed + number)
        last, tokens, began = dict[str, float](), 0.0, time.perf_counter()

        def on_step(step: int, metrics: dict[str, float]) -> None:
            nonlocal last, tokens
            last, tokens = metrics, tokens + metrics["perf/total_num_tokens"]
            count(step)

        with counted(f"fine-tuning steps of round {number}", sft.steps) as count:
            fine_tune(
                model, sft_optimiser(sft, model), data, observation_weight=sft.observation_weight,
                max_tokens=self.config.actor.ppo_max_token_len, on_step=on_step,
            )  # fmt: skip
        seconds = time.perf_counter() - began
        totals = {"perf/total_num_tokens": tokens, "perf/throughput": tokens / seconds}
        return last | totals | {"sft/steps": sft.steps, "timing_s/update_actor": seconds}

    def _validate(self) -> None:
        """Validate, and put the result into the round's checkpoint, which was saved before."""
        trainer = self.config.trainer
        self.runner.validate(self.progress)
        self.progress.awaits_validation = False
        self.runner.wait_for_log()
        save_validated(self.run_directory, self.progress, trainer.max_ckpt_to_keep, trainer.keep_best_ckpt)

    def _save(self) -> None:
        tokenizer = self.runner.environment.codec.tokenizer
        self.runner.wait_for_log()
        save_checkpoint(self.run_directory, self.progress, self.tuned, tokenizer, {}, self.card, keep=None)


def rft_loop(config: Config, policy: LoadedModel) -> Loop:
    """The rounds, from the newest checkpoint where the run is resumed. Raises UserError for a filter that is
    not SQL."""
    check_filter(config.sft.filter)
    first = _copied(policy) if config.rft.start == "first" else None

    def loop(run: Path, runner: EpisodeRunner, resumed_from: int | None) -> Progress:
        place = runner.environment
        card = card_of_run(config, place.template, IndexDigests.of(place.search))
        rounds = RejectionSampling(run, runner, Tuned(config, policy.model), card, first)
        if resumed_from is not None and resumed_from >= 0:
            checkpoint = checkpoint_path(run, resumed_from)
            rounds.progress = load_newest(checkpoint, rounds.tuned, {})
            for line in checkpoint_notes(checkpoint):
                runner.terminal.note(line)
        runner.give_weights(policy.model)
        if resumed_from is not None:  # last, since `run` begins with logging them again
            rounds.sampled = _sampled(run, rounds.progress.step + 1)
            runner.log.drop_steps_after(resumed_from)
        return rounds.run()

    return loop


def _sampled(run: Path, number: int) -> list[Record]:
    """The episodes of a round that was cut off."""
    return reading([run / LOG], lambda log: read_records(log, "phase = 'train' AND step = ?", [number]))


def _copied(policy: LoadedModel) -> Weights:
    return {name: value.clone() for name, value in trained_weights(policy.model).items()}
