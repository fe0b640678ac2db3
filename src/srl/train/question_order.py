"""Which questions a training step asks. The order of each epoch depends on the seed and the epoch alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from srl.trajectory import Question


class QuestionOrder:
    """The batch of each step, counted from 1. It keeps no state that a resumed run would need.

    Questions at the end of an epoch that do not fill a batch are left out. A data set smaller than a batch
    makes smaller batches.
    """

    def __init__(
        self, questions: Sequence[Question], batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        self.questions = list(questions)
        self.batch_size = min(batch_size, len(self.questions))
        self.seed, self.shuffle = seed, shuffle
        self._shuffled: tuple[int, list[Question]] = (-1, [])  # the latest epoch

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
