"""How fast episodes are generated: the engine, against `transformers.generate` starting over each turn.

128 episodes of two to four turns, 45 tokens of the policy's and observations of about 60 tokens, on a
Qwen2 of 4 layers and width 128. Turn lengths are fixed beforehand, so both do the same work; searches
take no time. Writes results/rollout.json beside this file.

    python bench/rollout.py --threads 1 --repeats 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from srl.model import count_parameters, new_model
from srl.rollout.codec import Codec
from srl.rollout.engine import Engine, Sampling
from srl.rollout.torch_engine import TorchEngine

VOCABULARY, EPISODES, GROUP = 659, 128, 8


@dataclass(frozen=True)
class EpisodePlan:
    """One simulated episode: its prompt, the tokens of each turn, and the observations between them."""

    name: str
    prompt: list[int]
    turns: list[int]
    observations: list[list[int]]


def make_plans(seed: int) -> list[EpisodePlan]:
    """The episodes of a rollout, in groups that share a prompt."""
    rng = np.random.default_rng(seed)
    plans = []
    for index in range(EPISODES):
        if index % GROUP == 0:
            prompt = rng.integers(2, VOCABULARY, rng.integers(15, 26)).tolist()
        turns = rng.integers(8, 23, rng.integers(2, 5)).tolist()
        observations = [rng.integers(2, VOCABULARY, rng.integers(40, 81)).tolist() for _ in turns[1:]]
        plans.append(EpisodePlan(f"{seed}/{index}", prompt, turns, observations))
    return plans


def codec() -> Codec:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    return Codec(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0"))))


async def _episode(plan: EpisodePlan, engine: Engine) -> None:
    ids = list(plan.prompt)
    for turn, length in enumerate(plan.turns):
        sampling = Sampling(max_tokens=length, key=(plan.name, turn), stop=("</search>",))
        ids += (await engine.generate(plan.name, ids, sampling)).token_ids
        if turn < len(plan.observations):
            ids += plan.observations[turn]
    engine.finish(plan.name)


def run_engine(engine: Engine, plans: list[EpisodePlan]) -> None:
    async def main() -> None:
        await asyncio.gather(*(_episode(plan, engine) for plan in plans))

    asyncio.run(main())
    engine.reset()


def run_generate(model: Any, plans: list[EpisodePlan]) -> None:
    """All episodes that have a turn left go through one call, padded on the left, for every turn."""
    contexts = [list(plan.prompt) for plan in plans]
    for turn in range(max(len(plan.turns) for plan in plans)):
        live = [index for index, plan in enumerate(plans) if turn < len(plan.turns)]
        width = max(len(contexts[index]) for index in live)
        ids = torch.zeros((len(live), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(live):
            ids[row, width - len(contexts[index]) :] = torch.tensor(contexts[index])
            mask[row, width - len(contexts[index]) :] = 1
        longest = max(plans[index].turns[turn] for index in live)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0)
        for row, index in enumerate(live):
            contexts[index] += out[row, width : width + plans[index].turns[turn]].tolist()
            if turn < len(plans[index].observations):
                contexts[index] += plans[index].observations[turn]


Way = Callable[[list[EpisodePlan]], None]


def measure(ways: dict[str, Way], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, processor) seconds of each way for each of `repeats` rollouts, after one to warm up.

    The ways take turns, so that whatever else the machine does hits all of them.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for seed in range(repeats + 1):
        for name, run in ways.items():
            plans, wall, processor = make_plans(seed), time.perf_counter(), time.process_time()
            run(plans)
            if seed > 0:
                times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return times


def summary(times: dict[str, list[tuple[float, float]]], baseline: str) -> dict[str, dict[str, float]]:
    """Medians; `speed-up` is the median over rollouts of the baseline's wall time by this one's."""
    tokens = median(sum(sum(plan.turns) for plan in make_plans(seed)) for seed in range(1, 6))
    table = {}
    for name, seconds in times.items():
        wall = median(pair[0] for pair in seconds)
        ratios = [theirs[0] / ours[0] for ours, theirs in zip(seconds, times[baseline], strict=True)]
        table[name] = {
            "seconds": round(wall, 3),
            "fastest_seconds": round(min(pair[0] for pair in seconds), 3),
            "processor_seconds": round(median(pair[1] for pair in seconds), 3),
            "policy_tokens_per_s": round(tokens / wall),
            "speed-up": round(median(ratios), 2),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = new_model("qwen2", vocab_size=VOCABULARY, layers=4, width=128, heads=4, ffn=256, pad_token_id=0)
    ways: dict[str, Way] = {"transformers.generate": lambda plans: run_generate(model, plans)}
    for name, deterministic in (("engine", False), ("engine, deterministic", True)):
        engine = TorchEngine(
            model, codec(), max_num_seqs=EPISODES, max_model_len=512, deterministic=deterministic
        )
        ways[name] = lambda plans, engine=engine: run_engine(engine, plans)
    result = {
        "shape": {"episodes": EPISODES, "parameters": count_parameters(model), "vocabulary": VOCABULARY},
        "threads": arguments.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rollouts": arguments.repeats,
        "results": summary(measure(ways, arguments.repeats), "transformers.generate"),
    }
    path = Path(__file__).parent / "results" / "rollout.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
