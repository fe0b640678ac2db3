"""What watches do to whole runs on a world of six towns: they are logged, or stop a run."""

import sys

import pytest
from tests.store_builder import log_rows
from tests.training import Said, config, only_run, setting, train

import srl.store
from srl.cli import main
from srl.errors import UserError
from srl.models.check import OutputsNotFinite
from srl.rollout.engine import LogitsNotFinite
from srl.train.report import reporters

__all__ = ["setting"]


def fired_in(run):
    with srl.store.open(run) as log:
        return srl.store.rows(log, "FROM watches ORDER BY number")


def test_a_note_is_said_and_logged_and_marked_on_curves(setting, workspace, capsys):
    said = Said()
    sets = ["watch.thresholds.repetition=-1", "trainer.total_training_steps=3"]
    train(config(setting, "reinforce", sets), workspace, "reinforce", said)
    assert "watch repetition at step 3" in said.text
    (row,) = fired_in(only_run(workspace))
    assert (row["number"], row["step"], row["phase"], row["watch"]) == (1, 3, "train", "repetition")
    assert (row["since"], row["action"], row["bound"]) == (1, "note", -1.0)
    curve = ("inspect", "curve", "--metric", "actor/entropy")
    assert main(["--workspace", str(workspace), *curve]) == 0
    assert "repetition" in capsys.readouterr().out


def test_a_watch_stops_a_run_and_says_what_starts_again(setting, workspace):
    sets = [
        "watch.thresholds.repetition=-1",
        "watch.actions.repetition=stop",
        "trainer.total_training_steps=4",
    ]
    with pytest.raises(UserError, match="repetition at step 3") as caught:
        train(config(setting, "reinforce", sets), workspace, "reinforce")
    run = only_run(workspace)
    assert f"train --config {run}/config.yaml --set actor.optim.lr=0.0005" in str(caught.value)
    assert [row["action"] for row in fired_in(run)] == ["stop"]
    assert log_rows(run, "SELECT status, steps FROM runs") == [("failed", 3)]


@pytest.mark.parametrize(("save_freq", "error"), [(0, LogitsNotFinite), (1, OutputsNotFinite)])
def test_a_policy_that_diverged_ends_the_run_with_what_to_type(setting, workspace, save_freq, error):
    quick = ["trainer.test_freq=0", "trainer.val_before_train=false", f"trainer.save_freq={save_freq}"]
    with pytest.raises(error) as caught:
        train(config(setting, "grpo", ["actor.optim.lr=1e30", *quick]), workspace)
    [note] = caught.value.__notes__
    assert "config.yaml --set actor.optim.lr=5e+29" in note


class FakeWandB:
    """W&B drops a row of an earlier step than the last one; a metric may have an axis of its own."""

    Error = RuntimeError

    def __init__(self):
        self.rows, self.axis, self.last = [], None, -1

    def init(self, **given):
        self.given = given
        return self

    def define_metric(self, name, step_metric=None):
        self.axis = step_metric if name == "*" else self.axis

    def log(self, values, step=None):
        if step is None or step >= self.last:
            self.last = self.last + 1 if step is None else step
            self.rows.append({"_step": self.last, **values})

    def finish(self):
        self.axis = self.axis or "_step"

    def curve(self, name):
        return [(row[self.axis], row[name]) for row in self.rows if name in row]


def test_curves_of_wandb_have_the_steps_that_are_made_again(setting, tmp_path, monkeypatch):
    wandb = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with reporters(config(setting, trainer__logger=["wandb"]), tmp_path) as (logger,):
        for number, step in enumerate((1, 2, 3, 2, 3)):
            logger.metrics(step, {"train/em": float(number)})
    assert (wandb.given["id"], wandb.given["resume"]) == (tmp_path.name, "allow"), "a resumed run is one run"
    assert wandb.curve("train/em") == [(1, 0.0), (2, 1.0), (3, 2.0), (2, 3.0), (3, 4.0)]
