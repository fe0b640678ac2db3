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
    from bench.speed.rollout import STOP, Setting, loaded_engine

    from srl.rollout.engine import Sampling

    made = Setting(options, settings)
    slots = made.config.with_settings({"rollout.max_num_seqs": made.count // 2})
    model = loaded_engine(slots, made.policy)

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

    async def rollout(plans: list[Any], mode: str) -> dict[str, float]:
        """Seconds until all episodes are done, and those without a hang; the rest is cancelled."""
        began = time.perf_counter()
        stuck = [any(hanging(plan, turn) for turn in range(len(plan.observations))) for plan in plans]
        tasks = [asyncio.create_task(episode(plan, mode)) for plan in plans]
        free = [task for task, hangs in zip(tasks, stuck, strict=True) if not hangs]
        free_s = max(await asyncio.gather(*free)) - began
        await asyncio.gather(*(free if mode == "hanging" else tasks))
        found = {"seconds": time.perf_counter() - began, "without_hang_s": free_s, "hanging": sum(stuck)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    def measure(request: dict[str, Any]) -> dict[str, float]:
        number, mode = divmod(request["round"], len(MODES))
        found = asyncio.run(rollout(made.plans(number), MODES[mode]))
        model.reset()
        return found

    measure({"round": 0})
    rounds.report({})
    rounds.serve(measure)


CONTENDERS = {"engine": engine}


def run(options: Options) -> dict[str, Any]:
    """Throughput with slow searches by that with searches that answer at once; the same for free episodes."""
    entry = Entry("engine", "engine", 2, {"shape": "real", "dtype": "bfloat16"})
    runs, _ = interleaved("slow_search", [entry], options, len(MODES) * options.rounds)
    modes = {mode: runs["engine"][place :: len(MODES)] for place, mode in enumerate(MODES)}
    return {
        "modes": {mode: medians(results) for mode, results in modes.items()},
        "throughput_at_500_ms": ratio(modes["at once"], modes["500 ms"], "seconds"),
        "throughput_without_hang": ratio(modes["at once"], modes["hanging"], "without_hang_s"),
    }
