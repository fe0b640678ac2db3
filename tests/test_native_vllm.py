"""Native calls on the real vLLM: trained and evaluated in process, and served to a plain client.

`make test-vllm` runs them; elsewhere they are skipped.
"""

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import training
from tests.native_models import ADDED, HERMES_FILE, codec_of
from tests.store_builder import log_rows
from tests.test_vllm_engine import with_vllm
from tests.test_vllm_server import Server
from tests.tiny_models import new_model

from srl.cli import main
from srl.config import Config
from srl.data.corpus import write_corpus
from srl.data.parquet import write_questions
from srl.models.weights import save_model
from srl.protocol import shown_result, template
from srl.rollout.protocol import SearchCall, schema

(QUESTION,) = training.questions("known", 1)
STEPS = 60


def config(folder: Path, algo: str, **settings: object) -> Config:
    files: dict[str, object] = {
        "data__train_files": [str(folder / "known.parquet")],
        "data__val_files": [str(folder / "known.parquet")],
        "data__test_files": None,
    }
    room = {
        "data__max_prompt_length": 512, "data__max_response_length": 512, "rollout__max_turn_tokens": 64,
        "rollout__max_obs_length": 160, "actor__ppo_max_token_len": 2048, "data__train_batch_size": 1,
    }  # fmt: skip
    given = {"rollout__protocol": "native", "data__template": None, **files, **room, **settings}
    return training.config(folder, algo, **given)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with what a run needs, and a model that knows by heart what to say to a question."""
    folder = tmp_path_factory.mktemp("taught")
    codec = codec_of(HERMES_FILE.read_text(), lacks=ADDED)
    model = new_model(
        "qwen2", vocab_size=len(codec.tokenizer), layers=2, width=64, heads=2, ffn=128, max_length=1024,
        eos_token_id=codec.tokenizer.eos_token_id, pad_token_id=codec.tokenizer.pad_token_id,
    )  # fmt: skip
    save_model(model, codec.tokenizer, folder / "model")
    write_corpus(folder / "corpus.jsonl", training.PASSAGES)
    write_questions(folder / "known.parquet", [QUESTION])
    turns = ["<search> velmar </search>", f"<answer> {QUESTION.golden_answers[0]} </answer>"]
    row = {"question": QUESTION.text, "golden_answers": QUESTION.golden_answers, "turns": turns}
    (folder / "shown.jsonl").write_text(json.dumps(row))
    steps: dict[str, object] = {f"trainer__{name}_freq": STEPS for name in ("save", "test")}
    sft = {"sft__train_files": str(folder / "shown.jsonl"), "sft__steps": STEPS, "sft__batch_size": 1}
    steps |= {"trainer__val_before_train": False, "sft__optim__lr": 3e-3}
    training.train(config(folder, "sft", **sft, **steps), folder / "ws", "sft")
    return folder, training.only_run(folder / "ws")


def read_ids(run: Path, step: int) -> list[int]:
    """All token ids of the validation episode of a step."""
    rows = log_rows(
        run, "SELECT token_ids FROM segments WHERE phase = 'val' AND step = ? ORDER BY position", [step]
    )
    return [number for (ids,) in rows for number in ids]


@with_vllm
def test_native_calls_are_trained_and_evaluated_on_vllm(taught, tmp_path):
    """Before the first update its episodes are, to the token, those of the torch engine."""
    folder, run = taught
    start = str(next((run / "checkpoints").iterdir()))
    settings = {
        "model__path": start,
        "rollout__engine": "vllm",
        "actor__optim__lr": 1e-6,
        "rollout__temperature": 0.2,
    }
    training.train(config(folder, "grpo", **settings), tmp_path / "ws")
    trained = training.only_run(tmp_path / "ws")
    assert read_ids(trained, 0) == read_ids(run, STEPS)
    rows = log_rows(trained, "SELECT name, step, value FROM metrics WHERE phase = 'train'")
    asked = log_rows(trained, "SELECT DISTINCT phase, step, query FROM searches")
    metrics = {(name, step): value for name, step, value in rows}
    assert all(metrics["rollout/logprob_diff/max", step] < 1e-4 for step in (1, 2))
    assert {("train", 2, "velmar"), ("val", 2, "velmar")} <= set(asked)


@pytest.fixture
def server(taught, tmp_path, capsys) -> Iterator[Server]:
    """What `srl train export` says that a user types."""
    run, out = taught[1], tmp_path / "exported"
    workspace = str(run.parent.parent)
    assert main(["--workspace", workspace, "train", "export", run.name, "--out", str(out)]) == 0
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "vllm" in line)
    made = Server(sys.executable, *shlex.split(line[line.index("-m vllm") :]))
    yield made
    made.stop()


@with_vllm
def test_a_plain_client_gets_an_answer_through_the_models_calls(taught, server):
    """What the model reads is, to the token, what the run's own evaluation had it read."""
    from openai import OpenAI

    folder, run = taught
    tool = SearchCall(training.search(folder))
    declared = [schema("search", tool.description, tool.parameters)]
    client = OpenAI(base_url=server.url(), api_key="none")
    (model,) = client.models.list()
    messages: list[Any] = list(template("tools").messages(QUESTION.text))
    while messages[-1]["role"] != "assistant":
        reply = client.chat.completions.create(
            model=model.id, messages=messages, tools=declared, temperature=0,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            found = asyncio.run(tool.call(json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": shown_result(found)})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert message.content == QUESTION.golden_answers[0]
    episode = [*reply.prompt_token_ids, *reply.choices[0].token_ids]
    assert episode == read_ids(run, STEPS)
