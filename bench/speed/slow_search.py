"""Searches that take half a second, and searches that hang: what they cost the other episodes.

The plans of `rollout`, with half as many slots in the engine as episodes, so that an episode that waits would
keep another from its place. All modes take turns in one process.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.speed.harness import Entry, Options, Rounds, interleaved, medians, ratio

SLOW_S, HANG_S, HANGS = 0.5, 30.0, 0.05
MODES = ("at once", "500 ms", "hanging")


def hanging(plan: Any, turn: int) -> bool:
    """Whether this search hangs: 5% of them, always the same."""
    return sum(map(ord, plan.name)) * 31 % 997 * (turn + 7) % 101 < 101 * HANGS


def engine(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    from bench.speed.rollout import STOP, Setting

    from srl.rollout.engine import Sampling
    from srl.train.load_components import load_engine

    made = Setting(options, settings)
    slots = made.config.with_settings({"rollout.max_num_seqs": made.count // 2})
    model = load_engine(slots, made.policy)

    async def episode(plan: Any, mode: str) -> float:
        ids = list(plan.prompt)
        for turn, length in enumerate(plan.turns):
            sampling = Sampling(length, key=(plan.name, turn), stop=STOP)
            ids += (await model.generate(plan.name, ids, sampling)).token_ids
            if turn < len(plan.observations):
                wait = {"at once": 0.0, "500 ms": SLOW_S}.get(mode, HANG_S if hanging(plan, turn) else 0.0)
                await asyncio.sleep(wait)
                ids += plan.observations[turn]
        model.finish(plan.name)
        return time.perf_counter()

    async def rollout(plans: list[Any], mode: str) -> float:
        """Seconds until the last episode without a hang is done; the others are cancelled then."""
        began = time.perf_counter()
        stuck = [any(hanging(plan, turn) for turn in range(len(plan.observations))) for plan in plans]
        tasks = [asyncio.create_task(episode(plan, mode)) for plan in plans]
        done = await asyncio.gather(*(task for task, hangs in zip(tasks, stuck, strict=True) if not hangs))
        if mode != "hanging":
            await asyncio.gather(*tasks)
        ended = max(done) if mode == "hanging" else time.perf_counter()
        free = max(done) - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return_values[mode] = {
            "seconds": ended - began,
            "without_hang_s": free,
            "hanging_episodes": sum(stuck),
        }
        return free

    return_values: dict[str, dict[str, float]] = {}

    def measure(request: dict[str, Any]) -> dict[str, float]:
        asyncio.run(rollout(made.plans(request["round"] // len(MODES)), MODES[request["round"] % len(MODES)]))
        model.reset()
        return return_values[MODES[request["round"] % len(MODES)]]

    measure({"round": 0})
    rounds.report({})
    rounds.serve(measure)


CONTENDERS = {"engine": engine}


def run(options: Options) -> dict[str, Any]:
    """Throughput with slow searches by that with searches that answer at once; the same for free episodes."""
    found: dict[str, Any] = {}
    for shape in ("real", "tiny"):
        dtype = "bfloat16" if shape == "real" else "float32"
        entry = Entry("engine", "engine", 2, {"shape": shape, "dtype": dtype})
        runs, _ = interleaved("slow_search", [entry], options, len(MODES) * options.rounds)
        modes = {mode: runs["engine"][place :: len(MODES)] for place, mode in enumerate(MODES)}
        found[shape] = {
            "modes": {mode: medians(results) for mode, results in modes.items()},
            "throughput_at_500_ms": ratio(modes["at once"], modes["500 ms"], "seconds"),
            "throughput_without_hang": ratio(modes["at once"], modes["hanging"], "without_hang_s"),
        }
    return found
