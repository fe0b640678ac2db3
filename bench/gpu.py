"""GRPO on one GPU at 0.5B, 3B and 7B: steps with random weights, compared with the plan and the device.

    python bench/gpu.py [--models 0.5B 3B 7B] [--steps 3] [--out bench/results/gpu.json]
    python bench/gpu.py --smoke     # a small model on any device, to test this script; writes nothing

Models of Qwen2.5's shapes with random weights, byte-level BPE trained here on the made-up world's pages. 0.5B
and 7B with LoRA as in `srl train --preset one-gpu`, 3B with all weights (80 GB). Nothing is downloaded.
Random weights neither search nor answer: every episode writes all its turns to the cap, and every other one
is rewarded. So there is more decoding than in a real run and less reading, the same in every run; the plan's
arithmetic is given the lengths that came about. `shares` has the decoded tokens a second by what the memory's
bandwidth allows, and the update's operations a second by those of matrix products alone, both measured here.

Needs torch, transformers, tokenizers, peft, numpy, pydantic, PyYAML and pluggy, and this repository's
`src` and `plugins/algos/grpo/src`, which it finds by itself: srl need not be installed. Exits with 2 where
there is no CUDA.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "plugins" / "algos" / "grpo" / "src")]

import torch  # noqa: E402
import transformers  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from srl.config.keys import Config  # noqa: E402
from srl.config.load import (  # noqa: E402
    build,
    defaults,
    flatten,
    put,
    read_layers,
)
from srl.data.world import make_world, questions  # noqa: E402
from srl.model import add_lora, new_model, recompute_layers  # noqa: E402
from srl.protocol import template  # noqa: E402
from srl.rollout.codec import Codec  # noqa: E402
from srl.rollout.engine import Engine  # noqa: E402
from srl.rollout.episode import EpisodeOptions  # noqa: E402
from srl.rollout.many_episodes import rollout  # noqa: E402
from srl.rollout.torch_engine import TorchEngine  # noqa: E402
from srl.train.dry_run.memory import Layout, footprint  # noqa: E402
from srl.train.dry_run.model_size import PUBLISHED, Shape, shape_of  # noqa: E402
from srl.train.dry_run.step_time import DeviceSpeed, EpisodeTokens, measure, step_times  # noqa: E402
from srl.train.experience import Learner, make_experience  # noqa: E402
from srl.trajectory import Question, Score, Search, Trajectory  # noqa: E402
from srl.update.actor import ActorLoss, update_actor  # noqa: E402
from srl.update.kl import kl_controller  # noqa: E402
from srl.update.optimiser import Optimiser  # noqa: E402
from srl_grpo.estimator import algorithm  # noqa: E402

FEWER = {"data.train_batch_size": 16, "actor.ppo_mini_batch_size": 16, "rollout.max_num_seqs": 80}
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": {},
    "3B": {"model.lora_rank": 0, "actor.use_kl_loss": False, "actor.optim.lr": 1e-6, **FEWER},
    "7B": FEWER,
}
"""What each size sets beside the preset `one-gpu`; LoRA but at 3B, which trains all weights."""
SMOKE_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 5000,
}  # fmt: skip
SMOKE = {
    "data.train_batch_size": 2, "actor.ppo_mini_batch_size": 1, "rollout.n": 2, "rollout.max_num_seqs": 4,
    "rollout.max_turn_tokens": 8, "data.max_response_length": 300,
}  # fmt: skip


class NoSearch:
    """Answers with nothing; random weights do not ask."""

    async def search(self, query: str) -> Search:
        return Search(query, status="empty")


@dataclass
class Step:
    """Seconds, tokens and the most memory that tensors took in one step."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    written_tokens: int = 0
    written_tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Bench:
    """All that the steps share."""

    config: Config
    engine: Engine
    codec: Codec
    learner: Learner
    optimiser: Optimiser
    asked: Sequence[Question]


