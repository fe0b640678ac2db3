"""Which questions a step asks: a new order each epoch, that depends on the seed and the step alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from srl.trajectory import Question


class QuestionOrder:
    """`batch(step)` for steps from 1. Any step can be asked for, so a resumed run needs no state.

    The questions at the end of an epoch that fill no batch are left out; each epoch has another order.
    A data set smaller than a batch makes smaller batches.
    """

    def __init__(
        self, questions: Sequence[Question], batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        self.questions = list(questions)
        self.batch_size = min(batch_size, len(self.questions))
        self.seed, self.shuffle = seed, shuffle
        self._shuffled: tuple[int, list[Question]] = (-1, [])  # the epoch that was asked for last

    def batch(self, step: int) -> list[Question]:
        start = (step - 1) * self.batch_size
        size = len(self.questions) - len(self.questions) % self.batch_size
        order = self._epoch(start // size)
        return order[start % size : start % size + self.batch_size]

    def _epoch(self, epoch: int) -> list[Question]:
        if not self.shuffle:
            return self.questions
        if self._shuffled[0] != epoch:
            order = random.Random(f"order {self.seed} {epoch}").sample(self.questions, len(self.questions))
            self._shuffled = epoch, order
        return self._shuffled[1]
