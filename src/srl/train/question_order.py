"""Which questions a training step asks: shuffled by seed and epoch, all alike or in shares (`data.mix`)."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import count
from math import floor

from srl.config.sections import Data, Rft
from srl.errors import UserError, nearest
from srl.trajectory import Question


class QuestionOrder:
    """The questions that a run asks, one after the other, in batches; a function of questions and seed alone,
    so a resumed run needs no state of it.

    Questions at the end of an epoch that do not fill a batch are left out. A data set smaller than a batch
    makes smaller batches. With a `mix` a batch has shares of data sources or hops (`_mixed`). Raises
    UserError, naming the keys `key` and `smaller`, where that does not fit the questions.

    With dynamic sampling a training step may ask for more than a batch (`further`), and the next one goes on
    after that: a batch of this order is then not a step of training.
    """

    def __init__(
        self, questions: Sequence[Question], batch_size: int, seed: int,
        mix: Mapping[str, float] | None = None, *, key: str = "data.mix",
        smaller: str = "data.train_batch_size",
    ) -> None:  # fmt: skip
        self.questions = list(questions)
        if mix:
            pools = _pools(questions, mix, key)
            self.questions = [question for pool in pools.values() for question in pool]
            shares = [mix[name] / sum(mix[name] for name in pools) for name in pools]
            _check_sizes(pools, shares, batch_size, key, smaller)
        self.batch_size = min(batch_size, len(self.questions))
        self._questions_so_far: list[Question] = []
        self._batches = (
            _mixed(list(pools.values()), shares, self.batch_size, seed)
            if mix
            else _shuffled(self.questions, self.batch_size, seed)
        )

    def batch(self, step: int) -> list[Question]:
        """The questions of a step, counted from 1."""
        start, end = (step - 1) * self.batch_size, step * self.batch_size
        while len(self._questions_so_far) < end:
            self._questions_so_far += next(self._batches)
        return self._questions_so_far[start:end]

    def further(
        self, position: int, count: int, asked_ids: Container[str] = ()
    ) -> tuple[list[Question], int]:
        """The next `count` questions from `position` on, counted from 0, and the position after them.

        Those with an id in `asked_ids` are passed over, since a step asks no question twice. Where too few
        others come within two epochs it is those.
        """
        questions: dict[str, Question] = {}
        for place in range(position, position + 2 * len(self.questions)):
            if len(questions) == count:
                break
            step, index = divmod(place, self.batch_size)
            position, question = place + 1, self.batch(step + 1)[index]
            if question.id not in asked_ids:
                questions.setdefault(question.id, question)
        return list(questions.values()), position


def order_of(
    questions: Sequence[Question], data: Data, seed: int, rounds: Rft | None = None
) -> QuestionOrder:
    """The order in which a run asks its training questions, `data.train_batch_size` a step, or in `rounds` of
    fine-tuning.

    Raises UserError where `data.mix` does not fit them.
    """
    size = (rounds.questions or len(questions)) if rounds else data.train_batch_size
    smaller = "set a smaller rft.questions" if rounds else "data.train_batch_size"
    return QuestionOrder(questions, size, seed, data.mix, smaller=smaller)


def _epochs(questions: Sequence[Question], seed: int) -> Iterator[list[Question]]:
    """The questions, shuffled anew in each epoch."""
    for epoch in count():
        yield random.Random(f"order {seed} {epoch}").sample(questions, len(questions))


def _shuffled(questions: Sequence[Question], size: int, seed: int) -> Iterator[list[Question]]:
    """The whole batches of each epoch, an epoch at a time."""
    for epoch in _epochs(questions, seed):
        yield epoch[: len(epoch) - len(epoch) % size]


def _mixed(
    pools: Sequence[Sequence[Question]], shares: Sequence[float], size: int, seed: int
) -> Iterator[list[Question]]:
    """Batches mixed of pools of questions: one of each data source, or number of hops.

    Each place of a batch goes to the pool that is furthest below its share of all places so far, the first
    of several. Of n pools none is ever more than 1/2 + … + 1/n questions below its share, or 1 above. A pool
    is shuffled anew when it has too few questions left for a batch, so pools have epochs of their own.
    """
    epochs = [_epochs(pool, seed) for pool in pools]
    queues = [iter(next(epoch)) for epoch in epochs]
    unasked = [len(pool) for pool in pools]
    counts = [0] * len(pools)
    for start in count(step=size):
        slots = list[int]()
        for total in range(start + 1, start + size + 1):
            shortfalls = [share * total - filled for share, filled in zip(shares, counts, strict=True)]
            slots.append(shortfalls.index(max(shortfalls)))
            counts[slots[-1]] += 1
        for number, pool in enumerate(pools):
            if (uses := slots.count(number)) > unasked[number]:
                queues[number], unasked[number] = iter(next(epochs[number])), len(pool)
            unasked[number] -= uses
        yield [next(queues[number]) for number in slots]


_NO_HOPS = "unknown"
"""The name, in a mix by hops, of questions whose hops are not known."""


def _pools(questions: Sequence[Question], mix: Mapping[str, float], key: str) -> dict[str, list[Question]]:
    """The questions of each name in `mix` that has a share, in its order: of each number of hops where the
    names are numbers (`unknown` may be among them, and alone is a data source), else of each data source.
    Raises UserError."""
    is_hops = [name.isdecimal() for name in mix]
    by_hops = any(is_hops) and all(
        is_number or name == _NO_HOPS for is_number, name in zip(is_hops, mix, strict=True)
    )
    kind = "number of hops" if by_hops else "data source"
    pools: dict[str, list[Question]] = {name: [] for name in mix}
    for question in questions:
        name = question.data_source
        if by_hops:
            name = _NO_HOPS if question.hops is None else str(question.hops)
        if name not in pools:
            raise UserError(
                f"{key} has no share for the {kind} {name!r} of question {question.id}; add it, with 0 to "
                f"leave such questions out{nearest(name, list(mix))}"
            )
        pools[name].append(question)
    used = [name for name in mix if mix[name]]
    if not used:
        raise UserError(f"{key} has only shares of 0; give a share to what is to be trained on")
    if empty := [name for name in used if not pools[name]]:
        raise UserError(f"{key} names the {kind} {empty[0]!r}, which no training question has; remove it")
    return {name: pools[name] for name in used}


def _check_sizes(
    pools: Mapping[str, Sequence[Question]], shares: Sequence[float], size: int, key: str, smaller: str
) -> None:
    """Raises UserError where a pool has too few questions for its share of a batch and what can come on top
    (`_mixed`): 1/2 + … + 1/n from below before it, and 1 − 1/n above after it."""
    most_on_top = sum(1 / place for place in range(1, len(pools) + 1)) - 1 / len(pools)
    for (name, pool), share in zip(pools.items(), shares, strict=True):
        if len(pool) < (smallest := floor(share * size + most_on_top)):
            raise UserError(
                f"{key} needs at least {smallest} questions of {name!r} for batches of {size}, and "
                f"there are {len(pool)}: lower its share or {smaller}"
            )
