"""Intervals and paired tests: equal to independent implementations, and right in simulated evaluations."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.evaluate.intervals import (
    MIN_CLUSTERS,
    ClusterSums,
    cluster_numbers,
    difference_interval,
    interval,
    interval_of_clusters,
    student_t,
    wilson_interval,
)
from srl.evaluate.paired_tests import holm, paired_p, paired_test

stats = pytest.importorskip("scipy.stats")


@given(st.lists(st.booleans(), min_size=1, max_size=300))
@settings(deadline=None)
def test_interval_of_right_and_wrong_answers_is_wilsons(answers):
    expected = stats.binomtest(sum(answers), len(answers)).proportion_ci(method="wilson")
    assert interval([float(answer) for answer in answers]) == pytest.approx(
        (expected.low, expected.high), abs=1e-9
    )


def test_a_document_for_each_question_changes_nothing():
    values = [float(n % 3 == 0) for n in range(90)]
    assert interval(values, [f"page {n}" for n in range(90)]) == interval(values)


def test_documents_of_equal_size_count_as_their_means_do():
    """Equal documents: the variance of the mean is that of the documents' means, by hand."""
    means = [(n * 7 % 10) / 10 for n in range(40)]
    values = [value for mean in means for value in [1.0] * round(10 * mean) + [0.0] * round(10 - 10 * mean)]
    clusters = [n for n in range(40) for _ in range(10)]
    share, squared_error = float(np.mean(means)), float(np.var(means, ddof=1)) / 40
    moment = float(stats.moment(means, 4)) / float(np.var(means)) ** 2
    z = stats.t.ppf(0.975, min(2 * 40 / (moment - 1), 39))
    trials = share * (1 - share) / squared_error
    expected = stats.norm.interval(0.95)[1]
    wilson = wilson_interval(share, trials * (expected / z) ** 2)
    assert interval(values, clusters) == pytest.approx(wilson, abs=2e-3)
    assert ClusterSums.of(values, clusters).variance == pytest.approx(squared_error)


def test_agreement_within_documents_widens_the_interval():
    clusters = [n for n in range(50) for _ in range(8)]
    alike = [float(n % 2) for n in range(50) for _ in range(8)]
    mixed = [float(n % 2) for _ in range(50) for n in range(8)]
    wide, narrow = interval(alike, clusters), interval(mixed, clusters)
    assert wide.high - wide.low > 2.5 * (interval(alike).high - interval(alike).low)
    assert narrow.high - narrow.low == pytest.approx(interval(mixed).high - interval(mixed).low, rel=0.06)


def test_too_few_documents_have_no_interval_and_one_more_has():
    def of(documents: int) -> list[int]:
        return [n for n in range(documents) for _ in range(10)]

    few, enough = of(MIN_CLUSTERS - 1), of(MIN_CLUSTERS)
    assert interval([float(n % 2) for n in range(len(few))], few) is None
    assert interval([float(n % 2) for n in range(len(enough))], enough) is not None
    assert difference_interval([float(n % 2) for n in range(len(few))], few) is None
    assert difference_interval([float(n % 2) for n in range(len(enough))], enough) is not None


def test_one_document_with_most_questions_leaves_few_effective_ones():
    clusters = ["long"] * 400 + list(range(100))
    assert ClusterSums.of([0.0] * 500, clusters).effective == pytest.approx(500**2 / (400**2 + 100))
    assert interval([float(n % 2) for n in range(500)], clusters) is None


def test_variance_from_few_documents_has_few_degrees_of_freedom():
    """One document of 40 is all right: its residual is 39/40 · 5, the others' are -1/40 · 5."""
    sizes = np.full(40, 5.0)
    one = ClusterSums(np.array([5.0] + [0.0] * 39), sizes)
    squares = [(5 * 39 / 40) ** 2] + [(5 / 40) ** 2] * 39
    fourth = sum(square**2 for square in squares)
    by_hand = 2 * sum(squares) ** 2 / (fourth - sum(squares) ** 2 / 40)
    assert one.degrees == pytest.approx(max(by_hand, 2)) == pytest.approx(2.16, abs=0.01)
    assert ClusterSums(np.array([5.0, 0.0] * 20), sizes).degrees == 39
    assert interval_of_clusters(one).high > 0.2


def test_all_wrong_in_documents_counts_documents():
    clusters = [n for n in range(60) for _ in range(5)]
    low, high = interval([0.0] * 300, clusters)
    assert low == 0
    assert high > wilson_interval(0, 60).high


def test_few_questions_with_partial_values_have_a_wide_interval():
    assert interval([0.5, 0.25, 1.0]) == wilson_interval(1.75 / 3, 3)


@pytest.mark.parametrize("values", [[], [0.5, 1.5], [-0.1]])
def test_values_that_are_no_shares_are_refused(values):
    with pytest.raises(ValueError, match="values"):
        interval(values)


def test_clusters_of_another_number_are_refused():
    with pytest.raises(ValueError, match="2 values, 1 clusters"):
        interval([0.0, 1.0], ["a"])


@pytest.mark.parametrize(("degrees", "within"), [(3, 0.005), (5, 1e-3), (9, 1e-4), (24, 1e-5), (1000, 1e-6)])
def test_t_is_that_of_scipy(degrees, within):
    assert student_t(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), abs=within)


