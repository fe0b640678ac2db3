"""A decoding step, eager and with the layers compiled by `torch.compile`: why the torch engine stays eager.

Every row has a prompt of the same length and draws one token a step. The warm-up, in which the compiler
works, does not count.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from bench.speed.harness import Entry, Options, Rounds, interleaved, medians, ratio

PROMPT = {"real": 300, "tiny": 90}
STEPS, FIRST = 24, 2
COMPILED = ", compiled layers"


def decode(options: Options, settings: dict[str, Any], rounds: Rounds) -> None:
    import numpy as np
    import torch
    from bench.speed.rollout import Setting

    from srl.rollout.cached_forward import CachedForward
    from srl.rollout.engine import Sampling
    from srl.rollout.slot_table import SlotTable
    from srl.update.compiling import layers_of

    made = Setting(options, settings)
    model, count, length = made.policy.model.eval(), made.count, PROMPT[made.shape]
    forward, rows = CachedForward(model, count, length + STEPS + FIRST + 1), np.arange(count)
    if settings["compiled"] and not options.smoke:
        for layer in layers_of(model):
            layer.forward = torch.compile(layer.forward, dynamic=True)

    @torch.no_grad()
    def seconds_of_steps() -> list[float]:
        table, taken = SlotTable(count), list[float]()
        for row in rows.tolist():
            ids = made.texts[row : row + length]
            table.begin(row, ids, Sampling(STEPS + FIRST + 1, key=(row,)), 0)
        for _ in range(STEPS + FIRST + 1):  # the first is of the prompts
            began = time.perf_counter()
            tokens, logprobs = forward.sample(table, rows)
            table.append(rows, tokens.astype(np.int64), logprobs.astype(np.float32))
            taken.append(time.perf_counter() - began)
        return taken[1:]

    seconds_of_steps()
    rounds.report({})
    rounds.serve(lambda request: {"seconds": median(seconds_of_steps()[FIRST:])})


CONTENDERS = {"decode": decode}


def run(options: Options) -> dict[str, Any]:
    """Both shapes in float32, on one and two threads."""
    found: dict[str, Any] = {}
    for shape, rounds in (("tiny", options.rounds + 2), ("real", options.rounds)):
        for threads in (1, 2):
            name = f"{shape}, {threads} threads"
            entries = [
                Entry(f"{name}{words}", "decode", threads, {"shape": shape, "compiled": bool(words)})
                for words in ("", COMPILED)
            ]
            runs, _ = interleaved("decode", entries, options, rounds)
            found |= {
                one: {**medians(results), "times_eager": ratio(results, runs[name], "seconds")}
                for one, results in runs.items()
            }  # fmt: skip
    return found
