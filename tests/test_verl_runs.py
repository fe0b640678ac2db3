"""Whole runs on verl: Ray, FSDP2 over gloo, two workers, no GPU. Both are stopped or killed, and resumed."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from tests.store_builder import log_records, log_rows
from tests.training import config as local_config
from tests.training import only_run, questions, train
from tests.verl_runs import (
    Typed,
    checkpointed,
    end,
    finished,
    index_of,
    wait_until_gone,
    write_config,
)

from srl.train.questions import QuestionOrder
from srl.train.resume import resume_command
from srl.train.run_directory import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.must_run, pytest.mark.timeout(1800)]
pytest.importorskip("verl")
pytest.importorskip("transfer_queue")


@pytest.fixture(scope="module")
def towns(tmp_path_factory):
    return tmp_path_factory.mktemp("towns")


def steps(run):
    """Every entry of the log, `(phase, step)`; a step that was written twice shows twice."""
    return sorted(log_rows(run, "SELECT phase, step FROM steps"))


def metric(run, name, phase="train"):
    return dict(log_rows(run, f"SELECT step, value FROM metrics WHERE phase = '{phase}' AND name = '{name}'"))


def records(run, step):
    found = log_records(run, "phase = 'train' AND step = ?", [step])
    return {record.trajectory.id: record for record in found}


STEPS = 3


def test_ppo_goes_on_after_a_worker_and_its_launcher_are_killed_and_is_exported(towns, tmp_path):
    more = {"algorithm.use_kl_in_reward": True, "trainer.critic_warmup": 1, "trainer.max_ckpt_to_keep": 1}
    more |= {"actor.optim.lr_scheduler_type": "linear", "trainer.total_training_steps": STEPS}
    file = write_config(towns, "ppo", **more)
    workspace = tmp_path / "ws"
    with Typed(workspace, "train", "--backend", "verl", "--algo", "ppo", "--config", str(file)) as first:
        first.until(lambda: checkpointed(workspace, 1))
        run = only_run(workspace)
        manifest = json.loads((run / "log" / "manifest.json").read_bytes())
        assert manifest["writer"]["pid"] != first.process.pid
        assert (run / "log" / "lock").read_text() == f"process {manifest['writer']['pid']}"
        pid = end(run, "ray::AgentLoopWorker")
        code, last = first.ends()
    assert code == 2
    assert all(part in last for part in ("AgentLoopWorker", str(pid), resume_command(run)))
    wait_until_gone(run)

    with Typed(workspace, "train", "--resume") as second:
        second.until(lambda: checkpointed(workspace, 2))
        second.process.kill()
    wait_until_gone(run)
    finished("train", "--resume", workspace=workspace)
    wait_until_gone(run)
    assert json.loads((run / "run.json").read_text())["backend"] == "verl"
    whole = [("test", 0), ("test", STEPS), ("train", 1), ("train", 2), ("train", 3)]
    assert [entry for entry in steps(run) if entry[0] != "val"] == whole
    assert [step for phase, step in steps(run) if phase == "val"] == [0, 1, 2, 3]
    val_em = metric(run, "val/em", "val")
    best = max((1, 2, 3), key=lambda step: (val_em[step], -step))
    assert list(checkpoints(run, "verl")) == sorted({best, STEPS}), "the newest and the best are kept"
    assert max(metric(run, "rollout/logprob_diff/max").values()) < 1e-4
    assert set(metric(run, "critic/vf_explained_var")) == {1, 2, 3}
    assert set(metric(run, "critic/kl")) == {1, 2, 3}
    rates = metric(run, "actor/lr")
    assert rates == pytest.approx({2: 0.75e-3, 3: 0.25e-3}), "the actor's four updates fall to 1/4"

    finished("train", "export", "--out", str(tmp_path / "model"), workspace=workspace)
    out = finished(
        "eval", "run", str(tmp_path / "model"), "--data", str(towns / "test.parquet"),
        "--config", str(run / "config.yaml"), "--index", str(index_of(towns)), "--json", workspace=workspace,
    )  # fmt: skip
    measured = json.loads(out[out.rindex("\n{") :])["search"]["metrics"]
    assert measured["em"] == metric(run, "test/em", "test")[STEPS]


@pytest.fixture(scope="module")
def grpo(towns, tmp_path_factory):
    """A run of two steps, that gets four and is interrupted.

    The servers of the rollout sleep and wake around every update, as on a GPU.
    """
    given = {
        "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.001, "actor.loss_agg_mode": "seq-mean-token-sum",
        "actor.optim.lr_scheduler_type": "linear", "trainer.total_training_steps": 2,
        "trainer.test_freq": 2, "data.test_files": None,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("grpo")
    write_config(towns, "grpo")  # corpus and model
    train(local_config(towns, "grpo", **given), folder / "local", "grpo")
    workspace, file = folder / "ws", write_config(towns, "grpo", **given)
    sleep = "verl.actor_rollout_ref.rollout.free_cache_engine=true"
    typed = ("train", "--backend", "verl", "--algo", "grpo", "--config", str(file), "--set", sleep)
    finished(*typed, workspace=workspace)
    run = only_run(workspace)
    rates = metric(run, "actor/lr")
    with Typed(workspace, "train", "--resume", "--steps", "4") as second:
        second.until(lambda: "\nstep 3/" in second.text)
        os.killpg(second.process.pid, signal.SIGINT)
        stopped = second.ends()
    wait_until_gone(run)
    return SimpleNamespace(run=run, local=only_run(folder / "local"), rates=rates, stopped=stopped)


def test_grpo_samples_what_the_local_backend_samples(grpo):
    """Same seed, same weights: the first step's ids, masks and rewards are those of the local backend."""
    there, here = records(grpo.run, 1), records(grpo.local, 1)
    assert there.keys() == here.keys()
    assert len(here) == 8
    for name, record in here.items():
        other = there[name]
        assert other.trajectory.token_ids == record.trajectory.token_ids
        assert other.trajectory.response_mask == record.trajectory.response_mask
        assert other.trajectory.searches[:1] == [] or other.trajectory.searches[0].hits
        assert other.score.value == record.score.value
        torch.testing.assert_close(
            torch.tensor(other.advantages), torch.tensor(record.advantages), rtol=1e-4, atol=1e-5
        )
    name = "env/number_of_valid_search"
    assert metric(grpo.run, name)[1] == metric(grpo.local, name)[1]
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        ours, theirs = metric(grpo.local, name)[1], metric(grpo.run, name)[1]
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-6), name


