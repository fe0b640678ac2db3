"""Published data from files to a trained model's log, by the commands that a user types."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shared_data import shared_data
from tests.tiny_models import new_model

import srl.store
from srl.cli import main
from srl.data.corpus import read_corpus
from srl.data.parquet import read_questions
from srl.data.tokenizer import train_tokenizer
from srl.models.load import load_model, load_tokenizer
from srl.models.weights import save_model
from srl.rollout.codec import Codec
from srl.store import Record, read_records
from srl.trajectory import Trajectory
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")

SQUAD = ("squad/super-bowl-50.v1.1.json", "squad/university-of-notre-dame.v1.1.json")
WIKI = "2wiki/2wikimultihopqa_corpus.json"
HOTPOT = "hotpotqa/hotpot_dev_v1_simplified.json"
NQ = "nq/NQ-open.dev.jsonl"
SETTINGS = """\
extends: null
algorithm: {name: grpo}
data:
  train_files: wiki/train.parquet
  val_files: wiki/validation.parquet
  test_files: open/test.parquet
  template: prompt.txt
  train_batch_size: 4
  max_prompt_length: 192
  max_response_length: 384
search: {index: wiki-index, topk: 2}
rollout: {n: 4, max_turns: 2, max_turn_tokens: 48, max_obs_length: 64, max_num_seqs: 16}
reward: {weights: {format: 1}}
actor: {ppo_mini_batch_size: 4, optim: {lr: 1e-4}}
sft:
  train_files: demonstrations.jsonl
  steps: 100
  batch_size: 8
  optim: {lr: 4e-3, betas: [0.9, 0.98]}
