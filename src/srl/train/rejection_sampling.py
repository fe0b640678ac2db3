"""Rounds of rejection-sampling fine-tuning, `srl train --algo rft`: a step is a round.

A round samples episodes of its questions with the last policy, keeps those that pass `sft.filter`, and
fine-tunes on them (RFT: Yuan et al. 2023; RAFT: Dong et al. 2023; ReST-EM: Singh et al. 2023).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean

from srl.evaluate import step_metrics
from srl.store import Record
from srl.train.logged_episodes import Selection, select_episodes
from srl.train.loop import Loop
from srl.train.questions import order_of
from srl.train.run_directory import LOG
from srl.train.sft import fine_tune
from srl.trajectory import Score


@dataclass(slots=True, kw_only=True)
class RejectionSampling(Loop):
    """Sampling is keyed by seed and round, so a resumed run continues as if it had not stopped."""

    def step(self, number: int) -> dict[str, float]:
        """Sample, filter and fine-tune; the round's metrics are logged after its episodes."""
        began = time.perf_counter()
        records = self.sample(number)
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

    def sample(self, number: int) -> list[Record]:
        """The scored episodes of the round; each batch is logged at once. Raises UserError when too many of
        them failed."""
        config, records = self.config, list[Record]()
        order = order_of(self.splits.train, config.data, config.trainer.seed, config.rft)
        questions, size = order.batch(number), config.data.train_batch_size
        for start in range(0, len(questions), size):
            trajectories = self.roll_out(questions[start : start + size], "train", number, config.rollout.n)
            batch = list(map(Record, trajectories, self.score(trajectories)))
            records += batch
            self.check_failures([record.trajectory for record in records])
            self.record(number, "train", batch, {})
        return records

    def select(self, number: int) -> Selection:
        """What the filter keeps of the round. Raises UserError where that is nothing: a resumed run keeps its
        filter, so another has to be started."""
        sft, seed = self.config.sft, self.config.trainer.seed
        self.wait_for_log()
        selection = select_episodes(self.run / LOG, sft.filter, seed + number, step=number)
        for line in selection.lines():
            self.terminal.note(f"round {number}: {line}")
        return selection