def preset() -> Config:
    """`srl train --preset one-gpu`, without asking the installed packages for their plugins."""
    state = defaults()
    for entry in flatten(algorithm().defaults, lambda path: "algorithm grpo"):
        put(state, entry)
    for layer in read_layers("one-gpu", None):
        for entry in layer.for_algorithm("grpo"):
            put(state, entry)
    return build(state)


def new_codec() -> Codec:
    """Byte-level BPE of 4,096 pieces, trained on the world's pages and the prompt."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    pages = [page.contents for page in make_world("train", 0).passages()]
    made.train_from_iterator([*pages, *[template("search-r1").prompt] * 20], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")
    return Codec(fast)


def prepare(config: Config, sizes: dict[str, Any], device: torch.device) -> Bench:
    """The model with its adapter on the device, the engine, the optimiser and the questions."""
    settings = config.model
    made: Any = new_model(
        "qwen2", vocab_size=sizes["vocab_size"], layers=sizes["num_hidden_layers"],
        width=sizes["hidden_size"], heads=sizes["num_attention_heads"], ffn=sizes["intermediate_size"],
        kv_heads=sizes["num_key_value_heads"], max_length=sizes["max_position_embeddings"],
    )  # fmt: skip
    model = made.to(device, torch.bfloat16)
    if settings.lora_rank:
        add_lora(model, settings.lora_rank, settings.lora_alpha, settings.lora_target_modules)
    recompute_layers(model)
    codec = new_codec()
    engine = TorchEngine(
        model,
        codec,
        max_num_seqs=config.rollout.max_num_seqs,
        max_model_len=config.data.max_episode_tokens,
    )
    learner = Learner(config, algorithm(), model, None, None, kl_controller("fixed", 0.0, 1.0, 1))
    count, prompt = config.data.train_batch_size, template("search-r1")
    asked = questions(make_world("train", 0), "train", 0, count)
    asked = [replace(item, prompt=prompt.messages(item.text)) for item in asked]
    optimiser = Optimiser(model.parameters(), lr=config.actor.optim.lr)
    return Bench(config, engine, codec, learner, optimiser, asked)


def options_of(config: Config) -> EpisodeOptions:
    names = ("max_turns", "max_turn_tokens", "max_obs_length", "min_answer_tokens")
    budgets = {name: getattr(config.rollout, name) for name in names}
    limits = {name: getattr(config.data, name) for name in ("max_prompt_length", "max_response_length")}
    return EpisodeOptions(**budgets, **limits)


@contextmanager
def measured(step: Step, name: str, device: torch.device) -> Iterator[None]:
    """Seconds and peak memory of what happens inside."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        step.peak_bytes[name] = torch.cuda.max_memory_allocated(device)
    step.seconds[name] = time.perf_counter() - start


def run_step(bench: Bench, number: int) -> tuple[Step, list[Trajectory]]:
    """One step of GRPO: rollout, log-probs and advantages, update."""
    config, model, device = bench.config, bench.learner.actor, bench.learner.device
    step, actor = Step(), config.actor
    with measured(step, "rollout", device):
        trajectories = asyncio.run(
            rollout(
                bench.asked, bench.engine, NoSearch(), codec=bench.codec,
                template=template("search-r1"), options=options_of(config), n=config.rollout.n, step=number,
            )
        )  # fmt: skip
    bench.engine.reset()
    scores = [Score(float(index % 2)) for index in range(len(trajectories))]
    with measured(step, "logprobs", device):
        experience, _ = make_experience(bench.learner, trajectories, scores)
    loss = ActorLoss(kl_loss_coef=actor.kl_loss_coef, kl_loss_type=actor.kl_loss_type)
    with measured(step, "update", device):
        update_actor(
            model, bench.optimiser, experience, loss=loss, max_tokens=actor.ppo_max_token_len,
            mini_batch_rows=actor.ppo_mini_batch_size * config.rollout.n,
        )  # fmt: skip
    step.written_tokens = sum(item.policy_tokens for item in trajectories)
    step.written_tokens_per_s = step.written_tokens / step.seconds["rollout"]
    return step, trajectories


