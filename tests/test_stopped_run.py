"""A run that is stopped in the middle of a step is saved as it was before the step."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.kills import differences
from tests.training import Said, config, only_run, setting, stop_at, train

from srl.config import Config, load_saved
from srl.errors import UserError
from srl.train import rl
from srl.train.loop import Loop
from srl.train.run import resume
from srl.train.run_directory import checkpoints
from srl.workspace import Workspace

__all__ = ["setting"]

STEPS = 4
SETTINGS = {
    "rollout.deterministic": True, "trainer.total_training_steps": STEPS, "trainer.save_freq": STEPS,
    "trainer.test_freq": 2, "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.horizon": 40,
}  # fmt: skip


def chosen(setting: Path, algo: str, **changed: object) -> Config:
    own = {"actor.ppo_epochs": 2} if algo == "ppo" else {}
    return config(setting, algo, **{**SETTINGS, **own, **changed})


@pytest.fixture(scope="module")
def whole(setting: Path) -> Callable[[str], Path]:
    """Runs that were never stopped, by algorithm."""
    made: dict[str, Path] = {}

    def run_of(algo: str) -> Path:
        if algo not in made:
            train(chosen(setting, algo), setting / f"whole-{algo}", algo)
            made[algo] = only_run(setting / f"whole-{algo}")
        return made[algo]

    return run_of


def breaks_call(patch: pytest.MonkeyPatch, name: str, call: int, error: BaseException) -> None:
    """Break a function of the training loop at its n-th call."""
    real, calls = getattr(rl, name), itertools.count(1)

    def breaking(*arguments: object, **named: object) -> object:
        if next(calls) == call:
            raise error
        return real(*arguments, **named)

    patch.setattr(rl, name, breaking)


@pytest.mark.parametrize(
    ("algo", "breaks", "error"),
    [
        ("ppo", partial(breaks_call, name="update_critic", call=3), KeyboardInterrupt()),
        ("grpo", partial(breaks_call, name="update_actor", call=3), UserError("gone")),
        (
            "grpo",
            lambda patch, error: patch.setattr(Loop, "score", stop_at(2, "val", error)),
            UserError("gone"),
        ),
    ],
    ids=["the KL has moved", "questions drawn", "in a validation"],
)
def test_it_goes_on_bit_for_bit_from_the_step_before(
    setting: Path, workspace: Path, whole: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    algo: str, breaks: Callable[..., None], error: BaseException,
) -> None:  # fmt: skip
    """Checkpoints are due at the last step only, so this one is there because the run was stopped."""
    expected = whole(algo)
    with monkeypatch.context() as patch:
        breaks(patch, error=error)
        with pytest.raises(type(error)):
            train(chosen(setting, algo), workspace, algo)
    run, said = only_run(workspace), Said()
    assert list(checkpoints(run)) == [2]
    assert resume(run, workspace=Workspace(workspace), terminal=said).steps == STEPS
    assert "from step-000002" in said.text
    assert differences(run, expected) == []


def test_a_gpu_without_memory_loses_only_the_step_under_way_and_says_what_takes_less(
    setting: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    monkeypatch.setattr(Loop, "score", stop_at(3, "train", full))
    with pytest.raises(UserError) as caught:
        train(chosen(setting, "grpo"), workspace, "grpo")
    run = only_run(workspace)
    (newest,) = checkpoints(run).values()
    assert newest.name == "step-000002"
    said = str(caught.value)
    before = load_saved(run)
    seqs, tokens = before.rollout.max_num_seqs - 1, before.actor.ppo_max_token_len - 1
    assert f"train --resume --run {run.name}`" in said
    monkeypatch.undo()
    less = [f"rollout.max_num_seqs={seqs}", f"actor.ppo_max_token_len={tokens}"]
    resume(run, workspace=Workspace(workspace), terminal=Said(), sets=less)
    now = load_saved(run)
    assert (now.rollout.max_num_seqs, now.actor.ppo_max_token_len) == (seqs, tokens)


@pytest.mark.parametrize(
    ("settings", "name", "call"),
    [
        ({}, "update_actor", 3), ({"trainer.save_freq": 0}, "update_critic", 3),
    ],
    ids=["weights have changed in the step", "checkpoints are off"],
)  # fmt: skip
def test_there_is_nothing_to_save(
    setting: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], name: str,
    call: int,
) -> None:  # fmt: skip
    breaks_call(monkeypatch, name, call, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train(chosen(setting, "ppo", **settings), workspace, "ppo")
    assert list(checkpoints(only_run(workspace))) == []