def test_grpo_learns_at_the_local_rates_from_what_the_trainer_would_have_sampled(grpo):
    assert max(metric(grpo.run, "rollout/logprob_diff/max").values()) < 1e-4
    assert grpo.rates == pytest.approx({1: 0.75e-3, 2: 0.25e-3}), "those of each step's last update"
    assert not log_rows(grpo.run, "SELECT name FROM metrics WHERE phase = 'train' AND name LIKE 'val%'")
    found = metric(grpo.run, "rollout_corr/rollout_is_eff_sample_size")
    assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=1e-4), "weights are on by themselves"
    assert {1, 2, 3} <= set(found)


def test_a_finished_run_that_gets_more_steps_asks_the_questions_of_those_steps_and_can_be_interrupted(grpo):
    code, last = grpo.stopped
    assert code == 130
    assert resume_command(grpo.run) in last
    assert log_rows(grpo.run, "SELECT status FROM runs") == [("interrupted",)]
    assert len(set(steps(grpo.run))) == len(steps(grpo.run)), "no step is there twice"
    order = QuestionOrder(questions("train", 8), 4, 0)
    for step in (1, 2, 3):
        query = f"SELECT DISTINCT question_id FROM trajectories WHERE phase = 'train' AND step = {step}"
        asked = log_rows(grpo.run, query)
        assert {name for (name,) in asked} == {question.id for question in order.batch(step)}
