"""What watches do to whole runs on a world of six towns: they are logged, stop a run, or roll it back."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from tests.training import Said, config, train, write_setting

import srl.store
from srl.cli import main
from srl.errors import UserError
from srl.files import check_checkpoint
from srl.rollout.engine import LogitsNotFinite
from srl.train import local_backend
from srl.train.episodes import EpisodeRunner
from srl.train.report import reporters
from srl.train.run import resume
from srl.train.run_directory import checkpoints
from srl.train.watched_run import stopped
from srl.train.watches import RULES, Fired, Rule
from srl.update import optimiser
from srl.workspace import Workspace

LR = 1e-3
RATE = Rule("actor/lr", lambda metrics, limits: metrics.get("actor/lr"))
"""Looks at the learning rate, which the warm-up raises and a roll-back lowers."""
ROLLS_BACK = (
    f"watch.kl.threshold={0.8 * LR}", "watch.kl.patience=1", "watch.kl.action=rollback",
    "rollout.deterministic=true", "trainer.total_training_steps=5", "trainer.test_freq=0",
    "trainer.val_before_train=false", "actor.optim.lr_warmup_steps=2",
)  # fmt: skip
"""The rate is .3, .7 and 1 × 10⁻³ in the first three steps; the third is rolled back."""


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    return folder


def only_run(workspace):
    (run,) = Workspace(workspace).all_runs()
    return run


def fired_in(run):
    with srl.store.open(run) as log:
        return srl.store.rows(log, "FROM watches ORDER BY number")


def rates(run):
    with srl.store.open(run) as log:
        query = "SELECT value FROM metrics WHERE phase = 'train' AND name = 'actor/lr' ORDER BY step"
        return [value for (value,) in log.execute(query).fetchall()]


def state_of(run):
    """Weights and optimiser of the newest checkpoint, and what the log has of the episodes."""
    newest = max(checkpoints(run).items())[1]
    weights = (newest / "model.safetensors").read_bytes()
    saved = torch.load(newest / "trainer" / "actor-optimiser.pt", weights_only=True)
    moments = [value["exp_avg"].tolist() for value in saved["adamw"]["state"].values()]
    with srl.store.open(run) as log:
        rows = log.execute(
            "SELECT step, trajectory_id, token_ids, logprobs, advantages FROM segments ORDER BY ALL"
        ).fetchall()
        metrics = log.execute(
            "SELECT step, name, value FROM metrics WHERE name NOT LIKE 'timing_s/%' ORDER BY ALL"
        ).fetchall()
    known = [{**row, "run_id": ""} for row in fired_in(run)]
    return weights, moments, saved["scheduler"]["base_lrs"], rows, metrics, known


def test_a_healthy_run_has_an_empty_table(setting, workspace, capsys):
    train(config(setting, "reinforce"), workspace, "reinforce")
    run = only_run(workspace)
    assert fired_in(run) == []
    assert not (run / "log" / "watches.parquet").exists()
    assert main(["--workspace", str(workspace), "inspect", "watches"]) == 0
    assert "no watch has fired" in capsys.readouterr().err


def test_a_note_is_said_and_logged_and_marked_on_curves(setting, workspace, capsys):
    said = Said()
    sets = ["watch.entropy_high.threshold=0", "watch.entropy_high.patience=2"]
    train(config(setting, "reinforce", sets), workspace, "reinforce", said)
    assert "warning: watch entropy_high at step 2: actor/entropy is" in said.text
    (row,) = fired_in(only_run(workspace))
    assert (row["number"], row["step"], row["phase"], row["watch"]) == (1, 2, "train", "entropy_high")
    assert (row["since"], row["action"], row["to_step"], row["bound"]) == (1, "note", None, 0.0)
    assert main(["--workspace", str(workspace), "inspect", "watches", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["watch"] == "entropy_high"
    assert main(["--workspace", str(workspace), "inspect", "curve", "--metric", "actor/entropy"]) == 0
    assert "! step 2: entropy_high" in capsys.readouterr().out


def test_a_watch_stops_a_run_with_a_line_that_says_from_where_to_start_again(setting, workspace):
    sets = ["watch.length_high.threshold=0", "watch.length_high.patience=2", "watch.length_high.action=stop"]
    with pytest.raises(UserError) as caught:
        train(config(setting, "reinforce", sets), workspace, "reinforce")
    run = only_run(workspace)
    assert str(caught.value).startswith("stopped by watch length_high at step 2: response_length/mean")
    again = f"srl --workspace {workspace} train --config {run}/config.yaml --set actor.optim.lr=0.0005"
    assert str(caught.value).endswith(
        f"there is no good checkpoint: start again with a lower learning rate: {again}"
    )
    assert [row["action"] for row in fired_in(run)] == ["stop"]
    with srl.store.open(run) as log:
        assert log.execute("SELECT status, steps FROM runs").fetchall() == [("failed", 2)]


def test_a_watch_that_fires_on_a_validation_leaves_no_checkpoint_of_its_step(setting, workspace, monkeypatch):
    rule = Rule("val/em", lambda metrics, limits: float("val/em" in metrics), phase="val")
    monkeypatch.setitem(RULES, "kl", rule)
    sets = ["watch.kl.threshold=0.5", "watch.kl.patience=2", "watch.kl.action=stop",
            "trainer.val_before_train=false", "trainer.total_training_steps=3"]  # fmt: skip
    with pytest.raises(UserError, match=r"stopped by watch kl at step 2"):
        train(config(setting, "grpo", sets), workspace)
    assert list(checkpoints(only_run(workspace))) == [1]


def test_gradients_that_stay_not_finite_end_the_run(setting, workspace, monkeypatch):
    """And are counted: two optimiser steps in each training step."""
    clip = torch.nn.utils.clip_grad_norm_

    def broken(parameters, largest):
        return clip(parameters, largest) * float("nan")

    monkeypatch.setattr(optimiser.nn.utils, "clip_grad_norm_", broken)
    with pytest.raises(UserError, match=r"stopped by watch skipped_steps at step 3: .* is 2, above 0"):
        train(config(setting, "grpo", trainer__total_training_steps=9), workspace)
    with srl.store.open(only_run(workspace)) as log:
        query = "SELECT value FROM metrics WHERE name = 'actor/skipped_steps' ORDER BY step"
        assert log.execute(query).fetchall() == [(2.0,), (2.0,), (2.0,)]


@pytest.fixture(scope="module")
def rolled_back(setting, tmp_path_factory):
    """A run that was rolled back once, and what was said."""
    said, workspace = Said(), tmp_path_factory.mktemp("rolled-back")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(RULES, "kl", RATE)
        train(config(setting, "grpo", ROLLS_BACK), workspace, terminal=said)
    return only_run(workspace), said.text


def test_a_roll_back_continues_from_the_last_good_checkpoint_with_a_lower_learning_rate(rolled_back):
    run, said = rolled_back
    assert rates(run) == pytest.approx([0.3 * LR, 0.7 * LR, 0.5 * LR, 0.5 * LR, 0.5 * LR])
    (row,) = fired_in(run)
    assert (row["step"], row["since"], row["action"], row["to_step"]) == (3, 3, "rollback", 2)
    assert "rolled back to step 2, with 0.5 × the learning rate" in said
    assert list(checkpoints(run)) == [0, 1, 2, 3, 4, 5]


def test_a_run_that_is_resumed_after_a_roll_back_keeps_its_rate_and_its_reason(
    rolled_back, tmp_path, monkeypatch
):
    monkeypatch.setitem(RULES, "kl", RATE)
    run, said = shutil.copytree(rolled_back[0], tmp_path / "runs" / rolled_back[0].name), Said()
    resume(run, workspace=Workspace(tmp_path), terminal=said, steps=6)
    assert f"the learning rate of the actor stays at {0.5 * LR:g}" in said.text
    assert rates(run)[5] == pytest.approx(0.5 * LR)
    assert fired_in(run) == fired_in(rolled_back[0])


def test_a_roll_back_keeps_what_somebody_put_into_the_checkpoint(setting, tmp_path, monkeypatch):
    monkeypatch.setitem(RULES, "kl", RATE)
    real = local_backend.roll_back

    def with_a_note(run, *given):
        (run / "checkpoints" / "step-000002" / "notes.txt").write_text("mine")
        return real(run, *given)

    monkeypatch.setattr(local_backend, "roll_back", with_a_note)
    said = Said()
    train(config(setting, "grpo", ROLLS_BACK), tmp_path, terminal=said)
    assert "rolled back to step 2" in said.text
    again = only_run(tmp_path) / "checkpoints" / "step-000002"
    assert (again / "notes.txt").read_text() == "mine"
    check_checkpoint(again)


class Killed(BaseException):
    """The process ends here."""


def killed(*ignored, **named):
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize("place", ["roll_back", "save_checkpoint", "drop_checkpoints_after", "lr_scale"])
def test_a_run_that_is_killed_in_a_roll_back_continues_as_if_it_were_not(
    setting, tmp_path, monkeypatch, place, rolled_back
):
    """Before anything, before the checkpoint is saved again, before the later ones are dropped, after the
    log's later steps are: weights, moments, episodes and metrics are the same bit for bit."""
    monkeypatch.setitem(RULES, "kl", RATE)
    real, roll_back, began = getattr(local_backend, place), local_backend.roll_back, []

    def begins(*given):
        began.append(True)
        return roll_back(*given)

    def dies(*given, **named):
        return killed() if began or place == "roll_back" else real(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(local_backend, "roll_back", begins)
        patched.setattr(local_backend, place, dies)
        with pytest.raises(Killed):
            train(config(setting, "grpo", ROLLS_BACK), tmp_path)
    run = only_run(tmp_path)
    resume(run, workspace=Workspace(tmp_path), terminal=Said())
    assert state_of(run) == state_of(rolled_back[0])


def test_a_run_is_stopped_when_it_has_been_rolled_back_often_enough(setting, workspace):
    sets = [
        "watch.length_high.threshold=0", "watch.length_high.patience=1", "watch.length_high.action=rollback",
        "watch.max_rollbacks=2", "trainer.val_before_train=false", "trainer.test_freq=0",
    ]  # fmt: skip
    said = r"since step 1, after 2 roll-backs \(watch.max_rollbacks\); start"
    with pytest.raises(UserError, match=said) as stop:
        train(config(setting, "grpo", sets), workspace)
    run = only_run(workspace)
    assert [(row["action"], row["to_step"]) for row in fired_in(run)] == [
        ("rollback", 0), ("rollback", 0), ("stop", None)
    ]  # fmt: skip
    assert rates(run) == pytest.approx([LR / 4])
    assert str(stop.value).endswith(f"actor.optim.lr={LR / 8:g}"), "below what it ended with"


def test_another_watch_that_stops_a_rolled_back_run_proposes_a_rate_below_its_own(
    setting, workspace, monkeypatch
):
    monkeypatch.setitem(RULES, "kl", RATE)
    other = ["watch.length_high.threshold=0", "watch.length_high.patience=4", "watch.length_high.action=stop"]
    with pytest.raises(
        UserError, match=r"length_high at step 4: .* since step 1, after 1 roll-back; "
    ) as stop:
        train(config(setting, "grpo", [*ROLLS_BACK, *other]), workspace)
    assert str(stop.value).endswith(f"step-000000 --set actor.optim.lr={LR / 4:g}")


DIVERGES = ("actor.optim.lr=1e30", "trainer.test_freq=0", "trainer.val_before_train=false")


def test_a_policy_that_cannot_be_sampled_is_rolled_back(setting, workspace):
    sets = [*DIVERGES, "watch.skipped_steps.action=rollback", "watch.max_rollbacks=1"]
    with pytest.raises(UserError, match=r"a log-prob of the policy is not a number, since step \d, after 1 "):
        train(config(setting, "grpo", sets), workspace)
    fired = [(row["watch"], row["action"], row["to_step"]) for row in fired_in(only_run(workspace))]
    assert fired == [("skipped_steps", "rollback", 0), ("skipped_steps", "stop", None)]


def test_a_policy_that_cannot_be_sampled_ends_the_run_with_what_to_type(setting, workspace):
    with pytest.raises(LogitsNotFinite) as caught:
        train(config(setting, "grpo", [*DIVERGES, "trainer.save_freq=1"]), workspace)
    [note] = caught.value.__notes__
    assert note.startswith("there is no good checkpoint: start again with a lower learning rate: srl ")
    assert note.endswith("config.yaml --set actor.optim.lr=5e+29")


def diverges_once(patch, phase, step):
    """Have the policy be one that cannot be sampled, in one phase of one step."""
    real, left = EpisodeRunner.roll_out, [1]

    def roll_out(runner, questions, of_phase, of_step, *rest, **named):
        if (of_phase, of_step) == (phase, step) and left:
            left.pop()
            raise LogitsNotFinite
        return real(runner, questions, of_phase, of_step, *rest, **named)

    patch.setattr(EpisodeRunner, "roll_out", roll_out)


ONCE = ("trainer.val_before_train=false", "watch.skipped_steps.action=rollback")


def test_a_policy_that_cannot_be_tested_is_rolled_back(setting, workspace, monkeypatch):
    diverges_once(monkeypatch, "test", 2)
    summary = train(config(setting, "grpo", [*ONCE, "trainer.test_freq=0"]), workspace)
    (row,) = fired_in(only_run(workspace))
    assert (row["watch"], row["since"], row["action"], row["to_step"]) == ("skipped_steps", 2, "rollback", 1)
    assert rates(only_run(workspace)) == pytest.approx([LR, LR / 2])
    assert summary.test_em_end is not None


def test_a_policy_that_cannot_be_validated_is_rolled_back_in_a_resumed_run_too(
    setting, workspace, monkeypatch
):
    """Its checkpoint was saved before the validation."""
    with monkeypatch.context() as patch:
        patch.setattr(EpisodeRunner, "validate", stopped_at(2))
        with pytest.raises(KeyboardInterrupt):
            train(config(setting, "grpo", ONCE), workspace)
    run = only_run(workspace)
    assert max(checkpoints(run)) == 2
    diverges_once(monkeypatch, "val", 2)
    assert resume(run, workspace=Workspace(workspace), terminal=Said()).steps == 2
    assert [(row["watch"], row["to_step"]) for row in fired_in(run)] == [("skipped_steps", 1)]
    assert rates(run) == pytest.approx([LR, LR / 2])


def stopped_at(step):
    """A validation that is stopped at one step."""
    real = EpisodeRunner.validate

    def validate(runner, progress):
        if progress.step == step:
            raise KeyboardInterrupt
        return real(runner, progress)

    return validate


def test_a_policy_that_cannot_be_tested_ends_the_run_with_what_to_type(setting, workspace, monkeypatch):
    diverges_once(monkeypatch, "test", 2)
    with pytest.raises(LogitsNotFinite) as caught:
        train(config(setting, "grpo", ["trainer.test_freq=0", ONCE[0]]), workspace)
    [note] = caught.value.__notes__
    assert note.startswith("start from the last good checkpoint with a lower learning rate: srl ")
    assert note.endswith(f"step-000001 --set actor.optim.lr={LR / 2:g}")


def test_of_two_watches_that_act_the_other_is_a_note(setting, workspace):
    actions = {"length_high": "stop", "entropy_high": "rollback"}
    sets = [
        f"watch.{name}.{setting}"
        for name, action in actions.items()
        for setting in ("threshold=0", "patience=2", f"action={action}")
    ]
    with pytest.raises(UserError, match="stopped by watch length_high"):
        train(config(setting, "grpo", sets), workspace)
    fired = {row["watch"]: row["action"] for row in fired_in(only_run(workspace))}
    assert fired == {"length_high": "stop", "entropy_high": "note"}


def test_a_run_that_has_no_good_checkpoint_left_is_not_said_to_be_rolled_back_too_often(setting, tmp_path):
    fired = Fired(5, "train", "kl", "actor/ref_kl", 3.0, 1.0, 1, "rollback")
    said = stopped(tmp_path, config(setting, "grpo", ["watch.max_rollbacks=3"]), fired, None, 1)
    assert "since step 1, after 1 roll-back; there is no good checkpoint" in said
    assert said.endswith(f"actor.optim.lr={LR / 4:g}")


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


def test_curves_of_wandb_have_the_steps_that_are_made_again_after_a_roll_back(setting, tmp_path, monkeypatch):
    wandb = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with reporters(config(setting, trainer__logger=["wandb"]), tmp_path) as (logger,):
        for number, step in enumerate((1, 2, 3, 2, 3)):
            logger.metrics(step, {"train/em": float(number)})
    assert (wandb.given["id"], wandb.given["resume"]) == (tmp_path.name, "allow"), "a resumed run is one run"
    assert wandb.curve("train/em") == [(1, 0.0), (2, 1.0), (3, 2.0), (2, 3.0), (3, 4.0)]


def test_a_damaged_table_of_watches_does_not_hide_the_log(rolled_back, tmp_path, capsys):
    run = shutil.copytree(rolled_back[0], tmp_path / "runs" / rolled_back[0].name)
    file = run / "log" / "watches.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    assert main(["--workspace", str(tmp_path), "inspect", "watches"]) == 0
    said = capsys.readouterr().err
    assert "watches.parquet" in said
    assert "left out: which watches fired" in said
    assert rates(run) != []
