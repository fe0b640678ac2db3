"""Rounds of rejection-sampling fine-tuning, `srl train --algo rft`: a step is a round.

A round samples episodes of its questions with the last policy, keeps those that pass `sft.filter`, and
fine-tunes on them (RFT: Yuan et al. 2023; RAFT: Dong et al. 2023; ReST-EM: Singh et al. 2023).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from srl.evaluate import step_metrics
from srl.store import Record, read_records, reading
from srl.train.logged_episodes import Selection, select_episodes
from srl.train.loop import Loop
from srl.train.questions import order_of
from srl.train.run_directory import LOG
from srl.train.sft import fine_tune
from srl.trajectory import Question, Score, Trajectory


@dataclass(slots=True, kw_only=True)
class RejectionSampling(Loop):
    """Sampling is keyed by seed and round, so a resumed run continues as if it had not stopped."""

    sampled: list[Record] = field(default_factory=list)
    """The episodes of the next round that the log of a resumed run has: they are not sampled again."""

    def step(self, number: int) -> dict[str, float]:
        """Sample, filter and fine-tune; the round's metrics are logged after its episodes."""
        began = time.perf_counter()
        records = list(self.sample(number))
        seconds = {"timing_s/gen": time.perf_counter() - began}
        selection = self.select(number)
        self.put_to_sleep()
        config = self.config
        metrics = selection.metrics() | fine_tune(
            config.sft, self.actor, selection.episodes, max_tokens=config.actor.ppo_max_token_len,
            seed=config.trainer.seed + number, what=f"fine-tuning steps of round {number}",
        )  # fmt: skip
        self.wake()
        seconds["timing_s/step"] = time.perf_counter() - began
        episodes = [record.trajectory for record in records]
        scores = [record.score or Score(0.0) for record in records]
        metrics |= step_metrics(episodes, scores) | seconds
        valid = [score.value for episode, score in zip(episodes, scores, strict=True) if episode.valid]
        metrics["critic/score/mean"] = fmean(valid) if valid else 0.0
        self.record(number, "train", [], metrics)
        self.terminal.step(number, self.config, metrics)
        return metrics

    def sample(self, number: int) -> Iterator[Record]:
        """The scored episodes of the round; each batch is logged at once. Raises UserError when too many of
        them failed."""
        logged, ended = {record.trajectory.id: record for record in self.sampled}, list[Trajectory]()
        for batch, ids in self._batches(number):
            if is_logged := logged.keys() >= set(ids):
                records = [logged[name] for name in ids]
            else:
                trajectories = self.roll_out(batch, "train", number, self.config.rollout.n)
                records = list(map(Record, trajectories, self.score(trajectories)))
            ended += [record.trajectory for record in records]
            self.check_failures(ended)
            if not is_logged:
                self.record(number, "train", records, {})
            yield from records

    def select(self, number: int) -> Selection:
        """What the filter keeps of the round. Raises UserError where that is nothing: a resumed run keeps its
        filter, so another has to be started."""
        sft, seed = self.config.sft, self.config.trainer.seed
        self.wait_for_log()
        selection = select_episodes(
            self.run / LOG, sft.filter, sft.max_per_question, seed + number, step=number
        )
        for line in selection.lines():
            self.terminal.note(f"round {number}: {line}")
        return selection

    def resume(self, step: int) -> None:
        """Also put back into the log, first of all, what it had of the round that was cut off: whole batches,
        the others are lost."""
        logged = reading(
            [self.run / LOG], lambda log: read_records(log, "phase = 'train' AND step = ?", [step + 1])
        )
        Loop.resume(self, step)
        by_id = {record.trajectory.id: record for record in logged}
        batches = [ids for _, ids in self._batches(step + 1) if by_id.keys() >= set(ids)]
        self.sampled = [by_id[name] for ids in batches for name in ids]
        if self.sampled:
            self.record(step + 1, "train", self.sampled, {})

    def _batches(self, number: int) -> Iterator[tuple[Sequence[Question], list[str]]]:
        """The questions of a round, by `data.train_batch_size`, with the ids of their episodes."""
        config = self.config
        order = order_of(self.splits.train, config.data, config.trainer.seed, config.rft)
        questions, size = order.batch(number), config.data.train_batch_size
        for start in range(0, len(questions), size):
            batch = questions[start : start + size]
            pairs = [(question, sample) for question in batch for sample in range(config.rollout.n)]
            yield batch, [Trajectory(question, sample=sample, step=number).id for question, sample in pairs]
