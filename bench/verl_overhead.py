"""The overhead of our own code in a step on verl, with a stub model: episode, reward, log, advantages.

    python bench/verl_overhead.py [--episodes 256] [--rounds 5]

The agent loop, the writer and the estimator are those of a real run; a stub stands for verl's servers and
answers at once with turns of realistic length, and searches answer at once with three passages of a hundred
words. So only our own code is measured, in CPU seconds of one process. Its share of a step is taken
against the time for which eight GPUs are busy with the same tokens at the speeds of the table, which are
assumptions: episodes are shared by the agent processes and overlap with generation, of which nothing is
taken off here; the writer and the trainer are one process each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from srl.config import load_config
from srl.plugins import manager
from srl.protocol import template
from srl.reward import RewardMix
from srl.rollout.codec import Codec
from srl.rollout.episode import EpisodeOptions, run_episode
from srl.store import Record, RunInfo
from srl.train.compute_advantages import StepBatch, compute_advantages
from srl.train.verl.agent_loop import to_output
from srl.train.verl.batch import step_batch, token_columns, tokens_by_trajectory
from srl.train.verl.engine import VerlEngine
from srl.train.verl.log_writer import LogActor
from srl.trajectory import Hit, Passage, Question, Search
from srl.update.kl import kl_controller

RESULTS = Path(__file__).parent / "results" / "verl_overhead.json"
SEARCHES = 2
"""Searches of an episode; Search-R1 reports about two for each rollout of a trained 7B policy."""
THOUGHT = 120
"""Words that the policy thinks in each turn."""
EPISODES_A_STEP, AGENT_PROCESSES, GPUS = 2560, 8, 8
"""Search-R1's 512 questions × 5; verl's default number of agent processes; one node."""
SPEEDS = {"1,000 tokens/s a GPU": 1000, "2,500 tokens/s a GPU": 2500, "5,000 tokens/s a GPU": 5000}
"""Generation of an 8-bit to 16-bit model of 3B to 7B on a GPU of 80 GB, from slow to fast: assumed."""
TRAIN_TOKENS = 8000
"""Tokens a GPU gets through in the log-prob passes and the update together, per second: assumed."""


def words(rng: random.Random, count: int, pool: Sequence[str]) -> str:
    return " ".join(rng.choices(pool, k=count))


def tokenizer(pool: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 4,000 tokens over a made-up language: about one and a half tokens a word."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    rng = random.Random(1)
    trainer = trainers.BpeTrainer(
        vocab_size=4000, special_tokens=["<eos>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator((words(rng, 200, pool) for _ in range(300)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


@dataclass(slots=True)
class Stub:
    """Servers that answer at once: so many searches, then an answer."""

    codec: Codec
    pool: Sequence[str]
    rng: random.Random = field(default_factory=lambda: random.Random(2))
    turn: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        began = time.process_time()
        turn = self.turn.get(request_id, 0)
        self.turn[request_id] = turn + 1
        act = (
            f"<search>{words(self.rng, 6, self.pool)}</search>" if turn < SEARCHES else "<answer>a b</answer>"
        )
        ids = self.codec.encode_text(f"<think>{words(self.rng, THOUGHT, self.pool)}</think>{act}")
        self.seconds += time.process_time() - began
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"global_steps": 1},
        )


@dataclass(slots=True)
class Answers:
    """A search that answers at once with three passages of a hundred words."""

    passages: Sequence[Passage]
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    async def search(self, query: str) -> Search:
        return Search(query, tuple(Hit(passage, 1.0) for passage in self.rng.sample(self.passages, 3)))


@dataclass(slots=True)
class Made:
    """What a step is made of: questions, a search and servers that answer at once."""

    codec: Codec
    stub: Stub
    answers: Answers
    questions: list[Question]

    @classmethod
    def of(cls, episodes: int) -> Made:
        """Eight samples a question: `episodes / 8` questions."""
        pool = ["".join(random.Random(n).choices("aeiouklmnprst", k=2 + n % 7)) for n in range(3000)]
        codec, draw = Codec(tokenizer(pool)), random.Random(4)
        passages = [
            Passage(str(n), f'"{words(draw, 3, pool)}"\n{words(draw, 100, pool)}') for n in range(500)
        ]
        prompt = template("search-r1").messages(words(draw, 12, pool))
        questions = [
            Question(f"q{n}", words(draw, 12, pool), ("a b",), prompt=prompt) for n in range(episodes // 8)
        ]
        return cls(codec, Stub(codec, pool), Answers(passages), questions)

    def engine(self, *steps: int) -> VerlEngine:
        return VerlEngine(self.stub.generate, self.codec, "vllm", list(steps))

    async def records(self) -> list[Record]:
        """Every episode of the step, one after the other."""
        known: Any = {
            "codec": self.codec,
            "template": template("search-r1"),
            "options": EpisodeOptions(),
            "step": 1,
        }
        return [
            Record(await run_episode(question, self.engine(), self.answers, sample=sample, **known))
            for question in self.questions
            for sample in range(8)
        ]


class Clock:
    """CPU seconds of this process, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[part] = time.process_time() - began


