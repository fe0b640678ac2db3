"""Rollout servers without a trainer: what they are configured with and refuse, and evaluations on them."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import training
from tests.tiny_models import byte_level_tokenizer
from tests.verl_configs import GPU, job, made
from tests.verl_runs import finished, said, write_config

from srl import store
from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.files import MARK
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.store import read_records
from srl.train.verl.config_check import check_supported, server_config
from srl.train.verl.rollout_servers import FOLDER, ServersEngine, _with_folder
from srl.workspace import Workspace

ROLLOUT = "actor_rollout_ref.rollout"
CODEC = Codec(byte_level_tokenizer())


def with_verl(test: Any) -> Any:
    """Marks a test that needs verl and Ray: the slow suite has them."""
    return pytest.mark.must_run(pytest.mark.slow(test))


def composed(*given: str, on: Any = GPU) -> Any:
    pytest.importorskip("verl")
    return server_config(made(*given), on)


@with_verl
@pytest.mark.parametrize("on", [job(), GPU], ids=["cpu", "gpus"])
def test_servers_load_the_weights_themselves_and_keep_the_memory(on):
    rollout = composed(on=on).actor_rollout_ref.rollout
    assert rollout.load_format == "auto", "verl's default is random weights, since a trainer sends its own"
    assert (rollout.free_cache_engine, rollout.enable_sleep_mode) == (False, False)


@with_verl
def test_servers_use_every_machine_of_the_cluster():
    rollout = composed("cluster.nnodes=4", "cluster.address=auto").actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node) == (4, 8)


@with_verl
@pytest.mark.parametrize(
    "setting",
    [
        "trainer.total_training_steps=0", "rollout.deterministic=true", "actor.mask_observations=false",
        "critic.lora_rank=8", "actor.ppo_mini_batch_size=3", "cluster.strategy=megatron",
    ],
)  # fmt: skip
def test_what_only_training_cannot_do_is_not_refused(setting):
    if setting != "actor.ppo_mini_batch_size=3":
        with pytest.raises(UserError):
            check_supported(made("rollout.n=1", setting), job())
    composed("rollout.n=1", setting, on=job())


@with_verl
@pytest.mark.parametrize(
    ("setting", "on", "says"),
    [
        ("rollout.engine=openai", GPU, "rollout.engine = openai .* set cluster.rollout, or leave out"),
        ("model.cast_lm_head_to_fp32=true", GPU, "model.cast_lm_head_to_fp32 = true"),
        ("cluster.rollout=torch", GPU, "cluster.rollout = torch is for machines without a GPU"),
        ("cluster.rollout=sglang", job(), "cluster.rollout = sglang"),
        ("cluster.tensor_model_parallel_size=3", GPU, "does not divide the 8 GPUs"),
        ("cluster.nnodes=2", GPU, "ray start"),
        ("data.max_response_length=100000", GPU, "context"),
        ("verl.actor_rollout_ref.rollout.no_such=1", GPU, "verl has no key"),
    ],
)
def test_what_servers_cannot_do_is_one_line_with_our_key(setting, on, says):
    with pytest.raises(UserError, match=says) as said:
        composed(setting, on=on)
    assert "\n" not in str(said.value)


def answer(ask: Any, patience_s: float = 60.0) -> Any:
    """One turn of an engine whose servers answer as `ask` does."""
    engine = ServersEngine(lambda ends: ask, CODEC, "vllm", patience_s)
    engine.start()
    sampling = Sampling(max_tokens=8, temperature=0.0, stop=("</answer>",))
    return asyncio.run(engine.generate("eval/0/q/0/0", CODEC.encode_text("hello"), sampling))


@with_verl
def test_a_turn_is_one_request_to_the_servers():
    asked: dict[str, Any] = {}
    said = tuple(CODEC.encode_text("red</answer>"))

    async def generate(**request: Any) -> Any:
        asked.update(request)
        return SimpleNamespace(
            token_ids=list(said), log_probs=[0.0] * len(said), stop_reason="completed", extra_fields={}
        )

    found = answer(generate)
    assert (found.token_ids, found.stop_reason) == (said, "stop")
    assert asked["request_id"] == "eval/0/q/0/0"
    assert asked["sampling_params"]["temperature"] == 0.0
    assert asked["sampling_params"]["stop"] == ["</answer>"]


@with_verl
def test_a_dead_server_ends_the_evaluation_in_one_line():
    from ray import exceptions

    async def die(**request: Any) -> Any:
        raise exceptions.ActorDiedError()

    with pytest.raises(UserError, match=r"died.*; the same command continues") as said:
        answer(die)
    assert "\n" not in str(said.value)


@with_verl
def test_a_server_that_does_not_answer_ends_the_evaluation_in_one_line():
    async def hang(**request: Any) -> Any:
        await asyncio.Event().wait()

    with pytest.raises(UserError, match=r"no rollout server has answered for 0\.01 s.*cluster\.watchdog_s"):
        answer(hang, patience_s=0.01)


def test_servers_start_once_and_end_with_the_engine():
    said: list[str] = []

    def begin(ends: ExitStack) -> Any:
        said.append("start")
        ends.callback(said.append, "end")
        return said.append

    engine = ServersEngine(begin, CODEC, "vllm", 60.0)
    assert said == []
    engine.start()
    engine.start()
    engine.close()
    assert said == ["start", "end"]


def test_what_was_started_ends_when_the_servers_do_not_start():
    said: list[str] = []

    def begin(ends: ExitStack) -> Any:
        ends.callback(said.append, "end")
        raise UserError("no")

    engine = ServersEngine(begin, CODEC, "vllm", 60.0)
    with pytest.raises(UserError):
        engine.start()
    assert said == ["end"]


def test_what_killed_servers_left_is_removed_and_what_others_use_is_kept(tmp_path):
    workspace = Workspace(tmp_path / "ws")
    with ExitStack() as others, ExitStack() as ours:
        used = _with_folder(made(), workspace, CODEC, others).run
        for name in ("left", "foreign"):
            (workspace.root / f"{FOLDER}{name}").mkdir()
        (workspace.root / f"{FOLDER}left" / MARK).touch()
        folder = _with_folder(made(), workspace, CODEC, ours).run
        foreign = workspace.root / f"{FOLDER}foreign"
        assert sorted(workspace.root.iterdir()) == sorted([used, folder, foreign])
        assert (folder / "config.yaml").is_file()
        assert (folder / "tokenizer").is_dir()
    assert list(workspace.root.iterdir()) == [foreign]


QUESTIONS = 18
LOCAL = 5
"""How many questions the local backend has answered before."""


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.timeout(1800)
def test_verl_continues_a_local_evaluation_and_gives_the_same_answers(tmp_path, monkeypatch):
    pytest.importorskip("transfer_queue")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = write_config(tmp_path, "grpo")
    write_questions(tmp_path / "asked.parquet", training.questions("eval", QUESTIONS))
    training.search(tmp_path)
    command = (
        "eval", "run", str(tmp_path / "model"), "--config", str(file), "--index", str(tmp_path / "index"),
        "--data", str(tmp_path / "asked.parquet"), "--no-search-too", "--json",
    )  # fmt: skip
    finished(*command, workspace=tmp_path / "local")
    finished(*command, "--limit", str(LOCAL), workspace=tmp_path / "verl")
    before = logged(tmp_path / "verl")
    assert len(before) == 2 * LOCAL
    finished(*command, "--backend", "verl", "--run", "last", workspace=tmp_path / "verl")

    here, there = logged(tmp_path / "local"), logged(tmp_path / "verl")
    assert len(here) == 2 * QUESTIONS
    assert there == here
    runs = Workspace(tmp_path / "verl").all_runs()
    assert len(runs) == 2, "the evaluation is continued, not started again"
    tables = [table(tmp_path / name) for name in ("local", "verl")]
    for setting in ("search", "no_search"):
        assert tables[0][setting]["metrics"] == pytest.approx(tables[1][setting]["metrics"])
    assert f"{LOCAL} of {QUESTIONS} episodes are in its log" in said(tmp_path / "verl")
    assert said(tmp_path / "verl").count("starting 2 rollout servers on verl") == 1
    assert not list((tmp_path / "verl").glob(f"{FOLDER}*"))


def logged(workspace: Path) -> dict[tuple[str, str], Any]:
    """The token ids of every episode of a workspace's evaluations, by template and question."""
    found = {}
    for run in Workspace(workspace).all_runs():
        with store.open(run) as log:
            for record in read_records(log, "phase = 'eval'"):
                found[setting(run), record.trajectory.question.id] = record.trajectory.token_ids
    return found


def setting(run: Path) -> str:
    name: str = json.loads((run / "evaluation.json").read_text())["setting"]
    return name


def table(workspace: Path) -> dict[str, Any]:
    """What the last command printed with `--json`."""
    out = said(workspace)
    found: dict[str, Any] = json.loads(out[out.rindex("\n{") :])
    return found
