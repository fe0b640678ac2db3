"""Dynamic sampling: which groups a step trains on, and how many further questions it asks.

Yu et al. 2025, "DAPO", section 3.2 and eq. 11 (arXiv 2503.14476): a group whose scores agree has no
advantage, so that a batch with many of them is a small one with a noisy gradient. Such groups are replaced by
those of further questions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

from srl.config.sections import FilterGroups
from srl.errors import UserError
from srl.store import Record
from srl.trajectory import Score, Trajectory

MAX_BATCHES = 10
"""Most generation batches of a step."""
REWARD = "reward"
"""The metric that is the whole reward."""
Returns = tuple[float, ...]
"""What is compared of an episode: its metric; then, for turn-level credit, its return from each later turn
on."""


@dataclass(slots=True)
class Sampled:
    """The scored episodes of one step in the order asked; it trains on `wanted` of their groups.

    Without dynamic sampling (`enable` false) those are the first generation batch, whatever its scores.
    """

    section: FilterGroups
    wanted: int
    turn_level: bool = False
    records: list[Record] = field(default_factory=list)
    """Of the log; all are left out until `trained` has chosen."""
    batches: int = 0
    """Generation batches so far."""
    groups: dict[str, list[Returns]] = field(default_factory=dict)
    """By question, what is compared of the group's valid episodes."""

    def add(self, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
        """One more generation batch. Raises UserError where the reward has no part `metric`."""
        metric = self.section.metric if self.section.enable else REWARD
        self.batches += 1
        scored = zip(trajectories, scores, strict=True)
        self.records += [Record(trajectory, score, left_out=True) for trajectory, score in scored]
        self.groups |= {trajectory.question.id: [] for trajectory in trajectories}
        for trajectory, score in with_metric(trajectories, scores, metric):
            self.groups[trajectory.question.id].append(compared(score, metric, self.turn_level))

    def next_batch(self) -> int:
        """How many questions to ask next; 0 once enough groups differ, or after the last generation batch.

        As many as bring the missing groups at the share that differed so far, and `wanted` at most.
        """
        most = MAX_BATCHES if self.section.enable else 1
        differing = len(self._differing())
        if differing >= self.wanted or self.batches >= most:
            return 0
        if not differing:
            return self.wanted
        return min(self.wanted, math.ceil((self.wanted - differing) * len(self.groups) / differing))

    def trained(self) -> list[Record]:
        """Those that are trained on: the first groups that differ, then the first that agree."""
        differing = self._differing()
        agreeing = [question for question in self.groups if question not in set(differing)]
        question_ids = set([*differing, *agreeing][: self.wanted])
        return [record for record in self.records if record.trajectory.question.id in question_ids]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [record.trajectory for record in self.records]

    def require_differing(self, step: int) -> None:
        """Raises UserError where dynamic sampling has found no group that differs."""
        if not self.section.enable or self._differing():
            return
        values = Counter(episodes[0][0] for episodes in self.groups.values() if episodes)
        common = ", ".join(f"{count:,} at {value:g}" for value, count in values.most_common(3))
        raise UserError(
            f"nothing to learn in step {step}: the episodes of each of {len(self.groups):,} questions have "
            f"the same {self.section.metric} ({common or 'none is valid'})",
            key="algorithm.filter_groups.enable",
            hint="start a new run with a larger rollout.n, other questions or another --model",
        )

    def metrics(self) -> dict[str, float]:
        """How many generation batches there were, under verl's name; empty without dynamic sampling."""
        return {"train/num_gen_batches": float(self.batches)} if self.section.enable else {}

    def _differing(self) -> list[str]:
        """The questions whose scores differ. A group with less than two valid episodes has none that do."""
        return [question for question, episodes in self.groups.items() if differ(episodes)]


def differ(episodes: Sequence[Returns]) -> bool:
    """Whether a group teaches something: the returns from one turn on differ among those that take it."""
    columns = zip_longest(*episodes)
    return any(len(set(column) - {None}) > 1 for column in columns)


def compared(score: Score, metric: str, turn_level: bool) -> Returns:
    """What dynamic sampling compares of an episode. With `turn_level` credit (`Algorithm.turn_level`) two
    episodes of equal reward differ where one had got more of it before a turn that both take.
    """
    value = score.value if metric == REWARD else score.parts[metric]
    value = round(value, 9)  # sums of equal parts may differ in their last bit
    if metric != REWARD or not turn_level or not score.per_turn:
        return (value,)
    return value, *(round(value - before, 9) for before in accumulate(score.per_turn[:-1]))


def with_metric(
    trajectories: Sequence[Trajectory], scores: Sequence[Score], metric: str
) -> list[tuple[Trajectory, Score]]:
    """The valid episodes that have the `metric`; a reward of weight 0 may have given some of them no score.

    Raises UserError where none has it.
    """
    valid = [pair for pair in zip(trajectories, scores, strict=True) if pair[0].valid]
    having = [pair for pair in valid if metric == REWARD or metric in pair[1].parts]
    if valid and not having:
        parts = ", ".join(dict.fromkeys([REWARD, *(name for _, score in valid for name in score.parts)]))
        raise UserError(
            f"algorithm.filter_groups.metric = {metric}: no episode has this part of the reward",
            key="algorithm.filter_groups.metric", hint=f"use one of {parts}",
        )  # fmt: skip
    return having
