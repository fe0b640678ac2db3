"""`srl plugins new`: each package that it writes works, passes its own tests, and trains by name."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.plugin_site import hook, site

import srl.store
from srl.cli import main
from srl.errors import UserError
from srl.plugins import manager
from srl.plugins.scaffold import KINDS, create
from srl.train.make_missing import BASE_MODEL

__all__ = ["site"]


def run_tests(path: Path, tmp_path: Path) -> list[str]:
    """Run the test functions of a module here and now; their names."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    for test in tests.values():
        test(**({"tmp_path": tmp_path} if inspect.signature(test).parameters else {}))
    return list(tests)


@pytest.mark.parametrize("kind", KINDS)
def test_new_plugin_is_listed_and_passes_its_own_tests(kind, site, tmp_path, monkeypatch):
    folder = create(kind, "short-answers", tmp_path / "new")
    monkeypatch.syspath_prepend(str(folder / "src"))
    site.register("srl-search-short-answers", "srl_short_answers", version="0.1.0")
    (entry,) = manager.installed()
    assert (entry.kind, entry.name, entry.error) == (kind, "short-answers", "")
    names = run_tests(folder / "tests" / "test_srl_short_answers.py", tmp_path)
    assert names[0] == f"test_{entry.kind}_conforms"
    assert len(names) == 2
    assert main(["plugins", "check", "short-answers"]) == 0


@pytest.mark.parametrize(
    "name", ["", "Bad", "has space", "9x", "x-", "-x", "x--y", "a.b", "ü", "../up", "x\n"]
)
def test_name_that_cannot_be_one_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="my-search"):
        create("reward", name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_name_that_is_taken_is_refused(site, tmp_path):
    site.install("srl-search-words", hook("reward", "bees"))
    for kind, name in (("reward", "bees"), ("retriever", "words")):
        with pytest.raises(UserError, match=name):
            create(kind, name, tmp_path / "new")
    with pytest.raises(UserError, match="algorithm"):
        create("algo", "mine", tmp_path / "new")
    assert not (tmp_path / "new").exists()


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
