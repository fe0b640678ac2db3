"""How a training batch mixes data sources or hops: by a stated rule, and by seed and step alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training import config, train

import srl.store
from srl.config.sections import Data, Sft
from srl.data.demonstration_file import read_demonstrations, write_demonstrations
from srl.errors import UserError
from srl.train.questions import QuestionOrder, order_of
from srl.train.sft import batches
from srl.trajectory import Question, Trajectory

SHARES = st.lists(st.floats(0.05, 1), min_size=1, max_size=4)
SIZES = st.integers(1, 12)
CALMLY = settings(deadline=None, max_examples=60)


def questions(**counts):
    return [
        Question(f"{source}{n}", "?", (), source, metadata={"hops": 1 + n % 2})
        for source, count in counts.items()
        for n in range(count)
    ]


def mixed(shares, size, seed=0, count=40):
    mix = {f"s{number}": share for number, share in enumerate(shares)}
    return QuestionOrder(questions(**dict.fromkeys(mix, count)), size, seed, mix)


def ids(order, step):
    return [question.id for question in order.batch(step)]


@CALMLY
@given(SHARES, SIZES)
def test_every_pool_keeps_to_its_share_and_no_batch_asks_a_question_twice(shares, size):
    order, asked = mixed(shares, size), Counter[str]()
    harmonic = sum(1 / n for n in range(2, len(shares) + 1))
    for step in range(1, 30):
        batch = order.batch(step)
        assert len({question.id for question in batch}) == len(batch) == size
        asked.update(question.data_source for question in batch)
        for number, share in enumerate(shares):
            below = share / sum(shares) * step * size - asked[f"s{number}"]
            assert -1 < below <= harmonic + 1e-6


@CALMLY
@given(SHARES, SIZES, st.integers(0, 3), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_batch_does_not_depend_on_what_was_asked_before(shares, size, seed, steps):
    order = mixed(shares, size, seed)
    found = {step: ids(order, step) for step in steps}
    random.Random(0).shuffle(steps)
    for step in steps:
        assert ids(mixed(shares, size, seed), step) == ids(order, step) == found[step]


def test_a_pool_asks_all_its_questions_before_any_again():
    order = QuestionOrder(questions(big=40, small=6), 4, 0, {"big": 1, "small": 1})
    asked = [name for step in range(1, 10) for name in ids(order, step) if name.startswith("small")]
    epochs = [asked[start : start + 6] for start in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"small{n}" for n in range(6))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"nq": 1, "squat": 1}, "no share for the data source 'squad' of question squad0; add it, .*'squat'"),
        ({"nq": 1, "squad": 1, "popqa": 1}, "names the data source 'popqa', which no training question has"),
        ({"nq": 0, "squad": 0}, "only shares of 0"),
        ({"1": 1}, "no share for the number of hops '2' of question nq1"),
        ({"nq": 9, "squad": 1}, "needs at least 10 questions of 'nq' for batches of 10, and there are 6"),
    ],
)  # fmt: skip
def test_a_mix_that_does_not_fit_the_questions_is_refused(mix, message):
    with pytest.raises(UserError, match=message):
        order_of(questions(nq=6, squad=20), Data(train_batch_size=10, mix=mix), 0)


def test_a_run_trains_on_the_mix_and_refuses_one_that_does_not_fit(tmp_path):
    with pytest.raises(UserError, match="no share for the number of hops '2'"):
        train(config(tmp_path, sets=["data.mix.1=1"]), tmp_path / "work")
    train(config(tmp_path, sets=["data.mix.1=1", "data.mix.2=3"], trainer__test_freq=0), tmp_path / "work")
    (run,) = (tmp_path / "work" / "runs").iterdir()
    with srl.store.open(run) as log:
        query = "SELECT DISTINCT step, question_id, hops FROM trajectories WHERE phase = 'train'"
        rows = srl.store.rows(log, query)
    assert Counter((row["step"], row["hops"]) for row in rows) == {(1, 1): 1, (1, 2): 3, (2, 1): 1, (2, 2): 3}


def shown(path, **counts):
    """Demonstrations as they are read from the file that they were written to."""
    asked = [
        Question(item.id, item.text, ("a",), item.data_source, metadata={**item.metadata, "turns": ["…"]})
        for item in questions(**counts)
    ]
    write_demonstrations(path, asked)
    return [Trajectory(item) for item in read_demonstrations(path)]


@pytest.mark.parametrize(("mix", "kind"), [({"nq": 1, "squad": 3}, "source"), ({"1": 1, "2": 3}, "hops")])
def test_batches_of_demonstrations_have_the_shares_of_their_sources_or_hops(tmp_path, mix, kind):
    rows, sft = shown(tmp_path / "d.jsonl", nq=20, squad=20), Sft(batch_size=8, steps=9, mix=mix)
    found = list(batches(rows, sft, seed=0))
    kinds = [
        [
            item.question.data_source if kind == "source" else str(item.question.metadata["hops"])
            for item in part
        ]
        for part in found
    ]
    few, many = mix
    assert [Counter(part) for part in kinds] == [{few: 2, many: 6}] * 9
    assert found == list(batches(rows, sft, seed=0)) != list(batches(rows, sft, seed=1))