def measured(episodes: int, directory: Path) -> dict[str, float]:
    """CPU seconds of one batch of `episodes`, part by part, and how large it is."""
    made, clock = Made.of(episodes), Clock()
    mix = RewardMix({"em": 1.0, "format": 0.2})
    config = load_config(None, None, "grpo", {"rollout.n": 8}).config
    algorithm: Any = manager.load("algorithm", "grpo", {})
    log_actor = LogActor(
        directory, RunInfo("bench", "bench", "grpo", 0, "", {}, "", "", "2026-01-01T00:00:00+00:00")
    )
    with clock("episode"):
        records = asyncio.run(made.records())
    with clock("reward"):
        for record in records:
            (record.score,) = asyncio.run(mix.score([record.trajectory]))
    outputs: list[Any] = []
    with clock("hand_over"):
        for record in records:
            assert record.score is not None
            outputs.append(to_output(record.trajectory, record.score, made.engine(1)))
            log_actor.add(1, "train", pickle.loads(pickle.dumps(record)))
    batch = batch_of(outputs)
    extra, padding = [output.extra_fields for output in outputs], [False] * len(outputs)
    with clock("advantages"):
        result = compute_advantages(batch, config, algorithm, kl_controller("fixed", 0.001))
        lengths = [len(output.response_ids) for output in outputs]
        tokens = tokens_by_trajectory(token_columns(batch, result, None), extra, padding, lengths)
    with clock("write"):
        log_actor.finish(1, "train", {}, tokens)
    log_actor.close("finished")
    found = clock.seconds
    found["episode"] -= made.stub.seconds
    found["tokens"] = sum(len(o.prompt_ids) + len(o.response_ids) for o in outputs) / len(outputs)
    found["policy_tokens"] = sum(sum(o.response_mask) for o in outputs) / len(outputs)
    found["bytes"] = sum(len(pickle.dumps(record)) for record in records) / len(records)
    return found


def batch_of(outputs: Sequence[Any]) -> StepBatch:
    """What the trainer makes of verl's batch, padded."""
    longest = max(len(output.response_ids) for output in outputs)

    def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.float32)

    mask = padded([output.response_mask for output in outputs]).long()
    logprobs = padded([output.response_logprobs for output in outputs])
    scores = padded([[0.0] * (len(output.response_ids) - 1) + [output.reward_score] for output in outputs])
    fields = {
        "response_mask": mask,
        "rm_scores": scores,
        "old_log_probs": logprobs,
        "rollout_log_probs": logprobs,
    }
    return step_batch(fields, [output.extra_fields for output in outputs], [False] * len(outputs))


def shares(part: dict[str, float], episodes: int) -> dict[str, Any]:
    """Of a step of `EPISODES_A_STEP`: our seconds, and their share at each assumed speed."""
    scale = EPISODES_A_STEP / episodes
    agents = scale * (part["episode"] + part["reward"] + part["hand_over"]) / AGENT_PROCESSES
    alone = scale * (part["write"] + part["advantages"])
    rows = {}
    for name, speed in SPEEDS.items():
        generating = EPISODES_A_STEP * part["policy_tokens"] / (speed * GPUS)
        training = EPISODES_A_STEP * part["tokens"] / (TRAIN_TOKENS * GPUS)
        step = generating + training
        rows[name] = {
            "step_s": round(step, 1),
            "ours_s": round(agents + alone, 2),
            "share": round((agents + alone) / (step + agents + alone), 4),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rounds = []
    for _ in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measured(asked.episodes, Path(folder) / "log"))
    part = {name: median(one[name] for one in rounds) for name in rounds[0]}
    each = {f"{name}_ms": round(1000 * part[name] / asked.episodes, 3)
            for name in ("episode", "reward", "hand_over", "write", "advantages")}  # fmt: skip
    about = {
        "format": 1, "episodes": asked.episodes, "rounds": asked.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "searches": SEARCHES, "tokens": round(part["tokens"]), "policy_tokens": round(part["policy_tokens"]),
        "bytes": round(part["bytes"]), "cpu_an_episode": each, "step_of": EPISODES_A_STEP,
        "agent_processes": AGENT_PROCESSES, "gpus": GPUS, "train_tokens_a_gpu": TRAIN_TOKENS,
        "shares": shares(part, asked.episodes),
    }  # fmt: skip
    RESULTS.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(about, indent=2))


if __name__ == "__main__":
    main()
