"""Exact match, F1 and containment against hand-computed values and transformers' copy of SQuAD's script."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.answers import contains_answer, cover_exact_match, exact_match, f1, normalise_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel\tTower!", "eiffel tower"),
        ("an apple, a pear & the fig", "apple pear fig"),
        ("Theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("well-known", "wellknown"),
        ("Beyoncé", "beyoncé"),
        ("1,000", "1000"),
        ("“quoted”", "“quoted”"),
        ("ISTANBUL\u00a0(the city)", "istanbul city"),
        ("the", ""),
        ("", ""),
    ],
)
def test_normalising_drops_case_punctuation_articles_and_spaces(text: str, expected: str) -> None:
    assert normalise_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "em", "overlap"),
    [
        ("the Beatles.", ["Beatles"], 1.0, 1.0),
        ("Paul McCartney", ["McCartney"], 0.0, 2 / 3),
        ("Paul McCartney", ["Lennon", "paul mccartney"], 1.0, 1.0),
        ("red red blue", ["red blue blue green"], 0.0, 4 / 7),
        ("in the year 1969", ["1969"], 0.0, 0.5),
        ("1970", ["1969"], 0.0, 0.0),
        ("", ["1969"], 0.0, 0.0),
        (None, ["1969"], 0.0, 0.0),
        ("1969", [], 0.0, 0.0),
    ],
)
def test_best_gold_answer_counts(prediction: str | None, golds: list[str], em: float, overlap: float) -> None:
    assert exact_match(prediction, golds) == em
    assert f1(prediction, golds) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("prediction", "gold", "same"),
    [
        ("a", "the", False),
        ("", "the", False),
        ("...", "A", False),
        ("", "", False),
        (" ", " ", False),
        ("...", "!!!", False),
        ("The", "the", True),
        ("the  the", "The The", True),
        ("!!!", "!!!", True),
    ],
)
def test_a_gold_that_normalises_to_nothing_is_compared_as_written(
    prediction: str, gold: str, same: bool
) -> None:
    assert exact_match(prediction, [gold]) == same
    assert f1(prediction, [gold]) == same
    assert exact_match(None, [gold]) == 0


@pytest.mark.parametrize(
    ("prediction", "golds", "covered"),
    [
        ("It was the year 1969.", ["1969"], 1.0),
        ("It was 1969 or 1970", ["1971", "the 1970"], 1.0),
        ("the party", ["art"], 0.0),
        ("I do not know", ["no"], 0.0),
        ("McCartney", ["Paul McCartney"], 0.0),
        ("anything", ["the"], 0.0),
        ("The", ["the"], 1.0),
        ("", ["1969"], 0.0),
        (None, ["1969"], 0.0),
        ("1969", [], 0.0),
    ],
)
def test_cover_exact_match_is_a_gold_answer_in_whole_words(
    prediction: str | None, golds: list[str], covered: float
) -> None:
    assert cover_exact_match(prediction, golds) == covered


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
@given(prediction=texts, golds=st.lists(texts, max_size=4))
def test_agrees_with_squad_evaluation_wherever_the_gold_leaves_words(
    prediction: str, golds: list[str]
) -> None:
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1, normalize_answer

    assert normalise_answer(prediction) == normalize_answer(prediction)
    golds = [gold for gold in golds if normalize_answer(gold)]
    expected = max((compute_exact(gold, prediction) for gold in golds), default=0)
    assert exact_match(prediction, golds) == expected
    expected = max((compute_f1(gold, prediction) for gold in golds), default=0.0)
    assert f1(prediction, golds) == pytest.approx(expected)


@settings(deadline=None)
@given(gold=texts, before=words, after=words)
def test_an_answer_among_other_words_is_contained(gold: str, before: list[str], after: list[str]) -> None:
    text = " ".join([*before, gold, *after])
    assert contains_answer(text, [gold]) is bool(normalise_answer(gold))
