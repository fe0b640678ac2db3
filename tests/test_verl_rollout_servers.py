"""Rollout servers without a trainer: what they are configured with and refuse, and evaluations on them."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests import training
from tests.tiny_models import byte_level_tokenizer
from tests.verl_configs import GPU, job, made
from tests.verl_runs import finished, said, write_config

from srl import store
from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.store import read_records
from srl.train.verl.config_check import server_config
from srl.train.verl.rollout_servers import FOLDER, ServersEngine
from srl.workspace import Workspace

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
@pytest.mark.parametrize(
    ("setting", "on"),
    [
        ("rollout.engine=openai", GPU),
        ("model.cast_lm_head_to_fp32=true", GPU),
        ("cluster.rollout=torch", GPU),
        ("cluster.tensor_model_parallel_size=3", GPU),
        ("cluster.nnodes=2", GPU),
        ("data.max_response_length=100000", GPU),
        ("verl.actor_rollout_ref.rollout.no_such=1", GPU),
    ],
)
def test_what_servers_cannot_do_is_one_line_with_our_key(setting, on):
    with pytest.raises(UserError) as error:
        composed(setting, on=on)
    assert "\n" not in str(error.value)
    assert setting.partition("=")[0] in str(error.value)


def answer(ask: Any, patience_s: float = 60.0) -> Any:
    """One turn of an engine whose servers answer as `ask` does."""
    engine = ServersEngine(lambda ends: ask, CODEC, "vllm", patience_s)
    engine.start()
    sampling = Sampling(max_tokens=8, temperature=0.0, stop=("</answer>",))
    return asyncio.run(engine.generate("eval/0/q/0/0", CODEC.encode_text("hello"), sampling))


@with_verl
@pytest.mark.parametrize(("dies", "key"), [(True, None), (False, "cluster.watchdog_s")])
def test_a_server_that_is_dead_or_does_not_answer_ends_the_evaluation_in_one_line(dies, key):
    from ray import exceptions

    async def generate(**request: Any) -> Any:
        if dies:
            raise exceptions.ActorDiedError()
        await asyncio.Event().wait()

    with pytest.raises(UserError) as error:
        answer(generate, patience_s=5.0 if dies else 0.01)
    assert error.value.key == key
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("starts", [True, False])
def test_servers_start_once_and_all_that_was_started_ends(starts):
    said: list[str] = []

    def begin(ends: ExitStack) -> Any:
        said.append("start")
        ends.callback(said.append, "end")
        if not starts:
            raise UserError("no")
        return said.append

    engine = ServersEngine(begin, CODEC, "vllm", 60.0)
    assert said == []
    with nullcontext() if starts else pytest.raises(UserError):
        engine.start()
        engine.start()
    engine.close()
    assert said == ["start", "end"]


QUESTIONS, LOCAL = 18, 5
"""All questions, and how many of them the local backend has answered before."""


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
        "--data", str(tmp_path / "asked.parquet"), "--baseline", "r1", "--json",
    )  # fmt: skip
    here, there = tmp_path / "local", tmp_path / "verl"
    finished(*command, workspace=here)
    finished(*command, "--limit", str(LOCAL), workspace=there)
    assert len(logged(there)) == 2 * LOCAL
    finished(*command, "--backend", "verl", "--run", "last", workspace=there)

    assert len(logged(here)) == 2 * QUESTIONS
    assert logged(there) == logged(here)
    assert len(Workspace(there).all_runs()) == 2, "the evaluation is continued, not started again"
    for setting in ("search", "r1"):
        assert metrics(here, setting) == pytest.approx(metrics(there, setting))
    assert not list(there.glob(f"{FOLDER}*"))


def logged(workspace: Path) -> dict[tuple[str, str], Any]:
    """The token ids of every episode of a workspace's evaluations, by template and question."""
    tokens = {}
    for run in Workspace(workspace).all_runs():
        setting = json.loads((run / "run.json").read_text())["setting"]
        with store.open(run) as log:
            for record in read_records(log, "phase = 'eval'"):
                tokens[setting, record.trajectory.question.id] = record.trajectory.token_ids
    return tokens


def metrics(workspace: Path, setting: str) -> Any:
    """Those that the last command printed with `--json`."""
    out = said(workspace)
    return json.loads(out[out.rindex("\n{") :])[setting]["metrics"]
