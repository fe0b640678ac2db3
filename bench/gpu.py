"""What one GPU does with a model: decoding, and delivery of weights to vLLM. Prints JSON lines.

    python bench/gpu.py [--models 0.5B 3B 7B DIRECTORY …] [--points decode …] > bench/results/gpu.jsonl
    python bench/gpu.py --smoke     # a small model on any device, to test this script

Each point is a process of its own that ends within two minutes. The points:

- parity: tokens and log-probs of eager decoding and of decoding in CUDA graphs, in float32.
- decode: milliseconds a decoding step, by the bound of the memory's bandwidth (a step reads all weights, and
  the keys and values of each row at its length), and the sampler's log-probs beside the trainer's. With the
  torch engine, eager and in graphs, and with vLLM.
- delivery: vLLM asleep, given other weights, and awake; its log-probs are then the trainer's again.

0.5B, 3B and 7B are Qwen2.5's shapes with random weights. Nothing is downloaded. Exits with 2 without CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)

import torch  # noqa: E402
from bench.speed.material import SMALL, random_model  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from srl.config import Config, load_config  # noqa: E402
from srl.config.sections import Model  # noqa: E402
from srl.models.weights import merged_weights  # noqa: E402
from srl.rollout.delivery import check_held, sampled  # noqa: E402
from srl.rollout.engine import Completion, Engine, Sampling  # noqa: E402
from srl.rollout.torch_engine import TorchEngine  # noqa: E402
from srl.rollout.vllm_engine import version_problem  # noqa: E402
from srl.train import load_components as load  # noqa: E402
from srl.train.memory import PUBLISHED, Shape, shape_of  # noqa: E402
from srl.trajectory import Question, Segment, Trajectory  # noqa: E402
from srl.update.batch import collate  # noqa: E402
from srl.update.logprobs import batched_stats  # noqa: E402

LIMIT_S = 120
SIZES = ("0.5B", "3B", "7B")
SETTINGS = {
    "model.lora_rank": 0, "rollout.max_num_seqs": 128, "rollout.max_turns": 1, "rollout.max_turn_tokens": 64,
    "data.max_response_length": 700,
}  # fmt: skip
"""What is set beside the preset `one-gpu`."""
SMOKE_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 128, "vocab_size": 5000,
}  # fmt: skip
PROMPT, WRITTEN = 300, 64
Prompts = Sequence[Sequence[int]]


def figure(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Subject:
    """A model with its configuration, on the device."""

    def __init__(self, name: str, smoke: bool, sets: dict[str, Any]) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        path = f"Qwen/Qwen2.5-{name}" if name in SIZES else name
        if smoke:
            torch.set_num_threads(1)
            PUBLISHED[path] = PUBLISHED.get(path, {}) | SMOKE_SIZES
        settings = {**SETTINGS, **sets, "model.device": self.device.type, "model.path": path}
        self.config: Config = load_config("one-gpu", None, "grpo", settings).config
        policy = random_policy if name in SIZES else load.load_policy
        self.policy: load.LoadedModel = policy(self.config.model, lambda text: None)
        self.policy.codec.eos_ids = frozenset()  # lengths are fixed
        self.shape: Shape = shape_of(self.config, path, needs_critic=False)
        self.bandwidth = bandwidth(self.device)

    def engine(self, name: str, rows: int) -> Engine:
        """`eager` and `graphs` are the torch engine's two ways to decode."""
        if name == "vllm":
            sets = {"rollout.engine": "vllm", "rollout.max_num_seqs": rows}
            return load.load_engine(self.config.with_settings(sets), self.policy, lambda text: None)
        return TorchEngine(
            self.policy.model, self.policy.codec, max_num_seqs=rows, graphs=name == "graphs",
            max_model_len=self.config.data.max_episode_tokens,
        )  # fmt: skip


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads and writes."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**25, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    for count in (1, 10):  # the first one warms up
        start = time.perf_counter()
        for _ in range(count):
            target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return 2 * len(source) * 10 / (time.perf_counter() - start)


def random_policy(section: Model, note: Any) -> load.LoadedModel:
    """Random weights of a published shape, made on the device, and a tokenizer of 4,096 pieces."""
    with tempfile.TemporaryDirectory() as folder:
        small = {"path": str(random_model(Path(folder), SMALL)), "lora_rank": 0}
        codec = load.load_policy(section.model_copy(update=small), note).codec
    sizes, dtype = AutoConfig.for_model(**PUBLISHED[str(section.path)]), getattr(torch, section.dtype)
    with torch.device(section.device):
        return load.LoadedModel(AutoModelForCausalLM.from_config(sizes, dtype=dtype).eval(), codec)


@contextmanager
def measured(seconds: dict[str, float], name: str) -> Iterator[None]:
    """The seconds of what is inside."""
    began = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[name] = time.perf_counter() - began


def prompts(count: int) -> list[list[int]]:
    """As many prompts of `PROMPT` random ids."""
    draws = torch.Generator().manual_seed(0)
    return torch.randint(100, 4000, (count, PROMPT), generator=draws).tolist()


def turns(engine: Engine, prompts: Prompts, tokens: int) -> tuple[float, list[Completion]]:
    """Seconds of one turn of `tokens` for every prompt, all together, and the turns."""

    async def every() -> list[Completion]:
        each = [
            engine.generate(str(row), ids, Sampling(tokens, key=(row,))) for row, ids in enumerate(prompts)
        ]
        return await asyncio.gather(*each)

    began = time.perf_counter()
    completions = asyncio.run(every())
    seconds = time.perf_counter() - began
    engine.reset()
    return seconds, completions


