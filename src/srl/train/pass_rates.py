"""Which questions a step asks by their pass rate: how often the policy was right when it was last asked.

A question that is always right or always wrong gives a group without advantages. Those in between teach the
most, so they are drawn more often (Kimi Team 2025, "Kimi k1.5", section 2.3.4, prioritised sampling, arXiv
2501.12599, there in proportion to 1 − pass rate; Yu et al. 2025, "DAPO", eq. 11, arXiv 2503.14476, there only
those in between).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import heappop, heappush

from srl.config.sections import PassRatePools
from srl.train.question_order import QuestionOrder
from srl.trajectory import Question

POOLS = ("unasked", "never", "sometimes", "always")
"""The pools, by how often the episodes of a question were right; each is a key of `data.pass_rate_pools`."""
Asked = dict[str, list[int]]
"""Of each question asked: the step of its last asking, how many of its valid episodes were right, and of how
many. It is part of a checkpoint."""
_Heap = list[tuple[int, int]]


def pool_of(asked: Mapping[str, Sequence[int]], question: str) -> str:
    """The pool of a question; one whose episodes all failed in the search has no pass rate yet."""
    _, right, episodes = asked.get(question, (0, 0, 0))
    if not episodes:
        return "unasked"
    return "never" if not right else "always" if right == episodes else "sometimes"


def _last_asked(asked: Mapping[str, Sequence[int]], question: str) -> int:
    """The step of a question's last asking, 0 before the first."""
    return asked.get(question, (0, 0, 0))[0]


def note_asked(asked: Asked, step: int, passed: Mapping[str, Sequence[bool]]) -> None:
    """Keep what `step` found: of each question that it asked, whether each valid episode was right."""
    for question, episodes in passed.items():
        asked[question] = [step, sum(episodes), len(episodes)]


class PassRateOrder:
    """The questions of a step, drawn from pools by pass rate.

    Each place of `order` says from which part of `data.mix` its question comes. The pool is drawn at random,
    in proportion to the shares of the pools that have a question left, keyed by seed and place. Within a pool
    the question comes that was asked longest ago, in the order of the first epoch where several were. So what
    is drawn is a function of the seed, the place and `asked`, which only `note` changes from here on.

    Each pool is a heap of (step of the last asking, place in the first epoch). What `note` outdates in a heap
    is dropped when it comes to the top.
    """

    def __init__(self, order: QuestionOrder, section: PassRatePools, asked: Asked) -> None:
        self.order, self.section, self.asked = order, section, asked
        self._first = order.first_epoch()
        self._places = {question.id: place for place, question in enumerate(self._first)}
        self.missing = Counter[str]()
        """Of each part of `data.mix`, for how many places `further` last found no question."""
        self._heaps: dict[str, dict[str, _Heap]] = defaultdict(lambda: {name: [] for name in POOLS})
        for question in self._first:
            self._put(question)

    @property
    def batch_size(self) -> int:
        return self.order.batch_size

    def note(self, step: int, passed: Mapping[str, Sequence[bool]]) -> None:
        """`note_asked`, once a step: its questions go to their new pools."""
        note_asked(self.asked, step, passed)
        for name in passed:
            self._put(self._first[self._places[name]])

    def further(self, position: int, count: int, asked: Container[str] = ()) -> tuple[list[Question], int]:
        """The next `count` questions from place `position` on, fewer where the pools run dry, and the place
        after them. None of them has an id in `asked`."""
        drawn, passed_over = list[Question](), list[Question]()
        self.missing.clear()
        for place in range(position, position + count):
            part = self.order.part_of(self.order.at(place))
            heaps = self._heaps[part]
            shares = {name: self._share(name) for name in POOLS if self._share(name)}
            left = [name for name in shares if self._settle(heaps[name], name, asked, passed_over)]
            if left:
                rng = random.Random(f"pass rates {self.order.seed} {place}")
                (name,) = rng.choices(left, [shares[name] for name in left])
                drawn.append(self._first[heappop(heaps[name])[1]])
            else:
                self.missing[part] += 1
        for question in drawn + passed_over:
            self._put(question)
        return drawn, position + count

    def _put(self, question: Question) -> None:
        heap = self._heaps[self.order.part_of(question)][pool_of(self.asked, question.id)]
        heappush(heap, (_last_asked(self.asked, question.id), self._places[question.id]))

    def _settle(self, heap: _Heap, pool: str, asked: Container[str], passed_over: list[Question]) -> bool:
        """Whether a pool has a question without an id in `asked`, which is then at the top of its heap."""
        while heap:
            step, place = heap[0]
            question = self._first[place]
            outdated = (step, pool) != (
                _last_asked(self.asked, question.id),
                pool_of(self.asked, question.id),
            )
            if not outdated and question.id not in asked:
                return True
            heappop(heap)
            if not outdated:
                passed_over.append(question)
        return False

    def _share(self, pool: str) -> float:
        return float(getattr(self.section, pool))

    def drawn(self, questions: Iterable[Question]) -> dict[str, float]:
        """The share of `questions` that comes from each pool, as metrics."""
        counts = Counter(pool_of(self.asked, question.id) for question in questions)
        return {f"train/drawn/{name}": counts[name] / counts.total() for name in POOLS if counts}

    def dry(self, found: int, step: int) -> str:
        """Why `step` asks `found` questions only, with what the parts that lack some have; what to change."""
        held = "; ".join(map(self._held, sorted(self.missing)))
        return (
            f"the pools of data.pass_rate_pools run dry: step {step} asks {found} of {self.batch_size} "
            f"questions; {held}: give a pool that has questions a larger share, or add questions"
        )

    def _held(self, part: str) -> str:
        """How many questions each pool of a part has."""
        those = [question for question in self.order.questions if self.order.part_of(question) == part]
        counts = Counter(pool_of(self.asked, question.id) for question in those)
        held = ", ".join(f"{counts[name]:,} {name} (share {self._share(name):g})" for name in POOLS)
        return f"of {part!r} in data.mix there are {held}" if part else f"there are {held}"
