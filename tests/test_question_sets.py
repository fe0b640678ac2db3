"""Question sets: which questions a limit draws, the table's rows, and how far they are from the full sets."""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest
from tests.store_builder import episode, question

from srl.errors import UserError
from srl.evaluate import EpisodeResult
from srl.evaluate.intervals import wilson_interval
from srl.evaluate.question_sets import Sample, draw, estimate, question_set_rows

BLANK = EpisodeResult.of(episode(0, step=0, phase="eval", asked=question(0)))


def result(name: str, em: float = 0.0, f1: float = 0.0, cover: float = 0.0, sample: int = 0) -> EpisodeResult:
    return replace(BLANK, question_id=name, sample=sample, em=em, f1=f1, cover_em=cover)


def ids(**sizes: int) -> dict[str, list[str]]:
    return {name: [f"{name}{i}" for i in range(size)] for name, size in sizes.items()}


SIZES = {"nq": 361, "triviaqa": 1131, "popqa": 1427, "hotpotqa": 740, "2wiki": 1258, "musique": 242,
         "bamboogle": 125}  # fmt: skip
"""Sets a tenth of the size of Search-R1's."""
TRUTH = dict(zip(SIZES, (0.43, 0.6, 0.45, 0.35, 0.33, 0.1, 0.3), strict=True))


@pytest.fixture(scope="module")
def em() -> dict[str, float]:
    """The made-up result of every question."""
    rng = random.Random(1)
    return {each: float(rng.random() < TRUTH[name]) for name, of in ids(**SIZES).items() for each in of}


def test_a_limit_draws_as_many_of_every_set_and_a_larger_one_includes_a_smaller_one() -> None:
    sets = ids(**SIZES)
    assert sorted(map(len, draw(sets, 400).drawn.values())) == [57] * 6 + [58]
    assert {name: len(of) for name, of in draw(ids(a=40, b=4), 20).drawn.items()} == {"a": 16, "b": 4}
    draws = [set(draw(sets, limit).ids) for limit in (30, 31, 100, 400, 401, 2000, 6000)]
    assert all(smaller < larger for smaller, larger in pairwise(draws))
    turned = {name: sets[name][::-1] for name in reversed(sets)}
    assert set(draw(turned, 400).ids) == draws[3]
    assert draw(ids(q=10), 4).ids == ["q3", "q9", "q0", "q2"], "the same on every machine"
    with pytest.raises(UserError) as caught:
        draw(sets, 6)
    assert caught.value.key == "limit"


def test_the_estimate_of_two_sets_is_that_of_hand_computed_numbers() -> None:
    sample = Sample({"x": 30, "y": 10}, {"x": ["x0", "x1", "x2"], "y": ["y0", "y1"]})
    values = {"x0": 0.1, "x1": 0.2, "x2": 0.6, "y0": 0.5, "y1": 0.9}
    found = estimate(values, sample, {"x": 0.75, "y": 0.25}, {})
    assert found.mean == pytest.approx(0.75 * 0.3 + 0.25 * 0.7)
    variance = 0.75**2 * 0.9 * (0.14 / 2) / 3 + 0.25**2 * 0.8 * 0.08 / 2
    assert found.full == pytest.approx(wilson_interval(0.4, 0.4 * 0.6 / variance))
    assert found.draw_error == pytest.approx(max(found.full.high - 0.4, 0.4 - found.full.low))
    # weights 5/3 · 3/4 and 5/2 · 1/4: the effective number is 25 / Σ w²
    effective = 25 / (3 * (5 * 0.75 / 3) ** 2 + 2 * (5 * 0.25 / 2) ** 2)
    assert found.interval == pytest.approx(wilson_interval(0.4, effective))


@pytest.mark.slow
def test_draws_hold_the_full_figure_as_often_as_stated(em: Mapping[str, float]) -> None:
    """2,000 draws: a true 95% is within these bounds but once in 300 runs."""
    sets, held = ids(**SIZES), Counter[str]()
    shares = {name: {name: 1.0} for name in SIZES} | {"sets": dict.fromkeys(SIZES, 1 / len(SIZES))}
    shares["questions"] = {name: size / len(em) for name, size in SIZES.items()}
    truth = {name: estimate(em, draw(sets), share, {}).mean for name, share in shares.items()}
    for seed in range(2000):
        sample = draw(sets, 400, seed)
        for name, share in shares.items():
            found = estimate(em, sample, share, {}).full
            held[name] += found.low <= truth[name] <= found.high
    assert 0.935 <= held["sets"] / 2000 <= 0.965
    assert 0.935 <= held["questions"] / 2000 <= 0.965
    assert 0.935 <= fmean(held[name] for name in SIZES) / 2000 <= 0.965


def test_rows_have_the_means_of_each_set_and_of_all() -> None:
    sample = draw(ids(a=4, b=2))
    found = [result(f"a{i}", em=1, f1=1, cover=1) for i in range(3)] + [result("a3", f1=0.5, cover=1)]
    found += [result("b0"), result("b1", f1=0.25, cover=1)]
    rows = {row.name: row for row in question_set_rows([*found, result("other", em=1)], sample)}
    means = {name: {key: one.mean for key, one in row.measures.items()} for name, row in rows.items()}
    assert means["a"] == pytest.approx({"em": 0.75, "f1": 0.875, "cover_em": 1})
    assert means["b"] == pytest.approx({"em": 0, "f1": 0.125, "cover_em": 0.5})
    assert means["mean over sets"] == pytest.approx({"em": 0.375, "f1": 0.5, "cover_em": 0.75})
    assert means["all questions"] == pytest.approx({"em": 0.5, "f1": 0.625, "cover_em": 5 / 6})
    assert {name: (row.used, row.size) for name, row in rows.items()} == {
        "a": (4, 4), "b": (2, 2), "mean over sets": (6, 6), "all questions": (6, 6),
    }  # fmt: skip


def test_a_drawn_set_counts_as_the_whole_of_it_and_samples_of_a_question_as_their_mean() -> None:
    sample = draw(ids(a=40, b=4), 8)
    found = [result(name, em=float(name[0] == "a")) for name in sample.ids]
    found += [result(name, em=float(name[0] == "a"), sample=1) for name in sample.drawn["a"]]
    rows = {row.name: row for row in question_set_rows(found, sample)}
    assert rows["mean over sets"].measures["em"].mean == 0.5
    assert rows["all questions"].measures["em"].mean == pytest.approx(40 / 44)
    assert (rows["a"].used, rows["a"].size) == (4, 40)
    assert rows["a"].measures["em"].draw_error > rows["b"].measures["em"].draw_error == 0
    with pytest.raises(KeyError):
        question_set_rows(found[1:2], sample)
