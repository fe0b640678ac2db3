"""What the corpus has of an evaluation's questions: in its run, in its table, and taken from earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.test_evaluation_runs import QUESTIONS, Place, question

from srl.cli.eval.run import _rows
from srl.evaluate.coverage import Coverage, read_coverage
from srl.train import evaluation_coverage as module
from srl.train import evaluation_run as generating

LACKS = question("town1", builder="Orra Vess")
"""A question whose answer is not in the corpus of `Place`."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(generating, "PAUSE_S", 0.0)
    found = Place(tmp_path, monkeypatch)
    found.ask([QUESTIONS[0], LACKS, QUESTIONS[2], QUESTIONS[3]])
    return found


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many questions each pass over a corpus was for."""
    made: list[int] = []
    one = module.coverage

    def counted(questions: Sequence[Any], *rest: Any) -> dict[str, Coverage]:
        made.append(len(questions))
        return one(questions, *rest)

    monkeypatch.setattr(module, "coverage", counted)
    return made


def test_exact_match_is_also_told_of_what_the_corpus_can_answer(place: Place) -> None:
    """Right are the towns 0 and 3, whose answer is there, as is that of town 2; that of town 1 is not."""
    report = place.evaluate()
    found = report.settings["search"]
    told = {name: found.metrics[f"eval/{name}"] for name in ("em", "em_answerable", "answerable")}
    assert told == {"em": 2 / 4, "em_answerable": 2 / 3, "answerable": 3 / 4}
    assert "answerable from the corpus: 75.0% of 4 questions" in place.notes
    rows = {row[0]: row[1:] for row in _rows(report)}
    assert rows["EM of answerable"] == ["0.667"]
    assert rows["answer in the corpus"] == ["0.750"]
    assert "gold passages in the corpus" not in rows
    written = read_coverage(found.run)
    assert written is not None
    assert written.found[LACKS.id] == Coverage(None, False)


def test_without_search_the_same_questions_are_answerable(place: Place) -> None:
    both = place.evaluate(no_search_too=True).settings
    shares = [found.metrics["eval/answerable"] for found in both.values()]
    assert shares == [3 / 4, 3 / 4]
    assert read_coverage(both["search"].run) == read_coverage(both["no_search"].run) is not None
    alone = place.evaluate("rollout.search=false").settings["no_search"]
    assert "eval/answerable" not in alone.metrics


def test_the_corpus_is_read_once_for_the_same_questions(place: Place, passes: list[int]) -> None:
    first = place.evaluate().settings["search"]
    again = place.evaluate("trainer.seed=1").settings["search"]
    assert again.run != first.run
    assert again.metrics["eval/em_answerable"] == first.metrics["eval/em_answerable"]
    assert passes == [4]
    place.evaluate(limit=2)
    assert passes == [4, 2]
    place.index("built by Orra Vess")
    changed = place.evaluate().settings["search"]
    assert passes == [4, 2, 4]
    assert changed.metrics["eval/answerable"] == 1 / 4
