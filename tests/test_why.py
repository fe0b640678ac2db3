"""`srl inspect why`: the cause of runs broken on purpose, and nothing for sound ones."""

import json

import pytest
from tests.made_runs import BROKEN, RIGHT, SOUND, write_broken, write_sound
from tests.store_builder import GRPO, episode, new_log, record

import srl.store
from srl.browse.why import Why, why
from srl.cli import main


def reason(run) -> Why:
    with srl.store.open(run) as log:
        return why(log, run.name)


def steps(values, first=0):
    return dict(enumerate(values, start=first))


@pytest.mark.slow
@pytest.mark.parametrize("cause", sorted(BROKEN))
def test_the_cause_of_a_broken_run_is_named(tmp_path, cause):
    write_broken(tmp_path / GRPO, cause)
    result = reason(tmp_path / GRPO)
    assert result.causes[0] == cause
    assert result.since is None if cause == "failed search" else 13 <= result.since <= 16
    assert {row["shows"] for row in result.examples} == {"since", "before"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOUND)
def test_nothing_is_blamed_in_a_sound_run(tmp_path, kind):
    write_sound(tmp_path / GRPO, kind)
    result = reason(tmp_path / GRPO)
    assert (result.causes, result.since) == ((), None)


@pytest.mark.parametrize(
    ("error", "other", "cause"),
    [
        ("reward 'x' gave no score: 1", "", "failed reward"),
        ("the server answers 500", "reward 'x' gave no score: 1", "failed engine"),
        ("", "the server answers 500", "failed search"),
    ],
)
def test_the_fault_that_most_failed_episodes_have_is_named(tmp_path, error, other, cause):
    """Some have a right answer, whose verdict is `correct`."""
    log = new_log(tmp_path / GRPO)
    for step in range(1, 9):
        made = [episode(number, step=step, answer=RIGHT if number % 2 else "Bern") for number in range(10)]
        for number, one in enumerate(made[:2] if step > 5 else []):
            one.end, one.error = "failed", other if (step, number) == (8, 0) else error
        log.write(step, "train", [record(one) for one in made], {})
    result = reason(tmp_path / GRPO)
    assert result.causes[0] == cause
    assert {row["step"] for row in result.examples if row["shows"] == "since"} == {7, 8}


def test_why_prints_the_cause_the_rates_and_the_episodes(workspace, capsys):
    write_broken(workspace / "runs" / GRPO, "stopped searching")
    assert main(["inspect", "why"]) == 0
    text = capsys.readouterr().out
    for part in ("stopped searching", "step 14", "searched", "Münchenbuchsee"):
        assert part in text
    assert main(["inspect", "why", "last", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["causes"], found["since"]) == (["stopped searching"], 14)
    rates = {row["name"]: row for row in found["changes"]}
    assert rates["searched"]["share"] > 0.5
    assert rates["searched"]["before"] > 0.9 > rates["searched"]["since"]