def distance(subject: Subject, prompts: Prompts, completions: Sequence[Completion]) -> dict[str, float]:
    """How far the sampler's log-probs are from the trainer's, of the same tokens."""
    rows = [
        Trajectory(Question(str(row), "", ()), [
            Segment("prompt", tuple(ids), "", 0), Segment("policy", turn.token_ids, "", 0, turn.logprobs),
        ])
        for row, (ids, turn) in enumerate(zip(prompts, completions, strict=True))
    ]  # fmt: skip
    batch = collate(rows).to(subject.device)
    ours = batched_stats(subject.policy.model, batch, batch.response_mask, max_tokens=16384).logprobs
    assert batch.sampler_logprobs is not None, "the completions have them"
    apart = (ours - batch.sampler_logprobs).abs()[batch.response_mask != 0]
    return {"logprobs_apart": float(apart.mean()), "logprobs_apart_most": float(apart.max())}


def parity(subject: Subject, engine: str, rows: Sequence[int]) -> None:
    """Rows of different length, so that they share no width, through both ways of decoding."""
    uneven = [ids[: PROMPT - 7 * row] for row, ids in enumerate(prompts(min(max(rows), 32)))]
    ways = [turns(subject.engine(name, len(uneven)), uneven, WRITTEN)[1] for name in ("eager", "graphs")]
    pairs = list(zip(*ways, strict=True))
    same = [a == b for eager, graphs in pairs for a, b in zip(eager.token_ids, graphs.token_ids, strict=True)]
    gaps = [
        abs(a - b) for eager, graphs in pairs if eager.token_ids == graphs.token_ids
        for a, b in zip(eager.logprobs, graphs.logprobs, strict=True)
    ]  # fmt: skip
    figure(same_tokens=sum(same) / len(same), tokens=len(same), logprob_gap=max(gaps, default=None))


def decode(subject: Subject, engine: str, rows: Sequence[int]) -> None:
    """The first turns warm up: vLLM compiles, graphs are captured. A step is what more tokens take."""
    if engine == "vllm" and (problem := version_problem()):
        figure(engine=engine, left_out=problem)
        return
    shape, began = subject.shape, time.perf_counter()
    samples = subject.engine(engine, max(rows))
    turns(samples, prompts(max(rows)), WRITTEN)
    figure(engine=engine, ready_s=time.perf_counter() - began)
    for count in rows:
        batch = prompts(count)
        turns(samples, batch, WRITTEN)
        first, (whole, completions) = turns(samples, batch, 1)[0], turns(samples, batch, WRITTEN)
        seconds = (whole - first) / (WRITTEN - 1)
        read = shape.parameters * shape.itemsize + count * (PROMPT + WRITTEN / 2) * shape.kv_bytes
        figure(engine=engine, rows=count, ms_a_step=1000 * seconds, tokens_a_s=count / seconds,
               of_bandwidth_bound=read / subject.bandwidth / seconds)  # fmt: skip
    figure(engine=engine, **distance(subject, batch, completions))


def delivery(subject: Subject, engine: str, rows: Sequence[int]) -> None:
    """Weights are scaled by up to 2%: with the old ones the log-probs would be far apart."""
    if problem := version_problem():
        figure(left_out=problem)
        return
    model, seconds = subject.policy.model, dict[str, float]()
    batch, samples = prompts(min(rows)), subject.engine("vllm", min(rows))
    figure(weights="first", **distance(subject, batch, turns(samples, batch, WRITTEN)[1]))
    with measured(seconds, "sleep"):
        samples.sleep()
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.02 * torch.rand_like(weight))
    with measured(seconds, "sync"):
        sent: dict[str, Any] = {}
        samples.sync(sampled(merged_weights(model), sent))
    with measured(seconds, "wake"):
        samples.wake()
    check_held(sent, samples.digests(sent))
    after = turns(samples, batch, WRITTEN)[1]
    figure(weights="delivered", seconds=seconds, free_asleep=free, **distance(subject, batch, after))


POINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "parity": (parity, {"model.dtype": "float32"}),
    "decode": (decode, {}),
    "delivery": (delivery, {}),
}
"""The function of each point, and what it sets."""
ENGINES = ("eager", "graphs", "vllm")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--models", nargs="+", default=list(SIZES))
    parser.add_argument("--points", nargs="+", choices=list(POINTS), default=list(POINTS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rows", nargs="+", type=int, help="of parity and decode; default: 128 64 32")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke:
        print("bench/gpu.py: no CUDA device here (--smoke runs a small shape)", file=sys.stderr)
        return 2
    rows = arguments.rows or ([4, 2] if arguments.smoke else [128, 64, 32])
    for model, point in product(arguments.models, arguments.points):
        for engine in arguments.engines if point == "decode" else arguments.engines[:1]:
            if arguments.here:
                work, sets = POINTS[point]
                work(Subject(model, arguments.smoke, sets), engine, rows)
            else:
                figure(model=model, point=point)
                in_a_process(model, point, engine, rows, arguments.smoke)
    return 0


def in_a_process(model: str, point: str, engine: str, rows: Sequence[int], smoke: bool) -> None:
    """A point in a new process, which frees all of its memory; a failure is a figure, with its last line."""
    command = [
        sys.executable, __file__, "--here", "--models", model, "--points", point, "--engines", engine,
        "--rows", *map(str, rows), *(["--smoke"] if smoke else []),
    ]  # fmt: skip
    try:
        subprocess.run(command, timeout=LIMIT_S, check=True, stderr=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        figure(failed=f"no end within {LIMIT_S} s")
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        figure(failed=error.stderr.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
