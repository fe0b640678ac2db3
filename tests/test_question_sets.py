"""The table over question sets: full sets, drawn ones, several samples, episodes lost to faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.store_builder import episode, question

from srl.evaluate import EpisodeResult
from srl.evaluate.coverage import Coverage
from srl.evaluate.question_sets import question_set_rows
from srl.evaluate.sample import draw
from srl.trajectory import Question

BLANK = EpisodeResult.of(episode(0, step=0, phase="eval", asked=question(0)))


def result(name: str, em: float = 0.0, f1: float = 0.0, cover: float = 0.0, sample: int = 0) -> EpisodeResult:
    return replace(BLANK, question_id=name, sample=sample, em=em, f1=f1, cover_em=cover)


def asked(name: str, count: int) -> list[Question]:
    return [Question(f"{name}{i}", "Q?", ("a",), name) for i in range(count)]


def test_full_sets_have_their_plain_means_and_the_macro_mean_counts_them_equally() -> None:
    sample = draw({"a": asked("a", 4), "b": asked("b", 2)})
    found = [result(f"a{i}", em=1, f1=1, cover=1) for i in range(3)] + [result("a3", f1=0.5, cover=1)]
    found += [result("b0"), result("b1", f1=0.25, cover=1)]
    rows = {row.name: row for row in question_set_rows(found, sample)}
    means = {name: {key: one.mean for key, one in row.measures.items()} for name, row in rows.items()}
    assert means["a"] == pytest.approx({"em": 0.75, "f1": 0.875, "cover_em": 1})
    assert means["b"] == pytest.approx({"em": 0, "f1": 0.125, "cover_em": 0.5})
    assert means["mean over sets"] == pytest.approx({"em": 0.375, "f1": 0.5, "cover_em": 0.75})
    assert means["all questions"] == pytest.approx({"em": 0.5, "f1": 0.625, "cover_em": 5 / 6})
    assert {name: (row.used, row.size) for name, row in rows.items()} == {
        "a": (4, 4), "b": (2, 2), "mean over sets": (6, 6), "all questions": (6, 6),
    }  # fmt: skip
    assert {row.measures["em"].draw_error for row in rows.values()} == {0}


def test_a_drawn_set_counts_as_the_whole_of_it() -> None:
    sample = draw({"a": asked("a", 40), "b": asked("b", 4)}, 8)
    assert len(sample.of("a").ids) == len(sample.of("b").ids) == 4
    found = [result(name, em=float(name.startswith("a"))) for name in sample.ids]
    rows = {row.name: row for row in question_set_rows(found, sample)}
    assert rows["mean over sets"].measures["em"].mean == 0.5
    assert rows["all questions"].measures["em"].mean == pytest.approx(40 / 44)
    assert (rows["a"].used, rows["a"].size) == (4, 40)
    assert rows["a"].measures["em"].draw_error > 0
    assert rows["b"].measures["em"].draw_error == 0


def test_the_answerable_part_of_each_set_and_of_all() -> None:
    """a: 3 of 4 answerable, of which 2 are right; b: 1 of 2, which is wrong; c: nothing is known."""
    sample = draw({"a": asked("a", 4), "b": asked("b", 2), "c": asked("c", 2)})
    found = [result(name, em=float(name in ("a0", "a1", "b1", "c0"))) for name in sample.ids]
    covered = {f"a{i}": Coverage(None, i < 3) for i in range(4)} | {
        f"b{i}": Coverage(None, i < 1) for i in range(2)
    }
    rows = {
        row.name: (row.answerable, row.em_answerable) for row in question_set_rows(found, sample, covered)
    }
    assert rows["a"] == (3 / 4, 2 / 3)
    assert rows["b"] == (1 / 2, 0)
    assert rows["c"] == (None, None)
    assert rows["mean over sets"] == (None, None)
    assert rows["all questions"] == (pytest.approx(4 / 6), pytest.approx(2 / 4))
    assert {(row.answerable, row.em_answerable) for row in question_set_rows(found, sample)} == {(None, None)}


def test_samples_of_a_question_count_as_their_mean() -> None:
    sample = draw({"a": asked("a", 2)})
    found = [result("a0", em=1), result("a0", sample=1), result("a1"), result("a1", sample=1)]
    (row,) = question_set_rows(found, sample)
    assert (row.measures["em"].mean, row.used) == (0.25, 2)


def test_a_question_that_was_not_asked_is_an_error_never_a_silent_score() -> None:
    with pytest.raises(KeyError, match="a1"):
        question_set_rows([result("a0")], draw({"a": asked("a", 2)}))
