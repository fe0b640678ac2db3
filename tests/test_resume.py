"""A run that was stopped and goes on is, bit for bit, the run that was not stopped."""

import asyncio
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.kills import differences
from tests.store_builder import log_rows
from tests.training import (
    Said,
    config,
    only_run,
    questions,
    search_is_down,
    setting,
    stop_at,
    train,
    write_setting,
)

import srl.store
from srl.cli import main
from srl.config import load_saved, save_config
from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.serve.in_process import LocalSearch
from srl.train.loop import Loop
from srl.train.model_settings import settings_of
from srl.train.resume import too_many_failures
from srl.train.run import resume
from srl.train.run_directory import Progress, best_step, checkpoints
from srl.trajectory import FailedEpisodes
from srl.workspace import Workspace

__all__ = ["setting"]
ROOT = Path(__file__).parent.parent
SETTINGS = {
    "rollout.deterministic": True,
    "trainer.total_training_steps": 4,
    "trainer.test_freq": 2,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 40,
    "actor.entropy_coeff": 0.01,
    "actor.ppo_epochs": 2,
    "actor.optim.lr_scheduler_type": "cosine",
    "actor.optim.lr_warmup_steps": 2,
}


def train_metrics(run, name):
    """The different values of a metric over the training steps."""
    rows = log_rows(run, "SELECT value FROM metrics WHERE phase = 'train' AND name = ?", [name])
    return {value for (value,) in rows}


@pytest.fixture(scope="module")
def whole(setting):
    """Runs that were never stopped, by algorithm."""
    made = {}

    def run_of(algo):
        if algo not in made:
            folder = setting / f"whole-{algo}"
            train(config(setting, algo, **SETTINGS), folder, algo)
            made[algo] = only_run(folder)
        return made[algo]

    return run_of


def known(run):
    """What the log knows of the validations up to the newest checkpoint: their EM, the best, and whether that
    of the newest checkpoint is missing."""
    newest = max(checkpoints(run), default=0)
    val_em = Progress.of_log(run / "log", newest).val_em
    due = newest % load_saved(run).trainer.test_freq == 0
    return {str(step): em for step, em in val_em.items()}, best_step(val_em), due and newest not in val_em


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_same_run_twice_is_the_same(setting, workspace, whole, algo):
    expected = whole(algo)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/lr", *["critic/kl_coeff"] * (algo == "ppo")):
        assert len(train_metrics(expected, name)) == 4, f"{name} moves, or equality would say little"
    train(config(setting, algo, **SETTINGS), workspace, algo)
    assert differences(only_run(workspace), expected) == []


