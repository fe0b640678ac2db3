"""`srl inspect diff`: sides and flips, by hand-computed numbers."""

import json
from dataclasses import astuple, replace

import pytest
from tests.store_builder import GRPO, PPO, episode, new_log, record

import srl.store
from srl.browse.diff import diff, sides
from srl.cli import main
from srl.errors import UserError
from srl.evaluate.paired_tests import paired_test

RIGHT, WRONG = "Münchenbuchsee", "Bern"


def write(run, step, answers, phase="val", queries=None):
    """A step that answers question 0 with the first of `answers`, and so on."""
    made = [episode(n, step=step, phase=phase, answer=answer) for n, answer in enumerate(answers)]
    for number, texts in (queries or {}).items():
        made[number].searches = [replace(made[number].searches[0], query=query) for query in texts]
    new_log(run).write(step, phase, [record(one) for one in made], {})


@pytest.fixture
def runs(workspace):
    folder = workspace / "runs"
    write(folder / GRPO, 1, [RIGHT, RIGHT, WRONG, WRONG, None])
    write(folder / GRPO, 2, [RIGHT, WRONG, RIGHT, WRONG, RIGHT, RIGHT], queries={3: ["Klee", "Bern"]})
    write(folder / PPO, 7, [RIGHT], "train")
    write(folder / PPO, 7, [WRONG, WRONG, WRONG], queries={0: ["PAINTER   0"]})
    return folder


def compared(runs, *chosen):
    with srl.store.open(runs) as log:
        return diff(log, *sides(log, chosen, None))


def test_questions_that_flipped_are_counted_and_the_falls_come_first(runs):
    result = compared(runs, (GRPO, 1), (GRPO, 2))
    [(before, after)] = result.rows
    assert (result.a.phase, result.questions, result.only_a, result.only_b) == ("val", 5, 0, 1)
    assert (before.value, after.value) == (0.4, 0.6)
    assert (result.worse[0], result.better[0], result.other_queries) == (1, 2, 1)
    assert (after.difference, after.difference_interval, after.p) == astuple(
        paired_test([1, 1, 0, 0, 0], [1, 0, 1, 0, 1], [(f"nq-{n}",) for n in range(5)])
    )
    assert [(row["change"], row["question_id"], row["queries_changed"]) for row in result.changes] == [
        ("right→wrong", "nq-1", False), ("wrong→right", "nq-2", False), ("wrong→right", "nq-4", False),
        ("same", "nq-3", True),
    ]  # fmt: skip
    assert (result.changes[0]["answer_a"], result.changes[0]["answer_b"]) == (RIGHT, WRONG)
    assert result.changes[3]["queries_b"] == ["Klee", "Bern"]


def test_without_a_step_it_is_the_last_one_that_both_have(runs):
    result = compared(runs, (GRPO, None), (PPO, None))
    assert [(side.phase, side.step) for side in (result.a, result.b)] == [("val", 2), ("val", 7)]
    assert (result.questions, result.only_a, result.rows[0][1].value, result.other_queries) == (3, 3, 0.0, 0)


def test_a_step_that_a_run_lacks_is_named(runs):
    with pytest.raises(UserError, match=f"{GRPO} .*99"):
        compared(runs, (GRPO, 99), (PPO, None))


def test_failed_episodes_count_as_wrong_and_samples_as_their_mean(tmp_path):
    for step, ends in ((1, (None, None)), (2, (None, "failed"))):
        samples = [{"sample": n, "end": end} for n, end in enumerate(ends)]
        made = [episode(0, step=step, phase="val", answer=RIGHT, **one) for one in samples]
        new_log(tmp_path).write(step, "val", [record(one) for one in made], {})
    result = compared(tmp_path, (tmp_path.name, 1), (tmp_path.name, 2))
    assert tuple(side.value for side in result.rows[0]) == (1.0, 0.5)
    assert [row["change"] for row in result.changes] == ["worse"]


def test_diff_prints_both_sides_and_what_changed(runs, capsys):
    assert main(["inspect", "diff", "00aa@1", "00aa@2", "--queries"]) == 0
    out = capsys.readouterr().out
    for text in (f"{GRPO} val step 1", "0.400", "+0.200", "Münchenbuchsee → Bern", "painter 3 → Klee | Bern"):
        assert text in out
    assert main(["inspect", "diff", "00aa@1", "00aa@2", "--json", "-n", "1"]) == 0
    summary, row = map(json.loads, capsys.readouterr().out.splitlines())
    assert (summary["better"][0], summary["worse"][0], summary["b"]["step"]) == (2, 1, 2)
    assert (row["change"], row["golden_answers"]) == ("right→wrong", [RIGHT])
