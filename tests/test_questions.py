"""Which questions a run asks: a sample of a file, less what is excluded, ordered by seed and step alone."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import training
from tests.training import config, tokenizer, train, write_setting

import srl.store
from srl.config.sections import Data
from srl.data.demonstration_file import write_demonstrations
from srl.data.parquet import write_questions
from srl.data.splits import proportional
from srl.errors import UserError
from srl.rollout.codec import Codec
from srl.train.dry_run import startup_errors
from srl.train.questions import QuestionOrder, load_splits, order_of, stratified
from srl.trajectory import Question

SHARES = st.lists(st.floats(0.05, 1), min_size=1, max_size=4)
SIZES = st.integers(1, 12)
CALMLY = settings(deadline=None, max_examples=50)


def questions(**counts):
    return [
        Question(f"{source}{n}", "?", (), source, metadata={"hops": 1 + n % 2})
        for source, count in counts.items()
        for n in range(count)
    ]


def order_of_shares(shares, size, seed=0):
    """Without shares, an order of all alike."""
    mix = {f"s{number}": share for number, share in enumerate(shares)}
    return QuestionOrder(questions(**dict.fromkeys(mix or ["s0"], 40)), size, seed, mix or None)


def ids(order, step):
    return [question.id for question in order.batch(step)]


# --- a sample of a file ---


def test_a_sample_is_in_proportion_to_the_sources():
    """Hamilton's method by hand: 5.12, 2.56 and 2.32 of ten."""
    assert proportional({"a": 64, "b": 32, "c": 29}, 10) == {"a": 5, "b": 3, "c": 2}
    assert proportional({"b": 1, "a": 1}, 1) == {"b": 0, "a": 1}, "equal remainders by name"
    asked = questions(nq=20, hotpotqa=30, twowiki=10)
    drawn = stratified(asked, 6)
    assert Counter(item.data_source for item in drawn) == {"nq": 2, "hotpotqa": 3, "twowiki": 1}
    assert [item for item in asked if item in drawn] == drawn


# --- the order of steps ---


@CALMLY
@given(st.integers(1, 40), SIZES, st.integers(0, 3))
def test_every_question_comes_once_an_epoch(count, size, seed):
    order = QuestionOrder(questions(nq=count), size, seed)
    per_epoch = count // min(size, count)
    for epoch in range(3):
        asked = [name for step in range(per_epoch) for name in ids(order, epoch * per_epoch + step + 1)]
        assert len(asked) == len(set(asked)) == per_epoch * min(size, count)
        assert count - len(asked) < min(size, count), "only what fills no batch is left out"