@pytest.mark.parametrize(
    ("algo", "stop", "newest"),
    [
        ("ppo", ("train", 3), 2),
        ("ppo", ("test", 4), 4),
        ("grpo", ("train", 1), 0),
        ("grpo", ("val", 2), 2),
        pytest.param("ppo", ("val", 4), 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    setting, workspace, whole, monkeypatch, algo, stop, newest
):
    """Also in a validation, before which the step's checkpoint is saved."""
    phase, step = stop
    monkeypatch.setattr(Loop, "score", stop_at(step, phase))
    with pytest.raises(KeyboardInterrupt):
        train(config(setting, algo, **SETTINGS), workspace, algo)
    run = only_run(workspace)
    assert log_rows(run, "SELECT status FROM runs")[0] == ("interrupted",)
    assert max(checkpoints(run), default=0) == newest
    said = Said()
    summary = resume(run, workspace=Workspace(workspace), terminal=said)
    assert summary.steps == 4
    assert ("from step-" in said.text) == (newest > 0)
    assert differences(run, whole(algo)) == []
    assert known(run) == known(whole(algo))


@pytest.mark.parametrize(("during", "newest"), [("val/0/", 0), ("val/2/", 2), ("test/4/", 4)])
def test_failed_searches_are_no_result_of_a_validation_or_test_and_it_is_made_again(
    setting, workspace, whole, monkeypatch, during, newest
):
    with monkeypatch.context() as patch:
        search_is_down(patch, during)
        with pytest.raises(UserError, match=r"search failed in \d of \d .*nobody listens.*--resume"):
            train(config(setting, "grpo", **SETTINGS), workspace, "grpo")
    run = only_run(workspace)
    assert max(checkpoints(run), default=0) == newest
    phase, step, _ = during.split("/")
    if newest:
        val_em, _, awaits = known(run)
        assert (str(step) in val_em, awaits) == (phase == "test", phase == "val")
    query = "SELECT count(*) FROM steps WHERE phase = ? AND step = ?"
    assert log_rows(run, query, [phase, int(step)])[0] == (0,)
    resume(run, workspace=Workspace(workspace), terminal=Said())
    assert differences(run, whole("grpo")) == []
    assert known(run) == known(whole("grpo"))


def dawdling(real):
    """A search that takes some turns of the event loop, another number each time."""
    rng = random.Random(0)

    async def search(searcher, query):
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        return await real(searcher, query)

    return search


def test_how_long_searches_take_changes_nothing(setting, workspace, whole, monkeypatch):
    monkeypatch.setattr(LocalSearch, "search", dawdling(LocalSearch.search))
    train(config(setting, "grpo", **SETTINGS), workspace, "grpo")
    assert differences(only_run(workspace), whole("grpo")) == []


def test_going_on_from_an_older_checkpoint_forgets_what_came_after(setting, workspace, whole):
    """As if the newest checkpoint had not been finished when the run was killed."""
    train(config(setting, "grpo", **SETTINGS), workspace, "grpo")
    run = only_run(workspace)
    for step in (3, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    resume(run, workspace=Workspace(workspace), terminal=Said())
    assert differences(run, whole("grpo")) == []


def test_resuming_a_finished_run_changes_nothing(workspace, whole):
    expected = whole("grpo")
    run = workspace / "runs" / expected.name
    shutil.copytree(expected, run)
    summary = resume(run, workspace=Workspace(workspace), terminal=Said())
    assert (summary.run_id, summary.steps) == (expected.name, 4)
    assert differences(run, expected) == []


def test_another_index_is_said_aloud(workspace, tmp_path):
    write_setting(tmp_path)
    train(config(tmp_path, trainer__total_training_steps=1), workspace)
    with (tmp_path / "corpus.jsonl").open("a", encoding="utf-8") as corpus:
        corpus.write('{"id": "new", "contents": "\\"new\\"\\nthe flag of new is red ."}\n')
    said = Said()
    resume(only_run(workspace), workspace=Workspace(workspace), terminal=said, steps=2)
    assert "started with another index" in said.text


def test_other_questions_are_said_aloud(workspace, tmp_path):
    write_setting(tmp_path)
    chosen = config(tmp_path, trainer__total_training_steps=1)
    train(chosen, workspace)
    said = Said()
    resume(only_run(workspace), workspace=Workspace(workspace), terminal=said, steps=2)
    assert "other questions" not in said.text
    (file,) = chosen.data.val_files
    write_questions(file, questions("validation", 3))
    resume(only_run(workspace), workspace=Workspace(workspace), terminal=said, steps=3)
    assert f"started with other questions: the files of data.val_files ({file}) have changed" in said.text


def test_a_run_keeps_the_precision_that_auto_meant_where_it_started(workspace, tmp_path):
    write_setting(tmp_path)
    train(config(tmp_path, trainer__total_training_steps=1, model__dtype="auto"), workspace)
    assert load_saved(only_run(workspace)).model.dtype == "float32"


def test_another_reference_is_refused(setting, workspace, tmp_path):
    shutil.copytree(setting / "model", tmp_path / "model")
    chosen = config(setting, "grpo", trainer__total_training_steps=1, ref__path=str(tmp_path / "model"))
    train(chosen, workspace, "grpo")
    file = tmp_path / "model" / "model.safetensors"
    weights = {name: value + 1 for name, value in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"the reference policy of .* has changed"):
        resume(only_run(workspace), workspace=Workspace(workspace), terminal=Said(), steps=2)


def test_another_model_under_an_adapter_is_refused(setting, workspace, tmp_path):
    shutil.copytree(setting / "model", tmp_path / "model")
    settings = {"model__path": str(tmp_path / "model"), "model__lora_rank": 2}
    train(config(setting, "grpo", trainer__total_training_steps=1, **settings), workspace, "grpo")
    resume(only_run(workspace), workspace=Workspace(workspace), terminal=Said(), steps=2)
    file = tmp_path / "model" / "model.safetensors"
    weights = {name: value + 1 for name, value in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"the model under the adapter of .* has changed"):
        resume(only_run(workspace), workspace=Workspace(workspace), terminal=Said(), steps=3)


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.timeout(1800)
def test_a_run_killed_at_random_moments_is_the_run_that_was_not(setting, tmp_path):
    """Three times SIGKILL, and `srl train --resume`: the same log and the same weights."""
    save_config(tmp_path, config(setting, "ppo", **{**SETTINGS, "trainer.total_training_steps": 8}))
    command = [sys.executable, ROOT / "tests" / "kills.py", "--kills", "3", "--steps", "8", "--seed", "1"]
    command += ["--out", str(tmp_path / "resume.json"), "--", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads((tmp_path / "resume.json").read_text())
    assert (found["kills"], found["identical"], found["differences"]) == (3, True, [])


def test_a_run_goes_on_from_anywhere(tmp_path, whole, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Path("srl-workspace")
    settings = config(place / "worlds", "grpo", **SETTINGS)
    monkeypatch.setattr(Loop, "score", stop_at(3))
    with pytest.raises(KeyboardInterrupt):
        train(settings, place, "grpo")
    monkeypatch.chdir("/")
    run = only_run(tmp_path / place)
    summary = resume(run, workspace=Workspace(tmp_path / place), terminal=Said())
    assert summary.steps == 4
    assert differences(run, whole("grpo")) == []
    measured = settings_of(run / "checkpoints" / "step-000004", None, None, {}, [])
    assert measured.data.corpus == str(tmp_path / place / "worlds" / "corpus.jsonl")


CONSTANT = {**SETTINGS, "actor.optim.lr_scheduler_type": "constant", "actor.optim.lr_warmup_steps": 0}


def longer(run, steps):
    """What `srl train --resume --steps` says, and its summary."""
    said = Said()
    found = resume(run, workspace=Workspace(run.parent.parent), terminal=said, steps=steps)
    return said.text, found


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_a_finished_run_that_gets_more_steps_is_the_run_that_had_them_from_the_start(setting, tmp_path, algo):
    for steps, folder in ((2, "short"), (4, "long")):
        settings = {**CONSTANT, "trainer.total_training_steps": steps, "data.test_files": None}
        train(config(setting, algo, **settings), tmp_path / folder, algo)
    run = only_run(tmp_path / "short")
    text, summary = longer(run, 4)
    assert "4 steps now, not 2" in text
    assert summary.steps == 4
    assert differences(run, only_run(tmp_path / "long")) == []
    assert load_saved(run).trainer.total_training_steps == 4
    ((known,),) = log_rows(run, "SELECT config FROM runs")
    (extension,) = json.loads(known)["extended"]
    assert (extension["at"], extension["before"], extension["after"]) == (2, 2, 4)


def test_a_longer_run_is_tested_at_its_new_end_and_stays_one_run(setting, tmp_path):
    train(config(setting, "grpo", **{**SETTINGS, "trainer.total_training_steps": 2}), tmp_path, "grpo")
    run = only_run(tmp_path)
    _, summary = longer(run, 3)
    assert len(train_metrics(run, "actor/lr")) == 3
    steps = log_rows(run, "SELECT step FROM steps WHERE phase = 'train' ORDER BY step")
    tested = log_rows(run, "SELECT step FROM steps WHERE phase = 'test' ORDER BY step")
    assert log_rows(run, "SELECT status FROM runs") == [("finished",)]
    assert (steps, tested) == ([(1,), (2,), (3,)], [(0,), (2,), (3,)])
    assert summary.test_em_end is not None


def test_a_longer_run_has_the_learning_rate_of_its_new_schedule(setting, tmp_path):
    linear = {**SETTINGS, "actor.optim.lr_scheduler_type": "linear", "actor.optim.lr_warmup_steps": 0}
    for steps, folder in ((2, "short"), (3, "long")):
        settings = {**linear, "trainer.total_training_steps": steps}
        train(config(setting, "grpo", **settings), tmp_path / folder, "grpo")
    run = only_run(tmp_path / "short")
    longer(run, 3)
    whole = only_run(tmp_path / "long")
    assert rates(run)[2] == rates(whole)[2]
    assert rates(run)[1] != rates(whole)[1]


def test_a_longer_run_of_few_questions_warms_up_by_updates(setting, tmp_path):
    """Two questions are one update a step, where a batch of four would be two; the warm-up counts updates."""
    write_questions(tmp_path / "two.parquet", questions("train", 2))
    few = {
        "data.train_files": [str(tmp_path / "two.parquet")], "data.val_files": None, "data.test_files": None,
        "actor.optim.lr_warmup_steps": 3,
    }  # fmt: skip
    train(config(setting, "grpo", **few), tmp_path, "grpo")
    run = only_run(tmp_path)
    longer(run, 3)
    assert rates(run) == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])


def rates(run):
    """The actor's learning rate, training step after training step."""
    query = "SELECT value FROM metrics WHERE name = 'actor/lr' AND phase = 'train' ORDER BY step"
    return [value for (value,) in log_rows(run, query)]


def test_a_run_gets_no_fewer_steps_than_it_has_made(workspace, whole):
    run = workspace / "runs" / whole("grpo").name
    shutil.copytree(whole("grpo"), run)
    with pytest.raises(UserError, match=r"--steps 3: .* has made 4 steps.* give 4 or a larger number"):
        longer(run, 3)
    assert differences(run, whole("grpo")) == []


def test_a_finished_run_asked_for_the_steps_that_it_has_is_left_as_it_is_and_reported(
    workspace, whole, monkeypatch, capsys
):
    run = workspace / "runs" / whole("grpo").name
    shutil.copytree(whole("grpo"), run)
    monkeypatch.setattr(Loop, "score", stop_at(4, "test"))
    text, summary = longer(run, 4)
    assert "is finished, all 4 steps" in text
    assert (text, summary) == longer(run, None)
    assert main(["train", "--resume", "--steps", "4", "--run", run.name, "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["run_id"], last["steps"]) == (run.name, 4)


def test_a_stopped_run_asked_for_the_steps_that_it_has_is_finished_with_them(setting, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "score", stop_at(3))
        with pytest.raises(KeyboardInterrupt):
            train(config(setting, "grpo", **CONSTANT), tmp_path, "grpo")
    run = only_run(tmp_path)
    text, summary = longer(run, 2)
    assert "2 steps now, not 4" in text
    assert (summary.steps, None in (summary.test_em_start, summary.test_em_end)) == (2, False)
    assert longer(run, 2)[1] == longer(run, None)[1] == summary


def test_a_stopped_run_gets_another_number_of_steps(setting, tmp_path, monkeypatch):
    monkeypatch.setattr(Loop, "score", stop_at(3))
    settings = {**CONSTANT, "data.test_files": None}
    with pytest.raises(KeyboardInterrupt):
        train(config(setting, "grpo", **settings), tmp_path / "stopped", "grpo")
    train(
        config(setting, "grpo", **{**settings, "trainer.total_training_steps": 3}), tmp_path / "whole", "grpo"
    )
    run = only_run(tmp_path / "stopped")
    longer(run, 3)
    found = differences(run, only_run(tmp_path / "whole"))
    assert [line for line in found if "val/3" not in line] == []


def test_a_finished_run_is_left_as_it_is_and_says_how_to_go_on(workspace, whole, monkeypatch):
    run = workspace / "runs" / whole("grpo").name
    shutil.copytree(whole("grpo"), run)
    monkeypatch.setattr(Loop, "score", stop_at(4, "test"))
    text, summary = longer(run, None)
    assert "is finished, all 4 steps; to train longer: srl --workspace" in text
    assert "--steps N" in text
    assert (summary.steps, None in (summary.test_em_start, summary.test_em_end)) == (4, False)


def test_run_ends_only_above_the_allowed_share_of_failed_episodes(tmp_path):
    run = tmp_path / "runs" / "mine"
    assert too_many_failures(run, FailedEpisodes(1, 20, "refused: gone"), 0.05) is None
    assert too_many_failures(run, FailedEpisodes(0, 0, ""), 0.05) is None
    assert str(too_many_failures(run, FailedEpisodes(2, 20, "refused: gone"), 0.05)).startswith(
        "search failed in 2 of 20 episodes, more than search.max_failed=0.05 (refused: gone); once it"
    )


def test_a_run_in_a_directory_of_another_name_is_refused_since_its_log_would_have_two(
    whole, workspace, tmp_path
):
    run = workspace / "runs" / "a-branch"
    shutil.copytree(whole("grpo"), run)
    with pytest.raises(
        UserError, match=rf"has the log of the run {whole('grpo').name}, .*give the directory"
    ):
        resume(run, workspace=Workspace(workspace), terminal=Said(), steps=9)
    with pytest.raises(UserError, match="a log cannot have two names"):
        srl.store.LogWriter(run / "log", srl.store.RunInfo(run.name))
