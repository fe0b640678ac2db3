"""Which questions a training step asks: shuffled by seed and epoch, all alike or in shares (`data.mix`)."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping, Sequence
from math import floor
from typing import NamedTuple

from srl.config.sections import Data, Rft
from srl.errors import UserError, nearest
from srl.trajectory import Question


class QuestionOrder:
    """The batch of each step, counted from 1. It keeps no state that a resumed run would need.

    With dynamic sampling a training step may ask for more than a batch (`further`), and the next one goes on
    after that: a step of this order is then not a step of training.

    Questions at the end of an epoch that do not fill a batch are left out. A data set smaller than a batch
    makes smaller batches.
    """

    def __init__(self, questions: Sequence[Question], batch_size: int, seed: int) -> None:
        self.questions = list(questions)
        self.batch_size = min(batch_size, len(self.questions))
        self.seed = seed
        self._shuffled: tuple[int, list[Question]] = (-1, [])  # the latest epoch
        self._latest: tuple[int, list[Question]] = (-1, [])  # the latest batch of `at`

    def batch(self, step: int) -> list[Question]:
        start = (step - 1) * self.batch_size
        size = len(self.questions) - len(self.questions) % self.batch_size
        order = self._epoch(start // size)
        return order[start % size : start % size + self.batch_size]

    def at(self, position: int) -> Question:
        """The question at `position`, counted from 0, of all that the steps ask one after the other."""
        step, place = divmod(position, self.batch_size)
        if self._latest[0] != step:
            self._latest = step, self.batch(step + 1)
        return self._latest[1][place]

    def further(self, position: int, count: int, asked: Container[str] = ()) -> tuple[list[Question], int]:
        """The next `count` questions from `position` on, and the position after them.

        Those with an id in `asked` are passed over, since a step asks no question twice. Where too few others
        come within two epochs it is those.
        """
        found: dict[str, Question] = {}
        for place in range(position, position + 2 * len(self.questions)):
            if len(found) == count:
                break
            position, question = place + 1, self.at(place)
            if question.id not in asked:
                found.setdefault(question.id, question)
        return list(found.values()), position

    def _epoch(self, epoch: int) -> list[Question]:
        if self._shuffled[0] != epoch:
            order = random.Random(f"order {self.seed} {epoch}").sample(self.questions, len(self.questions))
            self._shuffled = epoch, order
        return self._shuffled[1]


def order_of(
    questions: Sequence[Question], data: Data, seed: int, rounds: Rft | None = None
) -> QuestionOrder:
    """The order in which a run asks its training questions, `data.train_batch_size` a step, or in `rounds` of
    fine-tuning.

    Raises UserError where `data.mix` does not fit them.
    """
    size = (rounds.questions or len(questions)) if rounds else data.train_batch_size
    if not data.mix:
        return QuestionOrder(questions, size, seed)
    smaller = "set a smaller rft.questions" if rounds else "data.train_batch_size"
    return MixedOrder(questions, size, seed, data.mix, smaller=smaller)


class _Start(NamedTuple):
    """Where a step starts in a pool: how many were asked before, the epoch, and the place in its order."""

    asked: int = 0
    epoch: int = 1
    place: int = 0


class MixedOrder(QuestionOrder):
    """The batch of each step, mixed of pools of questions: one of each data source, or number of hops.

    Each place of a batch goes to the pool that is furthest below its share of all places so far, the first
    in `mix` of several. Of n pools none is ever more than 1/2 + … + 1/n questions below its share, or 1
    above. A pool is shuffled anew when it has too few questions left for a batch, so pools have epochs of
    their own. As without a mix, a batch is a function of seed and step alone.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        batch_size: int,
        seed: int,
        mix: Mapping[str, float],
        key: str = "data.mix",
        smaller: str = "data.train_batch_size",
    ) -> None:
        pools = _pools(questions, mix, key)
        super().__init__([item for pool in pools.values() for item in pool], batch_size, seed)
        total = sum(mix[name] for name in pools)
        self._shares = [mix[name] / total for name in pools]
        for (name, pool), share in zip(pools.items(), self._shares, strict=True):
            wanted = floor(share * batch_size + _deviation(len(pools)))
            if len(pool) < wanted:
                raise UserError(
                    f"{key} needs at least {wanted} questions of {name!r} for batches of {batch_size}, and "
                    f"there are {len(pool)}: lower its share or {smaller}"
                )
        self._pools = [QuestionOrder(pool, len(pool), seed) for pool in pools.values()]
        self._starts = [[_Start() for _ in pools]]  # of the steps up to the last one that was asked for

    def _epoch(self, epoch: int) -> list[Question]:
        """As many mixed batches as the questions fill; a pool may come several times in them, or in part."""
        if self._shuffled[0] != epoch:
            count = len(self.questions) // self.batch_size
            steps = range(epoch * count + 1, (epoch + 1) * count + 1)
            self._shuffled = epoch, [question for step in steps for question in self._mixed(step)]
        return self._shuffled[1]

    def _mixed(self, step: int) -> list[Question]:
        while len(self._starts) <= step:
            self._starts.append(self._after(len(self._starts)))
        slots = self._slots(step)
        ends = self._starts[step]
        chosen = [
            iter(pool.batch(end.epoch)[end.place - slots.count(number) : end.place])
            for number, (pool, end) in enumerate(zip(self._pools, ends, strict=True))
        ]
        return [next(chosen[number]) for number in slots]

    def _slots(self, step: int) -> list[int]:
        """The pool of each place of a step's batch."""
        asked, slots = [start.asked for start in self._starts[step - 1]], list[int]()
        for place in range(1, self.batch_size + 1):
            total = (step - 1) * self.batch_size + place
            missing = [share * total - count for share, count in zip(self._shares, asked, strict=True)]
            slots.append(missing.index(max(missing)))
            asked[slots[-1]] += 1
        return slots

    def _after(self, step: int) -> list[_Start]:
        """Where the step after this one starts; what a pool had left for too small a batch is passed over."""
        slots, ends = self._slots(step), list[_Start]()
        for number, (start, pool) in enumerate(zip(self._starts[step - 1], self._pools, strict=True)):
            count = slots.count(number)
            fits = start.place + count <= len(pool.questions)
            epoch, place = (start.epoch, start.place) if fits else (start.epoch + 1, 0)
            ends.append(_Start(start.asked + count, epoch, place + count))
        return ends


_NO_HOPS = "unknown"
"""The name, in a mix by hops, of questions whose hops are not known."""


def _by_hops(mix: Mapping[str, float]) -> bool:
    """Whether the names are numbers of hops; `unknown` may be among them, and alone is a data source."""
    return any(name.isdecimal() for name in mix) and all(name.isdecimal() or name == _NO_HOPS for name in mix)


def _part(question: Question, mix: Mapping[str, float]) -> str:
    """The name that a question has in a mix: its number of hops, or its data source."""
    if not _by_hops(mix):
        return question.data_source
    return _NO_HOPS if question.hops is None else str(question.hops)


def _pools(questions: Sequence[Question], mix: Mapping[str, float], key: str) -> dict[str, list[Question]]:
    """The questions of each name in `mix` that has a share, in its order. Raises UserError."""
    kind = "number of hops" if _by_hops(mix) else "data source"
    pools: dict[str, list[Question]] = {name: [] for name in mix}
    for question in questions:
        name = _part(question, mix)
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


def _deviation(pools: int) -> float:
    """How much more than its share a batch can have of one of n pools: 1/2 + … + 1/n below before it, and
    1 − 1/n above after it."""
    return sum(1 / place for place in range(1, pools + 1)) - 1 / pools
