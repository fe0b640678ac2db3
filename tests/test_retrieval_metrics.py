"""The measures of rankings against hand-computed ones and their formulas, and how far to trust a mean."""

from math import log2
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srl.evaluate.intervals import bootstrap_interval, estimate
from srl.evaluate.retrieval_metrics import answer_measures, ranking_measures

pytest.importorskip("ir_measures")


def test_measures_are_those_computed_by_hand():
    found = ranking_measures(
        {"q": ["x", "a", "y", "b", "z"]}, {"q": {"a": 1, "b": 1, "c": 1, "x": 0}}, (1, 2, 4)
    )
    assert found["recall@1"]["q"] == 0
    assert found["recall@2"]["q"] == pytest.approx(1 / 3)
    assert found["recall@4"]["q"] == pytest.approx(2 / 3)
    assert found["MRR"]["q"] == 1 / 2
    assert found["MAP"]["q"] == pytest.approx((1 / 2 + 2 / 4) / 3)
    ideal = 1 / log2(2) + 1 / log2(3) + 1 / log2(4)
    assert found["nDCG@10"]["q"] == pytest.approx((1 / log2(3) + 1 / log2(5)) / ideal)


def test_grades_weigh_in_ndcg_and_nowhere_else():
    judged = {"q": {"a": 3, "b": 1, "c": -1, "d": 0}}
    found = ranking_measures({"q": ["c", "b", "d", "a"]}, judged, (3,))
    assert found["recall@3"]["q"] == 1 / 2
    assert found["MRR"]["q"] == 1 / 2
    assert found["MAP"]["q"] == pytest.approx((1 / 2 + 2 / 4) / 2)
    assert found["nDCG@10"]["q"] == pytest.approx((1 / log2(3) + 3 / log2(5)) / (3 + 1 / log2(3)))


def test_ndcg_looks_at_ten_and_map_at_all():
    ranking = [f"x{rank}" for rank in range(10)] + ["a"]
    found = ranking_measures({"q": ranking}, {"q": {"a": 1}}, (10, 11))
    assert (found["nDCG@10"]["q"], found["recall@10"]["q"]) == (0, 0)
    assert found["recall@11"]["q"] == 1
    assert found["MAP"]["q"] == found["MRR"]["q"] == pytest.approx(1 / 11)


def test_question_without_a_ranking_counts_0_and_one_without_relevant_passages_not_at_all():
    found = ranking_measures({"none": ["a"]}, {"lost": {"a": 1}, "none": {"a": 0}, "bad": {"a": -1}}, (1,))
    assert all(values == {"lost": 0} for values in found.values())


def test_order_of_a_ranking_holds_where_ids_sort_otherwise_and_a_repeat_counts_once():
    found = ranking_measures({"q": ["z", "z", "a"]}, {"q": {"z": 1, "a": 1}}, (1, 2))
    assert found["recall@1"]["q"] == 1 / 2
    assert found["MRR"]["q"] == 1
    assert found["recall@2"]["q"] <= 1


@given(
    st.permutations("abcdefgh"),
    st.dictionaries(st.sampled_from("abcdefghij"), st.integers(-1, 3), min_size=1),
)
def test_measures_agree_with_their_formulas(ranking, grades):
    relevant = {name for name, grade in grades.items() if grade > 0}
    found = ranking_measures({"q": ranking}, {"q": grades}, (1, 3, 5))
    if not relevant:
        assert all(not values for values in found.values())
        return
    hits = [name in relevant for name in ranking]
    for k in (1, 3, 5):
        assert found[f"recall@{k}"]["q"] == pytest.approx(sum(hits[:k]) / len(relevant))
    precisions = [sum(hits[: rank + 1]) / (rank + 1) for rank, hit in enumerate(hits) if hit]
    assert found["MAP"]["q"] == pytest.approx(sum(precisions) / len(relevant))
    gains = [max(grades.get(name, 0), 0) for name in ranking]
    ideal = sorted((max(grade, 0) for grade in grades.values()), reverse=True)
    assert found["nDCG@10"]["q"] == pytest.approx(_dcg(gains) / _dcg(ideal))


def _dcg(gains: list[int]) -> float:
    return sum(gain / log2(rank + 1) for rank, gain in enumerate(gains[:10], start=1))


def test_answer_recall_is_of_the_first_passage_that_holds_an_answer():
    found = answer_measures({"a": 1, "b": 4, "c": None}, (1, 4))
    assert {name: fmean(values.values()) for name, values in found.items()} == {
        "answer recall@1": pytest.approx(1 / 3),
        "answer recall@4": pytest.approx(2 / 3),
        "answer MRR": pytest.approx((1 + 1 / 4) / 3),
    }


def test_interval_is_the_same_in_every_run_and_narrows_with_more_questions():
    values = [0.1, 0.4, 0.9, 0.5] * 5
    assert bootstrap_interval(values) == bootstrap_interval(values)
    few, many = estimate(values), estimate(values * 16)
    assert few.low < many.low < many.mean < many.high < few.high
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(4, rel=0.15)


def test_bootstrap_interval_is_about_that_of_the_normal_approximation():
    values = [(n * 37 % 100) / 100 for n in range(1000)]
    mean = fmean(values)
    half = 1.96 * (fmean((value - mean) ** 2 for value in values) / 1000) ** 0.5
    low, high = bootstrap_interval(values)
    assert (low, high) == (pytest.approx(mean - half, abs=0.003), pytest.approx(mean + half, abs=0.003))


def test_all_found_of_few_questions_is_not_certain_and_one_question_has_no_interval():
    found = estimate([1.0] * 10)
    assert (found.mean, found.high) == (1, 1)
    assert found.low == pytest.approx(10 / (10 + 1.96**2), abs=1e-3)
    assert str(estimate([0.5]).low) == "nan"