eval: {val_questions: 4, test_questions: 8}
trainer: {total_training_steps: 2, test_freq: 2, threads: 1}
"""
"""Of a model from scratch. With exact match alone all its scores would be 0; `format` tells some apart."""
TEMPLATE = "Write <search> query </search>, then <answer> words </answer>. Question: {question}\n"


def run(*arguments: object) -> str:
    """What `srl` prints on stdout; it must succeed."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main([str(argument) for argument in arguments]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with SQuAD's questions (`wiki/`), their passages among 2Wiki's, and the index of those."""
    folder = tmp_path_factory.mktemp("real")
    for name in (*SQUAD, WIKI):
        link = folder / "data" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(shared_data(name).resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SRL_WORKSPACE", str(folder / "workspace"))
        patch.chdir(folder)
        run("data", "prepare", f"squad:train={','.join(f'data/{name}' for name in SQUAD)}",
            f"2wiki-corpus=data/{WIKI}", "--val", 0.1, "--out", "wiki")  # fmt: skip
        run("index", "build", "--corpus", "wiki/corpus.jsonl", "--out", "wiki-index")
        yield folder


@dataclass(frozen=True, slots=True)
class Trained:
    """Where everything lies once a small model went the whole way, and what its evaluation said."""

    place: Path
    start: Path
    """The fine-tuned model that reinforcement learning started from."""
    run: Path
    report: dict[str, Any]

    def records(self, where: str = "true") -> list[Record]:
        with srl.store.open(self.run) as log:
            return read_records(log, where)

    def rows(self, query: str) -> list[dict[str, Any]]:
        with srl.store.open(self.run) as log:
            return srl.store.rows(log, query)


@pytest.fixture(scope="module")
def trained(place: Path) -> Trained:
    """A tokenizer, a model from scratch, fine-tuning, two steps of GRPO, and an evaluation."""
    open_sets = f"hotpotqa:test={shared_data(HOTPOT)}", f"nq:test={shared_data(NQ)}"
    run("data", "prepare", *open_sets, "--limit", 30, "--out", "open")
    asked = (question.text for question in read_questions("wiki/train.parquet"))
    words = train_tokenizer([*asked, *(page.contents for page in read_corpus("wiki/corpus.jsonl"))], 1024)
    sizes = {"layers": 2, "width": 64, "heads": 4, "ffn": 128, "max_length": 1024}
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    save_model(new_model("qwen2", vocab_size=len(words), **ends, **sizes), words, "scratch")
    write_settings(place)
    at_the_end = "--set", "trainer.test_freq=0", "--set", "trainer.save_freq=0"
    run("train", "--algo", "sft", "--model", "scratch", "--config", "real.yaml", *at_the_end)
    [tuning] = Workspace.resolve().all_runs()
    [start] = (tuning / "checkpoints").iterdir()
    run("train", "--config", "real.yaml", "--model", start)
    trained = Workspace.resolve().find_run("last")
    report = run("eval", "run", "last", "--data", "open/test.parquet", "--index", "wiki-index",
                 "--limit", 8, "--json")  # fmt: skip
    return Trained(place, start, trained, json.loads(report))


def write_settings(place: Path) -> None:
    """The settings, the prompt, and demonstrations that search for the question and then answer."""
    (place / "real.yaml").write_text(SETTINGS, encoding="utf-8")
    (place / "prompt.txt").write_text(TEMPLATE, encoding="utf-8")
    shown = [
        {"id": item.id, "question": item.text, "turns": [
            f"<think> I look it up. </think> <search> {item.text} </search>",
            f"<think> I read it. </think> <answer> {item.golden_answers[0]} </answer>",
        ]}
        for item in read_questions(place / "wiki" / "train.parquet")[:320]
    ]  # fmt: skip
    lines = "".join(f"{json.dumps(row)}\n" for row in shown)
    (place / "demonstrations.jsonl").write_text(lines, encoding="utf-8")


def whole_path(test: Any) -> Any:
    """Marks of the tests that need the trained model: about half a minute on one core, once for all."""
    return pytest.mark.slow(pytest.mark.must_run(test))


@whole_path
def test_tokens_in_the_log_are_those_that_were_sampled(trained: Trained) -> None:
    """The model of step 1, read from its directory, gives each logged id the log-prob it was sampled with."""
    model = load_model(trained.start, device="cpu")
    for record in trained.records("phase = 'train' AND step = 1"):
        trajectory = record.trajectory
        ids = torch.tensor([trajectory.token_ids])
        with torch.no_grad():
            logprobs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)  # (1, T − 1, V)
        own = logprobs[0].gather(-1, ids[0, 1:, None])[:, 0]  # (T − 1)
        chosen = torch.tensor(trajectory.response_mask[1:], dtype=torch.bool)
        torch.testing.assert_close(
            own[chosen], torch.tensor(trajectory.logprobs[1:])[chosen], rtol=1e-4, atol=1e-4
        )


@whole_path
def test_mask_is_1_where_the_policy_wrote_and_nowhere_else(trained: Trained) -> None:
    codec = Codec(load_tokenizer(trained.start)[0])
    seen = set()
    for record in trained.records():
        trajectory = record.trajectory
        check_segments(trajectory, codec)
        seen |= {segment.kind for segment in trajectory.segments}
        assert sum(trajectory.response_mask) == trajectory.policy_tokens > 0
        if record.advantages is not None:
            pairs = zip(record.advantages, trajectory.response_mask, strict=True)
            assert all(value == 0 for value, mask in pairs if not mask)
    assert seen == {"prompt", "policy", "observation", "feedback"}


def check_segments(trajectory: Trajectory, codec: Codec) -> None:
    """Each segment's ids say its text; those that we encoded are its encoding; the last is the policy's."""
    assert trajectory.segments[-1].is_policy
    for segment in trajectory.segments:
        assert codec.decode(segment.token_ids) == segment.text
        if segment.is_policy:
            assert len(segment.logprobs) == len(segment.token_ids)
            assert all(value <= 0 for value in segment.logprobs)
        else:
            assert not segment.logprobs
            assert codec.encode_text(segment.text) == list(segment.token_ids)