def lengths_of(trajectories: Sequence[Trajectory]) -> EpisodeTokens:
    """The tokens of a mean episode."""
    count, total = len(trajectories), sum(len(item.token_ids) for item in trajectories)
    prompts = sum(len(item.segments[0].token_ids) for item in trajectories)
    written = sum(item.policy_tokens for item in trajectories)
    return EpisodeTokens(prompts // count, written // count, (total - prompts - written) // count)


def shares(
    config: Config, shape: Shape, speed: DeviceSpeed, lengths: EpisodeTokens, step: Step
) -> dict[str, float]:
    """Decoded tokens a second by the bandwidth's bound, and the update's operations a second by the peak.

    A decoding step reads all weights and the keys and values of its rows. The update's operations are those
    of its matrix products, none recomputed: 6 a trained weight and token, 4 a frozen one.
    """
    episodes = config.data.train_batch_size * config.rollout.n
    rows = min(config.rollout.max_num_seqs, episodes)
    read = shape.parameters * shape.itemsize + rows * lengths.episode * shape.kv_bytes
    head = shape.vocabulary * shape.width
    attention = 2 * shape.layers * shape.heads * shape.head_dim * lengths.episode**2
    per_weight = 6 if shape.adapter == 0 else 4
    trained = per_weight * (shape.body * lengths.episode + head * lengths.written) + 3 * attention
    return {
        "decode_of_bandwidth_bound": step.written_tokens_per_s / (rows * speed.bandwidth / read),
        "update_of_peak_operations": episodes * trained / step.seconds["update"] / speed.operations,
    }


def predicted(
    config: Config, shape: Shape, speed: DeviceSpeed, lengths: EpisodeTokens, device: torch.device
) -> dict[str, Any]:
    """What the plan says of a step with these lengths."""
    memory = footprint(shape, config, Layout("local", cpu=device.type == "cpu"))
    found = step_times(shape, config, speed, lengths)
    seconds = {"rollout": found.rollout_s, "logprobs": found.logprobs_s, "update": found.update_s}
    peaks = {"rollout": memory.rollout, "update": memory.update}
    return {"seconds": seconds, "peak_bytes": peaks, "speed": asdict(speed), "lengths": asdict(lengths)}


def run(config: Config, model: str, sizes: dict[str, Any], steps: int) -> dict[str, Any]:
    """The steps of one model, the plan beside them, and their shares of what the device can do."""
    device = torch.device(config.model.device)
    PUBLISHED[model] |= sizes
    bench = prepare(config, PUBLISHED[model], device)
    done = []
    for number in range(1, steps + 1):
        step, trajectories = run_step(bench, number)
        done.append(step)
        print(f"{model}, step {number}: {json.dumps(asdict(step))}", file=sys.stderr)
    shape = shape_of(config, model, needs_critic=False)
    speed, lengths = measure(shape, device, torch.bfloat16), lengths_of(trajectories)
    return {
        "episodes": config.data.train_batch_size * config.rollout.n, "shape": asdict(shape),
        "steps": [asdict(step) for step in done],
        "shares": shares(config, shape, speed, lengths, done[-1]),
        "predicted": predicted(config, shape, speed, lengths, device),
    }  # fmt: skip


def run_models(names: Sequence[str], steps: int, smoke: bool) -> dict[str, Any]:
    """Each model in turn; one that does not fit says so, and the others go on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for name in names:
        settings = {**MODELS[name], "model.device": device.type, **(SMOKE if smoke else {})}
        config = preset().with_settings(settings)
        try:
            found[name] = run(config, f"Qwen/Qwen2.5-{name}", SMOKE_SIZES if smoke else {}, steps)
        except torch.OutOfMemoryError as error:
            found[name] = {"out_of_memory": str(error).partition("\n")[0]}
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__, "transformers": transformers.__version__, "models": found,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.smoke:
        print(
            "bench/gpu.py: no CUDA device here; nothing was measured (--smoke runs a small shape)",
            file=sys.stderr,
        )
        return 2
    found = run_models(arguments.models, arguments.steps, arguments.smoke)
    text = json.dumps(found, indent=2) + "\n"
    if not arguments.smoke:
        arguments.out.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
