"""Runs of fine-tuning: where they validate and save, how they end, and that they resume bit for bit."""

import random
from pathlib import Path

import pytest
from tests import training
from tests.kills import differences
from tests.store_builder import log_rows
from tests.training import Said, config, only_run, questions, train, write_setting

from srl.data.demonstration_file import write_demonstrations
from srl.train import sft
from srl.train.run import resume
from srl.train.run_directory import checkpoints
from srl.trajectory import Question
from srl.workspace import Workspace

STEPS = 6


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    rng = random.Random(0)
    shown = [
        Question(item.id, item.text, item.golden_answers, metadata={"turns": training.turns(item, rng)})
        for item in questions("demo", 10)
    ]
    write_demonstrations(folder / "demo.jsonl", shown)
    return folder


def chosen(setting: Path, **changed: object):
    usual: dict[str, object] = {
        "sft__train_files": str(setting / "demo.jsonl"), "sft__steps": STEPS, "sft__batch_size": 4,
        "sft__optim__lr": 1e-3, "sft__optim__lr_scheduler_type": "linear",
        "sft__optim__lr_warmup_steps_ratio": 0.34, "rollout__deterministic": True,
        "trainer__save_freq": 3, "trainer__test_freq": 2,
    }  # fmt: skip
    return config(setting, "ppo", **(usual | changed))


@pytest.fixture(scope="module")
def whole(setting: Path) -> tuple[Path, str]:
    """A run that was never stopped, and what it said."""
    said = Said()
    train(chosen(setting), setting / "whole", "sft", said)
    return only_run(setting / "whole"), said.text


def test_it_validates_and_saves_where_that_is_due(whole: tuple[Path, str]) -> None:
    run, said = whole
    found = log_rows(run, "SELECT step, phase FROM steps WHERE phase IN ('val', 'test') ORDER BY ALL")
    assert found == [(0, "test"), (0, "val"), (2, "val"), (4, "val"), (6, "test"), (6, "val")]
    assert list(checkpoints(run)) == [3, 6]
    assert "step 1/6  loss" in said
    assert "tokens/s" in said


def test_the_schedule_warms_up_and_ends_at_the_last_step(whole: tuple[Path, str]) -> None:
    """0.34 of 6 steps are 2 of warm-up; the other four fall to 0 in the step after the last."""
    rates = log_rows(whole[0], "SELECT value FROM metrics WHERE name = 'sft/lr' ORDER BY step")
    assert [rate for (rate,) in rates] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_it_resumes_bit_for_bit(
    setting: Path, workspace: Path, whole: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the step before, which is saved since the run was stopped."""
    real, calls = sft.fine_tune_step, iter(range(5))

    def breaking(*arguments: object, **named: object) -> dict[str, float]:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(sft, "fine_tune_step", breaking)
        with pytest.raises(KeyboardInterrupt):
            train(chosen(setting), workspace, "sft")
    run = only_run(workspace)
    assert max(checkpoints(run)) == 4
    assert resume(run, workspace=Workspace(workspace), terminal=Said()).steps == STEPS
    assert differences(run, whole[0]) == []


def test_it_is_extended(setting: Path, workspace: Path) -> None:
    train(chosen(setting, sft__steps=2), workspace, "sft")
    run, said = only_run(workspace), Said()
    assert resume(run, workspace=Workspace(workspace), terminal=said).steps == 2
    assert f"{run.name} is finished" in said.text
    summary = resume(run, workspace=Workspace(workspace), terminal=said, steps=4)
    assert (summary.steps, list(checkpoints(run))) == (4, [2, 3, 4])
