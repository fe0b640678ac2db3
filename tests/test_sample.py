"""`--budget`: which questions a stratified sample has, and how far its estimates are from the full figure."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from math import sqrt
from statistics import fmean

import pytest

from srl.errors import UserError
from srl.evaluate.intervals import interval, wilson_interval
from srl.evaluate.sample import Sample, Selection, Stratum, draw, estimate
from srl.trajectory import Question

KINDS: dict[str, tuple[int, Mapping[str, tuple[float, float]]]] = {
    "nq": (361, {"": (1.0, 0.43)}),
    "triviaqa": (1131, {"": (1.0, 0.6)}),
    "popqa": (1427, {"": (1.0, 0.45)}),
    "hotpotqa": (740, {"bridge": (0.8, 0.3), "comparison": (0.2, 0.55)}),
    "2wikimultihopqa": (
        1258,
        {"compositional": (0.45, 0.2), "comparison": (0.3, 0.5), "inference": (0.25, 0.3)},
    ),
    "musique": (242, {"2hop": (0.5, 0.15), "3hop1": (0.3, 0.08), "4hop1": (0.17, 0.03), "4hop3": (0.03, 0)}),
    "bamboogle": (125, {"": (1.0, 0.3)}),
}  # fmt: skip
"""Sets a tenth of the size of Search-R1's: questions, and for each type its share and the model's EM."""


def questions_of(name: str, count: int, kinds: Mapping[str, object], rng: random.Random) -> list[Question]:
    shares = [share for share, *_ in kinds.values()]  # type: ignore[misc]
    drawn = rng.choices(list(kinds), shares, k=count)
    return [
        Question(f"{name}/test/{i}", "Q?", ("a",), name, "test", metadata={"type": kind} if kind else {})
        for i, kind in enumerate(drawn)
    ]


@pytest.fixture(scope="module")
def sets() -> dict[str, list[Question]]:
    rng = random.Random(0)
    return {name: questions_of(name, count, kinds, rng) for name, (count, kinds) in KINDS.items()}


@pytest.fixture(scope="module")
def em(sets: Mapping[str, list[Question]]) -> dict[str, float]:
    """The made-up result of every question."""
    rng = random.Random(1)
    return {
        item.id: float(rng.random() < KINDS[name][1][item.metadata.get("type", "")][1])
        for name, questions in sets.items()
        for item in questions
    }


def test_a_budget_gives_every_set_the_same_number_of_questions(sets: Mapping[str, list[Question]]) -> None:
    sample = draw(sets, 400)
    assert Counter(name.partition("/")[0] for name in sample.ids) == {
        name: 58 if name == "2wikimultihopqa" else 57 for name in KINDS
    }
    assert len(set(sample.ids)) == 400
    assert sample.size == sum(count for count, _ in KINDS.values())


def test_a_larger_budget_includes_the_questions_of_a_smaller_one(sets: Mapping[str, list[Question]]) -> None:
    draws = [set(draw(sets, budget).ids) for budget in (30, 31, 100, 400, 401, 2000, 5000)]
    assert all(smaller < larger for smaller, larger in pairwise(draws))
    shuffled = [item for name in reversed(sets) for item in reversed(sets[name])]
    assert set(Selection(400).draw(shuffled).ids) == draws[3]


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        (["common"] * 96 + ["odd", "rare", "rare", "rarer"], {"common": 96, "other": 4}),
        (["fact"] * 50 + ["other"] * 40 + ["a"] * 2 + ["b"] * 2, {"fact": 50, "other": 44}),
    ],
)
def test_rare_types_are_drawn_together(kinds: list[str], sizes: Mapping[str, int]) -> None:
    questions = [Question(str(i), "Q?", ("a",), metadata={"type": kind}) for i, kind in enumerate(kinds)]
    drawn = draw({"s": questions})
    assert drawn.sizes == {Stratum("s", kind): size for kind, size in sizes.items()}
    assert set(drawn.ids) == {question.id for question in questions}


def test_a_budget_below_two_a_stratum_is_refused_with_the_least(sets: Mapping[str, list[Question]]) -> None:
    with pytest.raises(UserError) as caught:
        draw(sets, 7)
    assert caught.value.key == "budget"
    assert len(draw(sets, 26).ids) == 26


def two_strata(name: str, sizes: tuple[int, int], drawn: tuple[int, int]) -> Sample:
    """Strata x and y of a set; the ids are `<set><stratum><number>`."""
    strata = [Stratum(name, "x"), Stratum(name, "y")]
    ids = [
        tuple(f"{name}{stratum.label}{i}" for i in range(n)) for stratum, n in zip(strata, drawn, strict=True)
    ]
    return Sample(dict(zip(strata, sizes, strict=True)), dict(zip(strata, ids, strict=True)))


def test_the_estimate_of_two_strata_is_that_of_hand_computed_numbers() -> None:
    sample = two_strata("s", (30, 10), (3, 2))
    values = {"sx0": 0.1, "sx1": 0.2, "sx2": 0.6, "sy0": 0.5, "sy1": 0.9}
    found = estimate(values, sample)
    assert found.mean == pytest.approx(0.75 * 0.3 + 0.25 * 0.7)
    # sums of squares 0.14 and 0.08, pooled 0.22/3; s² = (squares + 20 · pooled) / (n - 1 + 20)
    spreads = (0.14 + 20 * 0.22 / 3) / 22, (0.08 + 20 * 0.22 / 3) / 21
    variance = 0.75**2 * 0.9 * spreads[0] / 3 + 0.25**2 * 0.8 * spreads[1] / 2
    assert variance == pytest.approx(0.0141651, abs=1e-7)
    assert found.full == pytest.approx(wilson_interval(0.4, 0.4 * 0.6 / variance))
    assert found.draw_error == pytest.approx(max(found.full.high - 0.4, 0.4 - found.full.low))


def test_a_full_evaluation_has_the_plain_means_and_no_error_of_the_draw(
    sets: Mapping[str, list[Question]], em: Mapping[str, float]
) -> None:
    found, every = estimate(em, draw(sets)), estimate(em, draw(sets), "questions")
    assert found.mean == pytest.approx(fmean(fmean(em[item.id] for item in sets[name]) for name in sets))
    assert every.mean == pytest.approx(fmean(em.values()))
    assert found.full == pytest.approx((found.mean, found.mean))
    assert found.draw_error == every.draw_error == 0
    assert every.interval == interval([em[name] for name in draw(sets).ids])
    assert found.interval is not None
    assert found.interval.low < found.mean < found.interval.high


def test_the_interval_of_a_full_set_counts_documents_and_is_that_of_any_evaluation(
    sets: Mapping[str, list[Question]], em: Mapping[str, float]
) -> None:
    ids = [item.id for item in sets["musique"]]
    documents = {name: number // 3 for number, name in enumerate(ids)}
    sample = draw(sets).of("musique")
    values = [em[name] for name in ids]
    found = estimate(em, sample, clusters=documents)
    assert found.interval == pytest.approx(interval(values, [documents[name] for name in ids]))
    assert found.interval != pytest.approx(interval(values))
    few = dict.fromkeys(ids, "one document")
    assert estimate(em, sample, clusters=few).interval is None
    assert estimate(em, draw(sets, 400).of("musique"), clusters=few).interval is None


def test_a_small_set_without_a_right_answer_does_not_make_the_mean_over_sets_certain() -> None:
    sizes = {"s": 12, "t": 3610, "u": 125}
    sets = {name: [Question(f"{name}{i}", "Q?", ("a",)) for i in range(n)] for name, n in sizes.items()}
    sample = draw(sets)
    found = estimate(dict.fromkeys(sample.ids, 0.0), sample)
    # each set with 2/3 right answers in 4/3 questions more; then the mean of the three, and its variance
    shares = [(2 / 3) / (n + 4 / 3) for n in sizes.values()]
    spread = sum(p * (1 - p) / (n + 4 / 3) for p, n in zip(shares, sizes.values(), strict=True)) / 9
    assert found.interval == pytest.approx((0.0, sum(shares) / 3 + 1.96 * sqrt(spread)), rel=0.01)


def shares_held(
    sets: Mapping[str, list[Question]], em: Mapping[str, float], budget: int, draws: int
) -> dict[str, float]:
    """How often the full figure is within the stated error of a draw, for both means and each set."""
    truth = {**_figures(em, draw(sets))}
    held: Counter[str] = Counter()
    for seed in range(draws):
        for name, found in _figures(em, draw(sets, budget, seed)).items():
            held[name] += found.full.low <= truth[name].mean <= found.full.high
    return {name: held[name] / draws for name in truth}


def _figures(em: Mapping[str, float], sample: Sample) -> dict:
    means = {over: estimate(em, sample, over) for over in ("sets", "questions")}  # type: ignore[arg-type]
    return means | {name: estimate(em, sample.of(name)) for name in sample.sets}


@pytest.mark.slow
def test_500_draws_hold_the_full_figure_as_often_as_stated(
    sets: Mapping[str, list[Question]], em: Mapping[str, float]
) -> None:
    held = shares_held(sets, em, 400, 500)
    assert 0.935 <= held["sets"] <= 0.965
    assert 0.935 <= held["questions"] <= 0.965
    assert 0.935 <= fmean(held[name] for name in KINDS) <= 0.965


def test_the_draw_is_the_same_on_every_machine() -> None:
    questions = [Question(f"q{i}", "Q?", ("a",)) for i in range(10)]
    assert draw({"s": questions}, 4).ids == ["q3", "q9", "q0", "q2"]
    assert draw({"s": questions}, 4, seed=1).ids != draw({"s": questions}, 4).ids