@pytest.mark.parametrize(("better", "worse", "questions"), [(12, 4, 125), (0, 0, 30), (40, 41, 300)])
def test_difference_interval_is_that_of_bonett_and_price(better, worse, questions):
    changes = [1.0] * better + [-1.0] * worse + [0.0] * (questions - better - worse)
    more, less = (better + 1) / (questions + 2), (worse + 1) / (questions + 2)
    n = questions + 2
    spread = np.sqrt((more + less - (more - less) ** 2) / n * n / (n - 1))
    low, high = difference_interval(changes)
    half = (high - low) / 2
    assert (low + high) / 2 == pytest.approx(more - less)
    assert half >= stats.norm.ppf(0.975) * spread
    assert half == pytest.approx(stats.norm.ppf(0.975) * spread, rel=0.45 if not better else 0.06)


def test_paired_test_is_mcnemars_exact_test():
    changes = [1.0] * 9 + [-1.0] * 3 + [0.0] * 40
    assert paired_p(changes) == pytest.approx(stats.binomtest(3, 12).pvalue)
    many = [1.0] * 60 + [-1.0] * 40
    assert paired_p(many) == pytest.approx(stats.binomtest(40, 100).pvalue, abs=0.006)


def test_changes_of_a_document_are_swapped_together():
    clusters = ["a", "a", "b", "b", "c", "d"]
    changes = [1.0, 0.5, -0.5, 0.0, 1.0, 0.25]
    sums = [1.5, -0.5, 1.0, 0.25]
    totals = [sum(s * x for s, x in zip(signs, sums, strict=True)) for signs in product((1, -1), repeat=4)]
    expected = np.mean([abs(total) >= sum(sums) - 1e-9 for total in totals])
    assert paired_p(changes, clusters) == pytest.approx(expected)


def test_very_many_changes_have_the_p_of_the_random_swaps():
    rng = np.random.default_rng(4)
    changes = rng.normal(0.05, 1, 1500).clip(-3, 3) / 3
    result = stats.permutation_test(
        (changes, np.zeros_like(changes)), lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples", n_resamples=9999, batch=500, vectorized=True, rng=rng,
    )  # fmt: skip
    assert paired_p(changes) == pytest.approx(result.pvalue, abs=0.015)


def test_paired_test_has_the_sign_of_b_minus_a_and_is_the_same_from_either_side():
    a, b = [0.0, 1.0, 0.0, 0.0, 1.0] * 30, [1.0, 1.0, 0.0, 0.0, 1.0] * 30
    there, back = paired_test(a, b), paired_test(b, a)
    assert there.difference == -back.difference == pytest.approx(0.2)
    assert there.p == back.p < 0.05
    assert there.interval == pytest.approx((-back.interval.high, -back.interval.low))


def test_equal_answers_are_not_different():
    found = paired_test([1.0, 0.0] * 100, [1.0, 0.0] * 100)
    assert (found.difference, found.p) == (0, 1)
    assert found.interval.low < 0 < found.interval.high


def test_a_test_of_other_questions_is_refused():
    with pytest.raises(ValueError, match="same questions"):
        paired_test([1.0], [1.0, 0.0])


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_step_by_step(ps):
    """The procedure as Holm words it: from the smallest on, compared with 0.05 / (those that are left)."""
    corrected = holm(ps)
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        if ps[place] * (len(ps) - rank) > 0.05:
            break
        assert corrected[place] <= 0.05
    else:
        return
    assert corrected[place] > 0.05
    assert all(p <= found for p, found in zip(ps, corrected, strict=True))


def test_clusters_are_numbered_by_their_first_mention():
    assert cluster_numbers(["b", "a", "b", ("c", 1)]) == [0, 1, 0, 2]


def evaluations(count: int, documents: int, size: int, truth: float):
    """Simulated evaluations: right answers in documents whose own EM varies (correlation 0.1)."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        own = rng.beta(truth * 9, (1 - truth) * 9, documents)
        yield (rng.random((documents, size)) < own[:, None]).astype(float).ravel().tolist()


def test_interval_of_simulated_evaluations_holds_the_truth():
    """600 of them; a true 95% leaves 92.5 to 97.5% but once in 500 runs. 2,000: results/intervals.json."""
    clusters = np.repeat(np.arange(MIN_CLUSTERS), 10).tolist()
    found = [
        (interval(values, clusters), interval(values)) for values in evaluations(600, MIN_CLUSTERS, 10, 0.3)
    ]
    held, ignoring = np.mean([[low <= 0.3 <= high for low, high in pair] for pair in found], 0)
    assert 0.925 <= held <= 0.975
    assert ignoring < 0.9


def test_paired_test_of_equal_models_finds_a_difference_in_five_of_a_hundred():
    clusters = np.repeat(np.arange(12), 10).tolist()
    a, b = evaluations(400, 12, 10, 0.3), evaluations(800, 12, 10, 0.3)
    pairs = list(zip(a, list(b)[400:], strict=True))
    found = [[paired_p(np.subtract(two, one), of) <= 0.05 for of in (clusters, None)] for one, two in pairs]
    level, ignoring = np.mean(found, 0)
    assert level <= 0.08
    assert ignoring > 0.08
