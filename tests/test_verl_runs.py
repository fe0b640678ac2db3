"""Whole runs on verl: Ray, FSDP2 over gloo, two workers, real searches, no GPU."""

from __future__ import annotations

import json

import pytest
import torch
from tests.training import config as local_config
from tests.training import questions, train
from tests.verl_runs import (
    checkpointed,
    finished,
    identity,
    kill,
    only_run,
    said,
    srl,
    wait_for,
    wait_until_gone,
    write_config,
)

from srl import store
from srl.store.records import read_records
from srl.train.question_order import QuestionOrder
from srl.train.run_directory import whole_verl_steps

pytestmark = [pytest.mark.slow, pytest.mark.must_run, pytest.mark.timeout(1800)]
pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

STEPS = 3


@pytest.fixture(scope="module")
def towns(tmp_path_factory):
    return tmp_path_factory.mktemp("towns")


def settings(**more):
    return {"trainer.total_training_steps": STEPS, "trainer.sample_freq": 0, **more}


def rows(run, query):
    with store.open(run) as log:
        return log.execute(query).fetchall()


def steps(run):
    """Every entry of the log, `(phase, step)`; a step that was written twice shows twice."""
    return sorted(rows(run, "SELECT phase, step FROM steps"))


def metric(run, name, phase="train"):
    return dict(rows(run, f"SELECT step, value FROM metrics WHERE phase = '{phase}' AND name = '{name}'"))


def records(run, step):
    with store.open(run) as log:
        found = read_records(log, "phase = 'train' AND step = ?", [step])
    return {record.trajectory.id: record for record in found}


def test_ppo_is_killed_resumed_and_exported(towns, tmp_path):
    more = {"trainer.critic_warmup": 1, "actor.optim.lr_scheduler_type": "linear"}
    more["trainer.max_ckpt_to_keep"] = 1
    file = write_config(towns, "ppo", **settings(**{"algorithm.use_kl_in_reward": True, **more}))
    workspace = tmp_path / "ws"
    process = srl("train", "--backend", "verl", "--algo", "ppo", "--config", str(file), workspace=workspace)
    wait_for(lambda: checkpointed(workspace, 1), process, workspace)
    run = only_run(workspace)
    manifest = json.loads((run / "log" / "manifest.json").read_bytes())
    assert manifest["launcher"]["pid"] == process.pid != manifest["writer"]["pid"]
    assert (run / "log" / "lock").read_text() == f"process {manifest['writer']['pid']}"
    kill(process)
    assert identity(run)["backend"] == "verl"
    finished("train", "--resume", workspace=workspace)

    wait_until_gone(run)
    assert "resuming" in said(workspace)
    whole = [("test", 0), ("test", STEPS), ("train", 1), ("train", 2), ("train", 3)]
    assert [item for item in steps(run) if item[0] != "val"] == whole
    assert [step for phase, step in steps(run) if phase == "val"] == [0, 1, 2, 3]
    val_em = metric(run, "val/em", "val")
    best = max((1, 2, 3), key=lambda step: (val_em[step], -step))
    assert whole_verl_steps(run) == sorted({best, STEPS}), "the newest and the best are kept"
    assert max(metric(run, "rollout/logprob_diff/max").values()) < 1e-4
    assert set(metric(run, "critic/vf_explained_var")) == {1, 2, 3}
    assert set(metric(run, "critic/kl")) == {1, 2, 3}
    rates = metric(run, "actor/lr")
    assert rates == pytest.approx({2: 0.75e-3, 3: 0.25e-3}), "the actor's four updates fall to 1/4"

    searches = rows(run, "SELECT status, latency_s FROM searches WHERE phase = 'train'")
    assert searches
    assert {status for status, _ in searches} <= {"ok", "empty"}
    finished("train", "export", "--out", str(tmp_path / "model"), workspace=workspace)
    out = finished(
        "eval", "run", str(tmp_path / "model"), "--data", str(towns / "test.parquet"),
        "--config", str(run / "config.yaml"), "--index", str(index_of(towns)), "--json", workspace=workspace,
    )  # fmt: skip
    measured = json.loads(out[out.rindex("\n{") :])["search"]["metrics"]
    assert measured["em"] == metric(run, "test/em", "test")[STEPS]


def index_of(towns):
    from srl.index import build_index

    if not (towns / "index").is_dir():
        build_index(towns / "corpus.jsonl", towns / "index", "bm25", {})
    return towns / "index"


def test_a_finished_run_that_gets_more_steps_asks_the_questions_of_those_steps(towns, tmp_path):
    settled = {"data.val_files": None, "data.test_files": None, "trainer.total_training_steps": 1}
    section = "algorithm.rollout_correction"
    settled |= {f"{section}.rollout_rs": "seq_mean_k1", f"{section}.rollout_rs_threshold": 1.5}
    file = write_config(towns, "grpo", **settings(**settled))
    workspace = tmp_path / "ws"
    finished("train", "--backend", "verl", "--algo", "grpo", "--config", str(file), workspace=workspace)
    finished("train", "--resume", "--steps", "3", workspace=workspace)
    run = only_run(workspace)
    assert "has 3 steps now, not 1" in said(workspace)
    assert steps(run) == [("train", 1), ("train", 2), ("train", 3)]
    order = QuestionOrder(questions("train", 8), 4, 0, True)
    for step in (1, 2, 3):
        asked = rows(run, f"SELECT DISTINCT question_id FROM trajectories WHERE step = {step}")
        assert {name for (name,) in asked} == {item.id for item in order.batch(step)}
    for name, value in {"rollout_is_eff_sample_size": 1.0, "rollout_rs_masked_fraction": 0.0}.items():
        found = metric(run, f"rollout_corr/{name}")
        assert found == pytest.approx(dict.fromkeys((1, 2, 3), value), abs=1e-4), (
            "weights are on by themselves"
        )


def test_grpo_samples_what_the_local_backend_samples(towns, tmp_path):
    """Same seed, same weights: the first step's ids, masks and rewards are those of the local backend.

    The servers sleep and wake around every update, as on a GPU.
    """
    kl = {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.001}
    kl["actor.loss_agg_mode"] = "seq-mean-token-sum"
    more = settings(**kl, **{"actor.optim.lr_scheduler_type": "linear"})
    file = write_config(towns, "grpo", **more)
    workspace, sleep = tmp_path / "ws", "verl.actor_rollout_ref.rollout.free_cache_engine=true"
    finished(
        "train", "--backend", "verl", "--algo", "grpo", "--config", str(file), "--set", sleep,
        workspace=workspace,
    )  # fmt: skip
    train(local_config(towns, "grpo", **more), tmp_path / "local", "grpo")
    theirs, ours = only_run(workspace), only_run(tmp_path / "local")

    there, here = records(theirs, 1), records(ours, 1)
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
    assert metric(theirs, "env/number_of_valid_search")[1] == metric(ours, "env/number_of_valid_search")[1]
    assert max(metric(theirs, "rollout/logprob_diff/max").values()) < 1e-4
    used = metric(theirs, "actor/lr")
    assert used[1] > used[2] > used[3] > 0, "the learning rate does not fall as it does locally"
    assert not rows(theirs, "SELECT name FROM metrics WHERE phase = 'train' AND name LIKE 'val%'")
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert metric(theirs, name)[1] == pytest.approx(metric(ours, name)[1], rel=1e-3, abs=1e-6), name
