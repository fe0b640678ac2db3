"""Packages that `srl plugins new` writes, installed by pip, work by name in `srl train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import srl.store
from srl.train.make_missing import BASE_MODEL

SRL = str(Path(sys.executable).with_name("srl"))
PLUGINS = {"retriever": "overlap", "reward": "brevity", "algorithm": "baseline"}
SMALL = [
    "data.train_batch_size=4", "rollout.n=2", "actor.ppo_mini_batch_size=4", "rollout.max_turns=1",
    "eval.val_questions=4", "eval.test_questions=4", "trainer.threads=1", "data.max_response_length=256",
]  # fmt: skip


def run(*command: str, environment: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.must_run
def test_plugins_made_by_the_scaffold_and_installed_by_pip_train_by_name(tmp_path):
    site = tmp_path / "site"
    environment = {**os.environ, "PYTHONPATH": str(site), "SRL_WORKSPACE": str(tmp_path / "workspace")}
    for kind, name in PLUGINS.items():
        folder = tmp_path / name
        run(SRL, "plugins", "new", kind, name, "--out", str(folder), environment=environment)
        run(
            sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
            "--target", str(site), str(folder), environment=environment,
        )  # fmt: skip
    settings = [*SMALL, "retriever.name=overlap", "reward.weights.brevity=0.5"]
    output = run(
        SRL, "train", "--algo", "baseline", "--model", str(BASE_MODEL), "--steps", "1", "--json",
        *[part for setting in settings for part in ("--set", setting)], environment=environment,
    )  # fmt: skip
    summary = json.loads(output.splitlines()[-1])
    assert summary["algo"] == "baseline"
    log = srl.store.open(tmp_path / "workspace" / "runs" / summary["run_id"])
    parts = {part for (part,) in log.execute("SELECT DISTINCT part FROM rewards").fetchall()}
    assert {"em", "brevity"} <= parts
    (searches,) = log.execute("SELECT count(*) FROM searches WHERE status = 'ok'").fetchone()
    assert searches > 0
