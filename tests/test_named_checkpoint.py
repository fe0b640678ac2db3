"""Which checkpoint `RUN`, `RUN@best` and `RUN@STEP` mean, on both backends."""

import json
from pathlib import Path

import pytest
from tests.training import Said, config, setting, train

from srl.cli import main
from srl.config import load_config, save_config
from srl.errors import UserError
from srl.files import CHECKPOINT, write_manifest
from srl.store import LogWriter, RunInfo
from srl.train.loop import Loop
from srl.train.named_checkpoint import model_directory
from srl.train.run import resume
from srl.train.run_directory import RunRecord, checkpoint_path, checkpoints
from srl.workspace import Workspace

__all__ = ["setting"]

NAME = "20260101T000000Z-test-grpo-s0-00ff"
COLLAPSE = {0: 0.1, 10: 0.3, 20: 0.6, 30: 0.4, 40: 0.0}


def made(
    workspace: Path, val_em: dict[int, float], saved: tuple[int, ...], backend="local", every=10
) -> Path:
    """A run with these validations in its log, and checkpoints of the steps `saved`."""
    run = workspace / "runs" / NAME
    run.mkdir(parents=True)
    save_config(run, load_config(None, None, "grpo", {"trainer.save_freq": every}).config)
    RunRecord("test", "grpo", "2026-01-01T00:00:00+00:00", backend).save(run)
    with LogWriter(run / "log", RunInfo(run.name)) as log:
        for step, em in val_em.items():
            log.write(step, "val", [], {"val/em": em})
    for step in saved:
        path = checkpoint_path(run, step, backend)
        path.mkdir(parents=True)
        write_manifest(path, CHECKPOINT, {"files": {}})
    return run


def named(name: str, workspace: Path) -> tuple[str, str]:
    """The checkpoint that `name` means, and what is noted of it."""
    said: list[str] = []
    found = model_directory(name, Workspace(workspace), said.append)
    return found.name, " ".join(said)


@pytest.mark.parametrize("name", ["best", "last@best", f"{NAME}@best", f"{NAME[:10]}@best", "00ff@best"])
def test_the_best_is_the_checkpoint_with_the_highest_validation_em(workspace, name):
    made(workspace, COLLAPSE, (10, 20, 30, 40))
    assert named(name, workspace) == (
        "step-000020",
        f"the best checkpoint of {NAME}: step 20, validation EM 0.600",
    )


def test_a_path_a_step_and_the_newest_are_named_too(workspace, capsys):
    run = made(workspace, COLLAPSE, (10, 20, 30, 40))
    assert named(f"{run}@best", workspace)[0] == "step-000020"
    assert named("last@30", workspace) == ("step-000030", "")
    assert named("last", workspace) == ("step-000040", "")
    assert main(["train", "--model", "last@best", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model.path"]["value"] == str(checkpoint_path(run, 20))


def test_a_run_below_the_current_directory_is_not_taken_for_a_name_on_the_hub(workspace, monkeypatch):
    run = made(workspace, COLLAPSE, (10, 20))
    monkeypatch.chdir(workspace)
    assert named(f"runs/{run.name}@best", workspace)[0] == "step-000020"
    assert named("org/name@best", workspace) == ("name@best", ""), "a revision of a model on the hub"


@pytest.mark.parametrize(
    ("name", "val_em", "saved"),
    [("best", {}, (10,)), ("best", {5: 0.5}, (10,)), ("best", COLLAPSE, ()),
     ("last@15", COLLAPSE, (10, 20)), ("last@x", COLLAPSE, (10, 20))],
    ids=["never validated", "others validated", "no checkpoint", "no such step", "no step"],
)  # fmt: skip
def test_a_checkpoint_that_is_not_there_is_one_line(workspace, name, val_em, saved):
    made(workspace, val_em, saved)
    with pytest.raises(UserError):
        model_directory(name, Workspace(workspace))


# --- a whole run ---


def test_a_run_that_collapses_keeps_its_best_checkpoint_also_after_it_was_resumed(
    setting, workspace, monkeypatch
):
    """The exact match of every validation is given; what is kept, resumed and found follows from it."""
    em = {0: 0.0, 1: 0.5, 2: 0.1, 3: 0.0, 4: 0.2}
    evaluate = Loop.evaluate

    def collapsing(self, phase, step):
        metrics = evaluate(self, phase, step)
        return metrics and metrics | {"val/em": em[step]}

    def logged(self, step, phase, records, metrics):
        write(self, step, phase, records, metrics | ({"val/em": em[step]} if phase == "val" else {}))

    write = Loop.record
    monkeypatch.setattr(Loop, "evaluate", collapsing)
    monkeypatch.setattr(Loop, "record", logged)
    train(config(setting, "grpo", trainer__max_ckpt_to_keep=1, data__test_files=None), workspace)
    (run,) = Workspace(workspace).all_runs()
    assert list(checkpoints(run)) == [1, 2]
    resume(run, workspace=Workspace(workspace), terminal=Said(), steps=4)
    assert list(checkpoints(run)) == [1, 4]
    assert named("best", workspace)[0] == "step-000001"
