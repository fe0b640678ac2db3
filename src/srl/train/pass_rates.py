"""Which questions a step asks by their pass rate: how often the policy was right when it was last asked.

A question that is always right or always wrong gives a group without advantages. Those in between teach the
most, so they are drawn more often (Kimi Team 2025, "Kimi k1.5", section 2.3.4, prioritised sampling, arXiv
2501.12599, there in proportion to 1 − pass rate; Yu et al. 2025, "DAPO", eq. 11, arXiv 2503.14476, there only
those in between).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from srl.config.sections import PassRatePools
from srl.train.question_order import QuestionOrder
from srl.trajectory import Question

POOLS = ("unasked", "never", "sometimes", "always")
"""The pools, by how often the episodes of a question were right; each is a key of `data.pass_rate_pools`."""
Asked = dict[str, list[int]]
"""Of each question asked: the step of its last asking, how many of its valid episodes were right, and of how
many. It is part of a checkpoint."""


def pool_of(asked: Mapping[str, Sequence[int]], question: str) -> str:
    """The pool of a question; one whose episodes all failed in the search has no pass rate yet."""
    _, right, episodes = asked.get(question, (0, 0, 0))
    if not episodes:
        return "unasked"
    return "never" if not right else "always" if right == episodes else "sometimes"


def note_asked(asked: Asked, step: int, passed: Mapping[str, Sequence[bool]]) -> None:
    """Keep what `step` found: of each question that it asked, whether each valid episode was right."""
    for question, episodes in passed.items():
        asked[question] = [step, sum(episodes), len(episodes)]


@dataclass(slots=True)
class PassRateOrder:
    """The questions of a step, drawn from pools by pass rate.

    Each place of `order` says from which part of `data.mix` its question comes. The pool is drawn at random,
    in proportion to the shares of the pools that have a question left, keyed by seed and place. Within a pool
    the question comes that was asked longest ago, in the order of the first epoch where several were. So what
    is drawn is a function of the seed, the place and `asked`.
    """

    order: QuestionOrder
    section: PassRatePools
    asked: Asked

    @property
    def batch_size(self) -> int:
        return self.order.batch_size

    def further(self, position: int, count: int, asked: Container[str] = ()) -> tuple[list[Question], int]:
        """The next `count` questions from place `position` on, fewer where the pools run dry, and the place
        after them. None of them has an id in `asked`."""
        order, queues = self.order, self._queues(asked)
        places = range(position, position + count)
        drawn = [self._draw(queues[order.part_of(order.at(place))], place) for place in places]
        return [question for question in drawn if question is not None], position + count

    def _queues(self, asked: Container[str]) -> Mapping[str, dict[str, deque[Question]]]:
        """The questions of each pool, by the part of `data.mix`, in the order in which they are drawn."""
        found: dict[str, dict[str, deque[Question]]] = defaultdict(lambda: {name: deque() for name in POOLS})
        for question in sorted(self.order.first_epoch(), key=lambda item: self.asked.get(item.id, [0])[0]):
            if question.id not in asked:
                found[self.order.part_of(question)][pool_of(self.asked, question.id)].append(question)
        return found

    def _draw(self, queues: Mapping[str, deque[Question]], place: int) -> Question | None:
        left = [name for name in POOLS if queues[name] and self._share(name)]
        if not left:
            return None
        rng = random.Random(f"pass rates {self.order.seed} {place}")
        (name,) = rng.choices(left, [self._share(name) for name in left])
        return queues[name].popleft()

    def _share(self, pool: str) -> float:
        return float(getattr(self.section, pool))

    def drawn(self, questions: Iterable[Question]) -> dict[str, float]:
        """The share of `questions` that comes from each pool, as metrics."""
        counts = Counter(pool_of(self.asked, question.id) for question in questions)
        return {f"train/drawn/{name}": counts[name] / counts.total() for name in POOLS if counts}

    def dry(self, found: int, step: int) -> str:
        """Why `step` asks `found` questions only, and what to change."""
        counts = Counter(pool_of(self.asked, question.id) for question in self.order.questions)
        held = ", ".join(f"{counts[name]:,} {name} (share {self._share(name):g})" for name in POOLS)
        return (
            f"the pools of data.pass_rate_pools run dry: step {step} asks {found} of {self.batch_size} "
            f"questions; there are {held}: give a pool that has questions a larger share, or add questions"
        )
