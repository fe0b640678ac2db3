"""Exact match, F1 and containment against hand-computed values and transformers' copy of SQuAD's script."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.answers import contains_answer, exact_match, f1, normalise_answer


@pytest.mark.parametrize(
    ("prediction", "gold", "same"),
    [
        ("a", "the", False), ("", "the", False), ("...", "A", False), ("", "", False), (" ", " ", False),
        ("...", "!!!", False), ("The", "the", True), ("the  the", "The The", True), ("!!!", "!!!", True),
    ],
)  # fmt: skip
def test_a_gold_that_normalises_to_nothing_is_compared_as_written(
    prediction: str, gold: str, same: bool
) -> None:
    assert exact_match(prediction, [gold]) == same
    assert f1(prediction, [gold]) == same
    assert exact_match(None, [gold]) == 0


@pytest.mark.parametrize(
    ("text", "golds", "found"),
    [
        ("Doc 1(Title: Paris) The capital of France.", ["paris"], True),
        ("The capital of the France!", ["Capital of France"], True),
        ("It is parish land.", ["Paris"], False),
        ("in 19690", ["1969"], False),
        ("nothing", ["something", "nothing"], True),
        ("a text with the article", ["the"], False),
        ("text", [""], False),
        ("", ["Paris"], False),
        ("text", [], False),
    ],
)
def test_containment_needs_whole_words(text: str, golds: list[str], found: bool) -> None:
    assert contains_answer(text, golds) is found


VOCABULARY = ["a", "An", "the", "The", "red", "Red,", "blue.", "U.S.", "U.S", "1,000", "İz", "ß", "–", "中文"]
words = st.lists(st.sampled_from(VOCABULARY))
texts = st.one_of(words.map(" ".join), st.text(max_size=30))


@settings(deadline=None)
@given(gold=texts, before=words, after=words)
def test_an_answer_among_other_words_is_contained(gold: str, before: list[str], after: list[str]) -> None:
    text = " ".join([*before, gold, *after])
    assert contains_answer(text, [gold]) is bool(normalise_answer(gold))
