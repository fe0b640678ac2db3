"""Our trainer of verl: the order of calls that its page tells, and what ends a step."""

import inspect
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from srl.config import load_config
from srl.errors import UserError
from srl.rollout.delivery import NotDelivered
from srl.train.questions import Splits
from srl.trajectory import FailedEpisodes, Question

pytestmark = [pytest.mark.slow, pytest.mark.must_run]
pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

LINE = re.compile(r"^(?P<indent> {4,})(?P<name>\w+)(?P<ours> \*)?(?: {2,}.*)?$")


def told() -> list[tuple[int, str, bool]]:
    """(depth, method, whether it is overridden) of each line of the page's order of calls."""
    from srl.train.verl import trainer

    lines = map(LINE.match, inspect.getdoc(trainer).splitlines())
    return [(len(m["indent"]) // 2 - 2, m["name"], bool(m["ours"])) for m in lines if m and m["name"]]


def called_by(name: str) -> list[str]:
    """The methods that verl's method of this name calls, in order."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    return re.findall(r"self\.(?:replay_buffer\.)?(\w+)\(", inspect.getsource(getattr(PPOTrainerSync, name)))


def test_the_order_of_calls_is_verls():
    lines = told()
    for place, (depth, name, _) in enumerate(lines):
        inside = []
        for below, child, _ in lines[place + 1 :]:
            if below <= depth:
                break
            inside += [child] if below == depth + 1 else []
        if inside:
            assert [call for call in called_by(name) if call in inside] == inside, name


@pytest.mark.parametrize(("versions", "valid", "ends"), [
    ((2, 2), True, False), ((1, 2), True, True), ((1, 1), True, True), ((3, 3), False, False),
])  # fmt: skip
def test_run_ends_at_episodes_of_older_weights_than_those_of_the_step_before(versions, valid, ends):
    from srl.train.verl.trainer import SearchTrainer

    row = {"srl_valid": valid, "min_global_steps": versions[0], "max_global_steps": versions[1]}
    with pytest.raises(NotDelivered) if ends else nullcontext():
        SearchTrainer._stop_on_old_weights(SimpleNamespace(global_steps=3), [row])


class Log:
    """The log actor, with what it answers; `finished` are the steps and evaluations that it was told."""

    def __init__(self, failed: int = 0, failure: Exception | None = None) -> None:
        self.answers = {"failed_episodes": FailedEpisodes(failed, 4, "refused"), "failure": failure}
        self.finished: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name == "finish":
            return SimpleNamespace(remote=lambda step, phase, *_: self.finished.append((step, phase)) or {})
        return SimpleNamespace(remote=lambda *_: self.answers.get(name))


@pytest.mark.parametrize(("failed", "failure", "dropped"), [
    (0, None, 0), (3, None, 0), (0, UserError("an episode broke"), 0), (0, None, 1),
])  # fmt: skip
def test_an_evaluation_whose_searches_or_episodes_fail_ends_the_run_and_is_not_in_the_log(
    monkeypatch, tmp_path, failed, failure, dropped
):
    import ray
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from srl.train.verl.trainer import SearchTrainer

    monkeypatch.setattr(ray, "get", lambda answer: answer)
    monkeypatch.setattr(PPOTrainer, "_validate", lambda self: {"val/em": 0.0})
    trainer, log = object.__new__(SearchTrainer), Log(failed, failure)
    vars(trainer).update(
        run=tmp_path, srl=load_config(sets=["search.max_failed=0.5"]).config, log_actor=log,
        splits=Splits([], [Question("q", "who?", ("a",))]), global_steps=0,
        replay_buffer=SimpleNamespace(failure_keys={"val": {*range(dropped)}}),
    )  # fmt: skip
    wrong = bool(failed or failure or dropped)
    with pytest.raises(UserError) if wrong else nullcontext():
        trainer._validate()
    assert log.finished == ([] if wrong else [(0, "val")])


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_counts_once_its_step_is_in_the_log(monkeypatch, tmp_path, fails):
    import ray
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from srl.train.run_directory import VERL_STATE, checkpoint_path, checkpoints
    from srl.train.verl.job import ABOUT
    from srl.train.verl.trainer import SearchTrainer

    def get(answer: Any) -> Any:
        if fails:
            raise UserError("the disk is full")
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(PPOTrainer, "_compute_metrics", lambda *_: None)
    (tmp_path / ABOUT).write_text('{"format": 1}')
    folder = checkpoint_path(tmp_path, 3, "verl")
    folder.mkdir(parents=True)
    trainer, log = object.__new__(SearchTrainer), Log()
    log.answers["flush"] = {3: 0.5}
    vars(trainer).update(
        run=tmp_path, srl=load_config().config, log_actor=log, global_steps=3, saved_step=3, tokens={},
        step_metrics={"actor/lr": 1.0}, kl=SimpleNamespace(state_dict=dict),
    )  # fmt: skip
    with pytest.raises(UserError) if fails else nullcontext():
        trainer._compute_metrics(None, {}, None, 3, 0)
    assert log.finished == [(3, "train")]
    assert list(checkpoints(tmp_path, "verl")) == ([] if fails else [3])
    assert (folder / VERL_STATE).is_file() is not fails
