"""`srl eval compare`: the same questions, the right figures, and what a mistake is told."""

from collections.abc import Callable, Iterable
from dataclasses import astuple, replace
from pathlib import Path
from statistics import fmean

import pytest
from click.testing import Result
from tests.store_builder import episode, record, run_info
from typer.testing import CliRunner

from srl.cli.app import app
from srl.errors import UserError
from srl.evaluate.comparison import compare, read_evaluation
from srl.evaluate.intervals import interval
from srl.evaluate.paired_tests import holm, paired_test
from srl.store import LogWriter
from srl.trajectory import Question, Trajectory

NAMES = ("20250102T030405Z-tiny-eval-s0-00aa", "20250102T030406Z-tiny-eval-s0-00ab")
THIRD = "20250102T030407Z-tiny-eval-s0-00ac"


def question(name: str, source: str = "nq", document: str = "", **changed: object) -> Question:
    text = f"what is {name}?"
    titles = {"supporting_titles": [document]} if document else {}
    prompt = ({"role": "user", "content": text},)
    asked = Question(f"{source}/test/{name}", text, ("Bern",), source, "test", prompt, titles)
    return replace(asked, **changed)  # type: ignore[arg-type]


def episodes(asked: Iterable[Question], answer: Callable[[int], str | None], n: int = 1) -> list[Trajectory]:
    return [
        episode(number, step=0, phase="eval", sample=sample, asked=each, answer=answer(number))
        for number, each in enumerate(asked)
        for sample in range(n)
    ]


def evaluation(root: Path, name: str, found: Iterable[Trajectory]) -> None:
    """A finished run in the workspace `root` whose log has these episodes."""
    run = root / "runs" / name
    run.mkdir(parents=True)
    with LogWriter(run / "log", run_info(name)) as log:
        log.write(0, "eval", [record(one, advantage=None) for one in found], {})  # type: ignore[arg-type]


def right_if(good: Callable[[int], bool]) -> Callable[[int], str | None]:
    return lambda number: "Bern" if good(number) else "Zürich"


def srl(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", "compare", *arguments])


def test_figures_are_those_of_the_questions_that_both_have(workspace):
    asked = [question(str(number)) for number in range(65)]
    evaluation(workspace, NAMES[0], episodes(asked[:60], right_if(lambda n: n % 5 == 0)))
    evaluation(workspace, NAMES[1], episodes(asked, right_if(lambda n: n % 5 == 0 or n % 3 == 0)))
    found = compare([read_evaluation(workspace / "runs" / name) for name in NAMES])
    a = [float(n % 5 == 0) for n in range(60)]
    b = [float(n % 5 == 0 or n % 3 == 0) for n in range(60)]
    assert (found.questions, found.left_out) == (60, [0, 5])
    em = [row for row in found.rows if row.measure == "EM"]
    assert [row.value for row in em] == [fmean(a), fmean(b)]
    assert [row.interval for row in em] == [interval(a), interval(b)]
    assert em[0].difference is None
    assert (em[1].difference, em[1].difference_interval, em[1].p) == astuple(paired_test(a, b))
    assert em[1].difference == pytest.approx(16 / 60)


def test_p_values_are_corrected_for_all_tests_of_the_table(workspace):
    asked = [question(str(n), "nq" if n < 40 else "squad") for n in range(80)]
    for name, step in zip((*NAMES, THIRD), (5, 4, 2), strict=True):
        evaluation(workspace, name, episodes(asked, right_if(lambda n, step=step: n % step == 0)))
    found = compare([read_evaluation(workspace / "runs" / name) for name in (*NAMES, THIRD)])
    tested = [row for row in found.rows if row.p is not None]
    assert found.tests == len(tested) == 3 * 3 * 2
    assert [row.p_corrected for row in tested] == holm([row.p for row in tested])
    assert [row.source for row in found.rows if row.measure == "EM" and row.run == NAMES[0]] == [
        "nq",
        "squad",
        "all",
    ]
    assert any(row.significant for row in tested)
    assert not all(row.significant for row in tested)


def test_questions_of_one_document_count_together(workspace):
    asked = [question(str(n), "squad", f"article {n // 3}") for n in range(120)]
    for name, size in zip(NAMES, (2, 3), strict=True):
        evaluation(workspace, name, episodes(asked, right_if(lambda n, size=size: n // 3 % size == 0)))
    found = compare([read_evaluation(workspace / "runs" / name) for name in NAMES])
    clusters = [n // 3 for n in range(120)]
    values = [float(n // 3 % 2 == 0) for n in range(120)]
    assert found.rows[0].interval == pytest.approx(interval(values, clusters))
    assert found.rows[0].interval.low < interval(values).low - 0.03
    other = [float(n // 3 % 3 == 0) for n in range(120)]
    assert found.rows[1].p == pytest.approx(paired_test(values, other, clusters).p, abs=0.01)
    assert found.notes == []


@pytest.mark.parametrize(
    "changed", [{"text": "who is 1?"}, {"golden_answers": ("Bern", "Berne")}, {"data_source": "squad"}]
)
def test_a_question_that_differs_is_refused(workspace, changed):
    evaluation(workspace, NAMES[0], episodes([question("1")], right_if(bool)))
    evaluation(workspace, NAMES[1], episodes([question("1", **changed)], right_if(bool)))
    result = srl(*NAMES)
    assert isinstance(result.exception, UserError), result.output
    assert "nq/test/1" in str(result.exception)
