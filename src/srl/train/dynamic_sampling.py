"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups that teach nothing are replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil

from srl.config.sections import FilterGroups
from srl.errors import UserError
from srl.store import Record
from srl.train.questions import QuestionOrder
from srl.trajectory import Question

MAX_BATCHES = 10
"""Most generation batches of a step."""
REWARD = "reward"
"""The metric that is the whole reward."""


def sample_until_differing(
    section: FilterGroups,
    order: QuestionOrder,
    position: int,
    play: Callable[[Sequence[Question]], list[Record]],
) -> tuple[int, int]:
    """Have `play` sample until a batch of groups has scores that differ, or `MAX_BATCHES` times.

    `play` gives all records so far; those that are not trained on are marked as left out. A group whose
    scores agree has no advantage; where there are too few others the first of these are trained on too.
    Returns the place in `order` after the questions asked, and the number of generation batches. Raises
    UserError where no group differs.
    """
    wanted, groups, differing, batches = order.batch_size, dict[str, list[float]](), list[str](), 0
    records = list[Record]()
    while len(differing) < wanted and batches < MAX_BATCHES:
        count = wanted  # or as many as bring the missing groups at the share that differed so far
        if differing:
            count = min(wanted, ceil((wanted - len(differing)) * len(groups) / len(differing)))
        questions, position = order.further(position, count, groups)
        if not questions:
            break
        records, batches = play(questions), batches + 1
        groups = _values(records, section.metric)
        differing = [question for question, values in groups.items() if len(set(values)) > 1]
    if not differing:
        values = Counter(values[0] for values in groups.values() if values)
        common = ", ".join(f"{count:,} at {value:g}" for value, count in values.most_common(3))
        raise UserError(
            f"nothing to learn: the episodes of each of {len(groups):,} questions have the same "
            f"{section.metric} ({common or 'none is valid'})",
            key="algorithm.filter_groups.enable",
            hint="start a new run with a larger rollout.n, other questions or another --model",
        )
    trained = set([*differing, *(question for question in groups if question not in differing)][:wanted])
    for record in records:
        record.left_out = record.trajectory.question.id not in trained
    return position, batches


def _values(records: Sequence[Record], metric: str) -> dict[str, list[float]]:
    """The metric of each question's valid episodes. A reward of weight 0 may have given some none; raises
    UserError where none has it."""
    groups: dict[str, list[float]] = {record.trajectory.question.id: [] for record in records}
    names: dict[str, None] = {}
    for record in records:
        if record.score and record.trajectory.valid:
            parts = {REWARD: record.score.value, **record.score.parts}
            names |= dict.fromkeys(parts)
            if metric in parts:  # sums of equal parts may differ in their last bit
                groups[record.trajectory.question.id].append(round(parts[metric], 9))
    if names and metric not in names:
        raise UserError(
            f"algorithm.filter_groups.metric = {metric}: no episode has this part of the reward",
            key="algorithm.filter_groups.metric", hint=f"use one of {', '.join(names)}",
        )  # fmt: skip
    return groups
