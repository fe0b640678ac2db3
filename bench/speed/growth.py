"""How time and peak memory grow with episodes, turns, tokens and vocabulary, in rollout and update.

Small widths, one thread, one process for each size. The exponent is the slope of a line through the
logarithms: 1 is linear. Memory is the peak above what the process had when it was loaded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.speed.harness import Entry, Options, Rounds, one_by_one, peak_mib, round_off


@dataclass(frozen=True, slots=True)
class Size:
    episodes: int = 32
    turns: int = 2
    tokens: int = 512
    """Of an episode: half written by the policy, half read."""
    vocabulary: int = 4096


AXES: dict[str, Sequence[int]] = {
    "episodes": (32, 64, 128, 256, 512),
    "turns": (1, 2, 4, 8),
    "tokens": (128, 256, 512, 1024, 2048),
    "vocabulary": (1024, 8192, 32768, 152064),
}


def parts(size: Size) -> tuple[int, int]:
    """Tokens that a turn writes, and that it reads after it."""
    written = max(1, size.tokens // (2 * size.turns))
    return written, written


def model_and_config(options: Options, size: Size) -> tuple[Any, Any]:
    from bench.speed.material import settings_of

    from srl.model import new_model
    from srl.rollout.codec import Codec
    from srl.train.load_components import LoadedModel, load_codec

    config = settings_of("real", options, {
        "rollout.max_num_seqs": min(size.episodes, 128), "data.max_prompt_length": 64,
        "data.max_response_length": size.tokens + 64, "actor.ppo_max_token_len": 4096,
    })  # fmt: skip
    model = new_model("llama", vocab_size=size.vocabulary, layers=2, width=128, heads=4, kv_heads=2, ffn=256,
                      max_length=4096)  # fmt: skip
    codec: Codec = load_codec(config.model, None, lambda text: None)
    codec.eos_ids = frozenset()
    return LoadedModel(model, codec), config


def trajectories(size: Size) -> list[Any]:
    from srl.trajectory import Question, Segment, Trajectory

    written, read = parts(size)
    found = []
    for index in range(size.episodes):
        segments = [Segment("prompt", tuple(range(3, 19)), "", 0)]
        for turn in range(size.turns):
            ids = tuple(
                (7 * index + 13 * place + turn) % (size.vocabulary - 3) + 3 for place in range(written)
            )
            segments.append(Segment("policy", ids, "", turn, (-2.0,) * written))
            if turn + 1 < size.turns:
                segments.append(Segment("observation", ids[:read], "", turn))
        found.append(Trajectory(Question(f"q{index // 4}", "", ("x",)), segments, sample=index % 4))
    return found


def rollout(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    from bench.speed.rollout import loaded_engine

    from srl.rollout.engine import Sampling

    size = Size(**settings)
    policy, config = model_and_config(options, size)
    engine = loaded_engine(config, policy)
    written, read = parts(size)

    async def episode(index: int) -> None:
        ids = list(range(3, 19)) if index % 4 else [*range(3, 18), 3 + index]
        for turn in range(size.turns):
            key = (str(index), turn)
            ids += (await engine.generate(f"e{index}", ids, Sampling(written, key=key))).token_ids
            ids += range(3, 3 + read) if read < size.vocabulary - 3 else [3] * read
        engine.finish(f"e{index}")

    async def every(count: int) -> None:
        await asyncio.gather(*map(episode, range(count)))

    asyncio.run(every(2))
    engine.reset()
    measure(lambda: asyncio.run(every(size.episodes)), rounds)


def update(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    """Log-probs and the update of one step."""
    from srl.train.experience import make_experience
    from srl.train.load_components import load_learner, load_optimisers
    from srl.train.local_backend import LocalTrainer
    from srl.trajectory import Score

    size = Size(**settings)
    policy, config = model_and_config(options, size)
    learner = load_learner(config, policy)
    nothing: Any = None
    trainer = LocalTrainer(config, Path(options.cache), nothing, learner, load_optimisers(config, learner))

    def step(done: list[Any]) -> None:
        experience, _ = make_experience(
            learner, done, [Score(float(place % 2)) for place in range(len(done))]
        )
        trainer._update(1, experience)

    step(trajectories(replace(size, episodes=4)))
    done = trajectories(size)
    step(done[:8])
    measure(lambda: step(done), rounds)


def measure(run: Any, rounds: Rounds) -> None:
    before = peak_mib()
    rounds.report({})

    def once(request: dict[str, Any]) -> dict[str, float]:
        began = time.perf_counter()
        run()
        return {"seconds": time.perf_counter() - began, "grown_mib": peak_mib() - before}

    rounds.serve(once)


CONTENDERS = {"rollout": rollout, "update": update}


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The least-squares slope of log(value) over log(size); values below 1 count as 1 (memory in MiB)."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in values]
    middle, height = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True))
    return round(above / sum((x - middle) ** 2 for x in xs), 2)


def run(options: Options) -> dict[str, Any]:
    """The exponents, with the figures that they come from."""
    found: dict[str, Any] = {}
    for stage in CONTENDERS:
        axes = {"episodes": (4, 8)} if options.smoke else AXES
        for axis, chosen in axes.items():
            entries = [
                Entry(str(size), stage, 1, {**{name: getattr(Size(), name) for name in AXES}, axis: size})
                for size in chosen
            ]
            results = one_by_one("growth", entries, options)
            times = [results[str(size)]["seconds"] for size in chosen]
            grown = [max(1.0, results[str(size)]["grown_mib"]) for size in chosen]
            found[f"{stage}, {axis}"] = {
                "sizes": list(chosen), "seconds": list(map(round_off, times)), "grown_mib": grown,
                "time_exponent": exponent(chosen, times), "memory_exponent": exponent(chosen, grown),
            }  # fmt: skip
    return found
