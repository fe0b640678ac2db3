"""Which questions a step asks: all of them once an epoch, by seed and step alone."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from srl.train.questions import QuestionOrder
from srl.trajectory import Question

COUNTS = st.integers(1, 40)
SIZES = st.integers(1, 12)
SEEDS = st.integers(0, 3)
CALMLY = settings(deadline=None, max_examples=40)


def questions(count):
    return [Question(str(number), f"question {number}", ()) for number in range(count)]


def ids(order, step):
    return [question.id for question in order.batch(step)]


@CALMLY
@given(COUNTS, SIZES, SEEDS)
def test_every_question_comes_once_an_epoch(count, size, seed):
    order = QuestionOrder(questions(count), size, seed)
    per_epoch = count // min(size, count)
    for epoch in range(3):
        asked = [name for step in range(per_epoch) for name in ids(order, epoch * per_epoch + step + 1)]
        assert len(asked) == len(set(asked)) == per_epoch * min(size, count)
        assert count - len(asked) < min(size, count), "only what fills no batch is left out"


@CALMLY
@given(COUNTS, SIZES, SEEDS, st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_batch_does_not_depend_on_what_was_asked_before(count, size, seed, steps):
    order = QuestionOrder(questions(count), size, seed)
    found = {step: ids(order, step) for step in steps}
    random.Random(0).shuffle(steps)
    for step in steps:
        assert ids(QuestionOrder(questions(count), size, seed), step) == ids(order, step) == found[step]


@CALMLY
@given(st.integers(8, 40))
def test_epochs_and_seeds_have_orders_of_their_own(count):
    def epoch(seed, number):
        return ids(QuestionOrder(questions(count), count, seed), number)

    assert len({tuple(epoch(seed, number)) for seed in range(3) for number in (1, 2)}) == 6
    assert sorted(epoch(0, 1)) == sorted(epoch(1, 2))


def test_few_questions_make_smaller_batches():
    order = QuestionOrder(questions(3), 8, seed=0)
    assert [sorted(ids(order, step)) for step in (1, 2)] == [["0", "1", "2"]] * 2


def test_the_order_does_not_depend_on_the_process():
    """`random.Random` of a text is the same everywhere; a hash of one is not."""
    assert ids(QuestionOrder(questions(6), 6, seed=1), 1) == ["4", "0", "3", "5", "1", "2"]