@CALMLY
@given(st.just([]) | SHARES, SIZES, st.integers(0, 3), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_batch_does_not_depend_on_what_was_asked_before(shares, size, seed, steps):
    order = order_of_shares(shares, size, seed)
    found = {step: ids(order, step) for step in steps}
    random.Random(0).shuffle(steps)
    for step in steps:
        assert ids(order_of_shares(shares, size, seed), step) == ids(order, step) == found[step]


def test_epochs_and_seeds_have_orders_of_their_own_the_same_in_every_process():
    """`random.Random` of a text is the same everywhere; a hash of one is not."""
    epochs = [ids(QuestionOrder(questions(s=9), 9, seed), number) for seed in range(3) for number in (1, 2)]
    assert len(set(map(tuple, epochs))) == 6
    numbers = [Question(str(number), "?", ()) for number in range(6)]
    assert ids(QuestionOrder(numbers, 6, seed=1), 1) == ["4", "0", "3", "5", "1", "2"]


@CALMLY
@given(SHARES, SIZES)
def test_every_pool_keeps_to_its_share_and_no_batch_asks_a_question_twice(shares, size):
    order, asked = order_of_shares(shares, size), Counter[str]()
    harmonic = sum(1 / n for n in range(2, len(shares) + 1))
    for step in range(1, 30):
        batch = order.batch(step)
        assert len({question.id for question in batch}) == len(batch) == size
        asked.update(question.data_source for question in batch)
        for number, share in enumerate(shares):
            below = share / sum(shares) * step * size - asked[f"s{number}"]
            assert -1 < below <= harmonic + 1e-6


def test_a_pool_asks_all_its_questions_before_any_again():
    order = QuestionOrder(questions(big=40, small=6), 4, 0, {"big": 1, "small": 1})
    asked = [name for step in range(1, 10) for name in ids(order, step) if name.startswith("small")]
    epochs = [asked[start : start + 6] for start in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"small{n}" for n in range(6))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(
    ("mix", "names"),
    [
        ({"nq": 1, "squat": 1}, "squat"), ({"nq": 1, "squad": 1, "popqa": 1}, "popqa"),
        ({"nq": 0, "squad": 0}, "0"), ({"1": 1}, "'2'"), ({"nq": 9, "squad": 1}, "'nq'"),
    ],
    ids=["another name", "no question", "no share", "no hops", "too few"],
)  # fmt: skip
def test_a_mix_that_does_not_fit_the_questions_is_refused(mix, names):
    with pytest.raises(UserError, match=names):
        order_of(questions(nq=6, squad=20), Data(train_batch_size=10, mix=mix), 0)


def test_a_run_trains_on_the_mix(tmp_path):
    train(config(tmp_path, sets=["data.mix.1=1", "data.mix.2=3"], trainer__test_freq=0), tmp_path / "work")
    (run,) = (tmp_path / "work" / "runs").iterdir()
    with srl.store.open(run) as log:
        query = "SELECT DISTINCT step, question_id, hops FROM trajectories WHERE phase = 'train'"
        rows = srl.store.rows(log, query)
    assert Counter((row["step"], row["hops"]) for row in rows) == {(1, 1): 1, (1, 2): 3, (2, 1): 1, (2, 2): 3}


# --- what is excluded ---


@pytest.fixture
def place(tmp_path):
    write_setting(tmp_path)
    return tmp_path


def shown(path, *numbers):
    """A file of demonstrations of these training questions, of the first one twice."""
    found = {item.id: item for item in training.questions("train", 8)}
    chosen = [found[f"towns/train/{number}"] for number in (numbers[0], *numbers)]
    write_demonstrations(path, [
        replace(item, metadata={"turns": [f"<answer> {way} </answer>"]}) for way, item in enumerate(chosen)
    ])  # fmt: skip
    return str(path)


def test_questions_of_demonstrations_and_of_question_files_are_not_asked(place):
    def splits(excluded):
        chosen = config(place, data__exclude_files=excluded)
        return load_splits(chosen, Codec(tokenizer()), lambda text: None, "grpo")

    write_questions(place / "others.parquet", training.questions("train", 2))
    before, after = splits(None), splits([shown(place / "shown.jsonl", 2, 5), str(place / "others.parquet")])
    gone = {f"towns/train/{number}" for number in (0, 1, 2, 5)}
    assert after.train == [item for item in before.train if item.id not in gone]
    assert (after.val, after.test) == (before.val, before.test), "what is measured stays"


@pytest.mark.parametrize("numbers", [range(8), ()], ids=["all", "none of them"])
def test_files_that_exclude_all_or_nothing_are_refused_by_run_and_plan(place, numbers):
    (other,) = training.questions("train", 1)
    other = replace(other, id="towers/7", metadata={"turns": ["<answer> red </answer>"]})
    write_demonstrations(place / "other.jsonl", [other])
    file = shown(place / "shown.jsonl", *numbers) if numbers else str(place / "other.jsonl")
    chosen = config(place, data__exclude_files=file)
    with pytest.raises(UserError, match="exclude"):
        train(chosen, place / "work")
    assert any("exclude" in error for error in startup_errors(chosen))


def test_a_run_whose_prompts_are_too_long_does_not_start_unless_they_may_be_left_out(place):
    chosen = config(place, data__max_prompt_length=4)
    assert any("data.max_prompt_length" in error for error in startup_errors(chosen))
    with pytest.raises(UserError, match="max_prompt_length"):
        train(chosen, place / "work")
    longer = replace(training.questions("train", 1)[0], id="long", text="what flag has " + "velmar " * 30)
    write_questions(place / "train.parquet", [*training.questions("train", 3), longer])
    filtered = config(place, data__filter_overlong_prompts=True)
    splits = load_splits(filtered, Codec(tokenizer()), lambda text: None, "grpo")
    assert [question.id for question in splits.train] == [f"towns/train/{n}" for n in range(3)]
