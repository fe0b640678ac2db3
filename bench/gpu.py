"""What one GPU does with a model: decoding, delivery of weights, steps of GRPO. Prints JSON lines.

    python bench/gpu.py [--models 0.5B 3B 7B DIRECTORY …] [--points decode …] > bench/results/gpu.jsonl
    python bench/gpu.py --smoke     # a small model on any device, to test this script

Each point is a process of its own that ends within two minutes. The points:

- parity: tokens and log-probs of eager decoding and of decoding in CUDA graphs, in float32.
- decode: milliseconds a decoding step, by the bound of the memory's bandwidth (a step reads all weights, and
  the keys and values of each row at its length), and the sampler's log-probs beside the trainer's. With the
  torch engine, eager and in graphs, and with vLLM.
- delivery: vLLM asleep, given other weights, and awake; its log-probs are then the trainer's again.
- step: GRPO as `--preset one-gpu` at 0.5B and 7B, with all weights at 3B (80 GB): seconds, memory beside the
  plan, the rollout by the bandwidth's bound and the update by the speed of matrix products.

0.5B, 3B and 7B are Qwen2.5's shapes with random weights: every episode writes all its turns to the cap, and
every other one is rewarded. Nothing is downloaded. Exits with 2 without CUDA.
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
from dataclasses import asdict, dataclass, replace
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
from srl.data.world import make_world, questions  # noqa: E402
from srl.models.load import recompute_layers  # noqa: E402
from srl.models.weights import add_lora, merged_weights  # noqa: E402
from srl.protocol import template  # noqa: E402
from srl.rollout.delivery import check_held, sampled  # noqa: E402
from srl.rollout.engine import Completion, Engine, Sampling  # noqa: E402
from srl.rollout.environment import Environment, Key  # noqa: E402
from srl.rollout.torch_engine import TorchEngine  # noqa: E402
from srl.rollout.vllm_engine import version_problem  # noqa: E402
from srl.train import load_components as load  # noqa: E402
from srl.train import rl  # noqa: E402
from srl.train.memory import PUBLISHED, Layout, Shape, footprint, shape_of, total  # noqa: E402
from srl.trajectory import Question, Score, Search, Segment, Trajectory  # noqa: E402
from srl.update.actor import update_actor  # noqa: E402
from srl.update.batch import collate  # noqa: E402
from srl.update.logprobs import batched_stats  # noqa: E402

LIMIT_S = 120
WHOLE = {"model.lora_rank": 0, "actor.use_kl_loss": False, "actor.optim.lr": 1e-6}
SIZES: dict[str, dict[str, Any]] = {"0.5B": {}, "3B": WHOLE, "7B": {}}
"""What each size sets beside the preset `one-gpu`; LoRA but at 3B, which trains all weights."""
SHORT = {
    "data.train_batch_size": 16, "actor.ppo_mini_batch_size": 16, "rollout.max_num_seqs": 128,
    "rollout.max_turns": 1, "rollout.max_turn_tokens": 64, "data.max_response_length": 700,
}  # fmt: skip
SMOKE = {"data.train_batch_size": 2, "actor.ppo_mini_batch_size": 1, "rollout.n": 2}
SMOKE_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 128, "vocab_size": 5000,
}  # fmt: skip
PROMPT, WRITTEN, STEPS = 300, 64, 3
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
        own = {**SIZES.get(name, {}), **SHORT, **(SMOKE if smoke else {}), **sets}
        settings = {**own, "model.device": self.device.type, "model.path": path}
        self.config: Config = load_config("one-gpu", None, "grpo", settings).config
        policy = random_policy if name in SIZES else load.load_policy
        self.policy: load.LoadedModel = policy(self.config.model, lambda text: None)
        self.policy.codec.eos_ids = frozenset()  # lengths are fixed
        self.shape: Shape = shape_of(self.config, path, needs_critic=False)
        self.speed: DeviceSpeed = device_speed(self.shape, self.device, self.policy.model.dtype)

    def engine(self, name: str, rows: int) -> Engine:
        """`eager` and `graphs` are the torch engine's two ways to decode."""
        if name == "vllm":
            sets = {"rollout.engine": "vllm", "rollout.max_num_seqs": rows}
            return load.load_engine(self.config.with_settings(sets), self.policy, lambda text: None)
        return TorchEngine(
            self.policy.model, self.policy.codec, max_num_seqs=rows, graphs=name == "graphs",
            max_model_len=self.config.data.max_episode_tokens,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Operations a second in matrix products of the model's width, and bytes a second read and written."""

    operations: float
    bandwidth: float


def device_speed(shape: Shape, device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    on_gpu = device.type == "cuda"
    rows = 16384 if on_gpu else 64
    left = torch.ones(rows, shape.width, device=device, dtype=dtype)
    right = torch.ones(shape.width, shape.ffn, device=device, dtype=dtype)
    source = torch.zeros(2**30 if on_gpu else 2**25, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def seconds(work: Any) -> float:
        """Mean of ten calls after one to warm up."""
        for count in (1, 10):
            start = time.perf_counter()
            for _ in range(count):
                work()
            if on_gpu:
                torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / 10

    product = seconds(lambda: left @ right)
    copy = seconds(lambda: target.copy_(source))
    return DeviceSpeed(2 * rows * shape.width * shape.ffn / product, 2 * len(source) / copy)


def random_policy(section: Model, note: Any) -> load.LoadedModel:
    """Random weights of a published shape, made on the device, and a tokenizer of 4,096 pieces."""
    with tempfile.TemporaryDirectory() as folder:
        small = {"path": str(random_model(Path(folder), SMALL)), "lora_rank": 0}
        codec = load.load_policy(section.model_copy(update=small), note).codec
    sizes, dtype = AutoConfig.for_model(**PUBLISHED[str(section.path)]), getattr(torch, section.dtype)
    with torch.device(section.device):
        model = AutoModelForCausalLM.from_config(sizes, dtype=dtype).eval()
    if section.lora_rank:
        add_lora(model, section.lora_rank, section.lora_alpha, section.lora_target_modules)
    recompute_layers(model)
    return load.LoadedModel(model, codec)


@contextmanager
def measured(seconds: dict[str, float], peaks: dict[str, int], name: str) -> Iterator[None]:
    """Seconds and, on a GPU, the most memory that tensors take inside."""
    if cuda := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    yield
    if cuda:
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated()
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
               of_bandwidth_bound=read / subject.speed.bandwidth / seconds)  # fmt: skip
    figure(engine=engine, **distance(subject, batch, completions))


def delivery(subject: Subject, engine: str, rows: Sequence[int]) -> None:
    """Weights are scaled by up to 2%: with the old ones the log-probs would be far apart."""
    if problem := version_problem():
        figure(left_out=problem)
        return
    model, seconds, peaks = subject.policy.model, dict[str, float](), dict[str, int]()
    batch, samples = prompts(min(rows)), subject.engine("vllm", min(rows))
    figure(weights="first", **distance(subject, batch, turns(samples, batch, WRITTEN)[1]))
    with measured(seconds, peaks, "sleep"):
        samples.sleep()
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.02 * torch.rand_like(weight))
    with measured(seconds, peaks, "sync"):
        sent: dict[str, Any] = {}
        samples.sync(sampled(merged_weights(model), sent))
    with measured(seconds, peaks, "wake"):
        samples.wake()
    check_held(sent, samples.digests(sent))
    after = turns(samples, batch, WRITTEN)[1]
    figure(weights="delivered", seconds=seconds, free_asleep=free, **distance(subject, batch, after))


class NoSearch:
    """Random weights do not ask."""

    async def search(self, query: str) -> Search:
        return Search(query, status="empty")


def step(subject: Subject, engine: str, rows: Sequence[int]) -> None:
    """The product's step: rollout, log-probs, advantages, update, weights. The first two capture graphs."""
    config, policy, prompt = subject.config, subject.policy, template("search-r1")
    samples = load.load_engine(config, policy, lambda text: None)
    learner = rl.load_learner(config, policy, rl.samples_as_trained(samples, policy.model))
    optimiser = rl.load_optimisers(config, learner)["actor"]
    batch = questions(make_world("train", 0), "train", 0, config.data.train_batch_size)
    batch = [replace(question, prompt=prompt.messages(question.text)) for question in batch]
    for number in range(1, STEPS + 1):
        seconds, peaks = dict[str, float](), dict[str, int]()
        with measured(seconds, peaks, "rollout"):
            episodes = asyncio.run(
                Environment(policy.codec, prompt, load.episode_options(config), NoSearch()).play_all(
                    samples, batch, Key(step=number), config.rollout.n
                )
            )
        samples.sleep()
        with measured(seconds, peaks, "logprobs"):
            scores = [Score(float(index % 2)) for index in range(len(episodes))]
            experience, _ = rl.make_experience(learner, episodes, scores)
        with measured(seconds, peaks, "update"):
            update_actor(
                policy.model, optimiser, experience, loss=rl.loss_settings(config, learner.correction),
                max_tokens=config.actor.ppo_max_token_len,
                mini_batch_rows=config.actor.ppo_mini_batch_size * config.rollout.n,
            )  # fmt: skip
        with measured(seconds, peaks, "weights"):
            if not samples.same_weights:
                samples.sync(merged_weights(policy.model))
            samples.wake()
        figure(step=number, engine=type(samples).__name__, seconds=seconds, peak_bytes=peaks,
               episodes=len(episodes), **bounds(subject, episodes, seconds))  # fmt: skip
    plan = footprint(subject.shape, config, Layout(cpu=subject.device.type == "cpu"))
    planned = {"rollout": total(plan, "rollout"), "update": total(plan, "update")}
    figure(planned_bytes=planned, device=asdict(subject.speed))


def bounds(subject: Subject, episodes: Sequence[Trajectory], seconds: dict[str, float]) -> dict[str, float]:
    """The parts of a step by what the device can do.

    A decoding step reads all weights, and the keys and values of each row at its length then. The operations
    of the update are its matrix products', none recomputed: 6 a trained weight and token, 4 a frozen one.
    """
    shape, speed, masks = subject.shape, subject.speed, [episode.response_mask for episode in episodes]
    written, rows = sum(map(sum, masks)), min(subject.config.rollout.max_num_seqs, len(episodes))
    places = sum(place for mask in masks for place, mine in enumerate(mask) if mine)
    read = shape.parameters * shape.itemsize * written / rows + places * shape.kv_bytes
    attention = 6 * shape.layers * shape.heads * shape.head_dim * sum(len(mask) ** 2 for mask in masks)
    weights = shape.body * sum(map(len, masks)) + shape.vocabulary * shape.width * written
    operations = (4 if shape.adapter else 6) * weights + attention
    return {
        "written": written,
        "rollout_of_bandwidth_bound": read / speed.bandwidth / seconds["rollout"],
        "update_of_peak_operations": operations / speed.operations / seconds["update"],
    }


POINTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "parity": (parity, {"model.dtype": "float32", "model.lora_rank": 0}),
    "decode": (decode, {"model.lora_rank": 0}),
    "delivery": (delivery, {"model.lora_rank": 0}),
    "step": (step, {}),
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
