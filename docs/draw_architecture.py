"""Draw docs/architecture.svg: the way of a question, and who does each part on either backend.

`python docs/draw_architecture.py [--check]`. A test fails when the file is not what this draws.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from drawing import arrow, box, main, page, text

FILE = Path(__file__).parent / "architecture.svg"
WIDTH, HEIGHT = 1280, 806
LABEL = "The way of a question from file to gradient to log, in one process and on verl."
LEFT, STEP, WIDE = 162, 186, 168
COLUMNS = [LEFT + STEP * number for number in range(6)]
"""Where the six parts of the way begin."""
MIDDLES = [x + WIDE / 2 for x in COLUMNS]


def cell(column: int, y: float, height: float, kind: str, title: str, *lines: str) -> list[str]:
    return box(COLUMNS[column], y, WIDE, height, kind, title, lines)


def lane(y: float, height: float, title: str, subtitles: Sequence[str], what: str) -> list[str]:
    """The panel of a backend, with its name on the left."""
    names = [text(20, y + 54 + 18 * number, line) for number, line in enumerate(subtitles)]
    width = COLUMNS[5] - COLUMNS[0] + WIDE + 20
    return [text(20, y + 34, title, "title"), *names, *box(COLUMNS[0] - 10, y, width, height, "panel", what)]


def way() -> list[str]:
    """The parts of the way in the order of the data, and what an episode talks to."""
    x = COLUMNS[1]
    return [
        text(20, 52, "A question's path", "title"),
        text(20, 72, "the same code"),
        text(20, 90, "on both backends"),
        *cell(0, 28, 76, "box", "Question", "train/questions.py", "read with its prompt"),
        *cell(1, 28, 76, "box", "Episode", "rollout/episode.py", "turns, tokens, mask"),
        *cell(2, 28, 76, "box", "Reward", "reward/", "plugins, weighted"),
        *cell(3, 28, 76, "box", "Step result", "train/", "compute_advantages.py"),
        *cell(4, 28, 76, "box", "Update", "update/, or verl's own", "losses, optimiser"),
        *cell(5, 28, 76, "box", "Log", "store/", "Parquet parts, DuckDB"),
        *(arrow([(left + WIDE, 66), (left + STEP, 66)]) for left in COLUMNS[:-1]),
        *box(x - 90, 150, WIDE, 76, "gpu", "Engine", ["rollout/engine.py", "token ids in and out"]),
        *box(x + 96, 150, WIDE, 76, "search", "Search tool", ["serve/: in process,", "HTTP, cassette"]),
        arrow([(x + 30, 104), (x + 30, 150)], both=True),
        arrow([(x + 120, 104), (x + 120, 150)], both=True),
        arrow([(MIDDLES[4], 104), (MIDDLES[4], 246), (x - 6, 246), (x - 6, 226)]),
        text(MIDDLES[3], 240, "new weights, each step", anchor="middle"),
    ]


def local(y: float) -> list[str]:
    """One process does it all."""
    loop = "train/loop.py is the skeleton, which samples, scores and logs; train/rl.py is a step"
    return [
        *lane(y, 150, "--backend local", ["one process"], loop),
        *cell(0, y + 44, 90, "box", "Questions", "train/questions.py:", "the questions of a step"),
        *cell(1, y + 44, 90, "gpu", "Engine", "torch_engine.py: the", "policy's own module; or",
              "vllm_engine.py: a copy"),
        *cell(2, y + 44, 90, "search", "Search", "serve/in_process.py, or", "serve/client/ to a server"),
        *cell(3, y + 44, 90, "box", "Experience", "train/rl.py:", "log-probs, reference,",
              "values, advantages"),
        *cell(4, y + 44, 90, "gpu", "Update", "update/: actor, critic,", "losses, packing;",
              "train/checkpoint.py"),
        *cell(5, y + 44, 90, "disk", "Log writer", "store/writer.py:", "one part a step"),
    ]  # fmt: skip


def verl(y: float) -> list[str]:
    """Who does what when the run is on verl."""
    return [
        *lane(y, 324, "--backend verl", ["processes on Ray", "(scale.md)"],
              "train/verl/launch.py checks and starts the processes; train/verl/follow.py follows them"),
        *cell(0, y + 44, 108, "box", "Trainer", "train/verl/trainer.py:", "verl's loop over steps;",
              "dataset.py"),
        *box(COLUMNS[1], y + 44, STEP + WIDE, 108, "box", "Agent workers, several on each machine", [
             "train/verl/agent_loop.py: a coroutine for each", "episode and its reward;",
             "engine.py asks the rollout servers"]),
        *cell(3, y + 44, 108, "box", "Trainer", "train/verl/batch.py: a",
            "step's batch in,",
            "advantages out"),
        *cell(4, y + 44, 108, "gpu", "Training workers", "verl's: FSDP2 or", "FSDP, in shards;",
              "train/verl/patches.py"),
        *cell(5, y + 44, 108, "disk", "Log actor", "train/verl/log_writer.py:", "store/writer.py in a",
              "separate process"),
        *cell(1, y + 204, 90, "gpu", "Rollout servers", "vLLM or SGLang;", "without a GPU",
              "train/verl/without_gpu.py"),
        *cell(2, y + 204, 90, "search", "Search servers", "srl serve retriever:", "serve/server/"),
        arrow([(COLUMNS[0] + WIDE, y + 98), (COLUMNS[1], y + 98)]),
        arrow([(MIDDLES[1], y + 152), (MIDDLES[1], y + 204)], both=True),
        arrow([(MIDDLES[2], y + 152), (MIDDLES[2], y + 204)], both=True),
        arrow([(COLUMNS[2] + WIDE, y + 98), (COLUMNS[3], y + 98)]),
        arrow([(COLUMNS[3] + WIDE, y + 98), (COLUMNS[4], y + 98)], both=True),
        arrow([(MIDDLES[4], y + 152), (MIDDLES[4], y + 310), (MIDDLES[1], y + 310), (MIDDLES[1], y + 294)]),
        text(MIDDLES[3], y + 304, "new weights, each step", anchor="middle"),
        arrow([(COLUMNS[2] + 120, y + 152), (COLUMNS[2] + 120, y + 182), (MIDDLES[5], y + 182),
               (MIDDLES[5], y + 152)]),
        text(MIDDLES[3] - 10, y + 176, "each trajectory", anchor="middle"),
    ]  # fmt: skip


def drawn() -> str:
    return page(LABEL, WIDTH, HEIGHT, [*way(), *local(276), *verl(456)])


if __name__ == "__main__":
    sys.exit(main(FILE, drawn()))
