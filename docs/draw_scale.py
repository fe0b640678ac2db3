"""Draw docs/scale.svg: what runs where when a run is on verl. `python docs/draw_scale.py [--check]`

A test fails when the file is not what this draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

from drawing import arrow, box, main, page, text

FILE = Path(__file__).parent / "scale.svg"
WIDTH, HEIGHT = 1000, 600
LABEL = "What runs where: one launcher, one trainer, one writer of the log; workers on every machine."


def once() -> list[str]:
    """What there is one of."""
    return [
        *box(20, 20, 270, 454, "panel", "Once"),
        *box(36, 64, 238, 104, "box", "srl train --backend verl", [
            "checks settings, questions, search;", "starts the others, reports progress,",
            "ends a run without progress",
        ]),
        *box(36, 212, 238, 104, "box", "The trainer", [
            "verl's loop, our estimators:", "rewards to advantages;", "checks every worker at the start",
        ]),
        *box(36, 354, 238, 104, "box", "The log writer", [
            "one process, one writer:", "trajectories, searches, metrics", "of a step become one part",
        ]),
        arrow([(155, 168), (155, 212)]),
        arrow([(60, 354), (60, 334), (28, 334), (28, 116), (36, 116)]),
        text(68, 342, "status"),
    ]  # fmt: skip


def everywhere() -> list[str]:
    """What runs on each machine."""
    return [
        *box(330, 20, 650, 454, "panel", "On every machine"),
        *box(350, 64, 270, 104, "gpu", "GPU workers", [
            "policy, reference and critic in shards", "(FSDP2 or FSDP):", "log-probs, values, update",
        ]),
        *box(700, 64, 260, 104, "gpu", "Rollout servers", [
            "vLLM or SGLang, full copies,", "on the same GPUs, in turn", "with the training",
        ]),
        *box(350, 222, 270, 84, "box", "TransferQueue", [
            "ids, masks, log-probs, rewards,", "values, advantages of the batch",
        ]),
        *box(700, 222, 260, 84, "box", "Agent workers", [
            "the episode: turns, searches, reward;", "the same code as the local backend's",
        ]),
        *box(700, 378, 260, 80, "search", "Search server", [
            "srl serve retriever --workers N,", "here or on other machines",
        ]),
        arrow([(620, 116), (700, 116)]),
        text(660, 94, "weights,", anchor="middle"),
        text(660, 108, "each step", anchor="middle"),
        arrow([(830, 222), (830, 168)], both=True),
        text(842, 192, "ids;"),
        text(842, 208, "tokens, log-probs"),
        arrow([(850, 306), (850, 378)], both=True),
        text(862, 338, "queries;"),
        text(862, 354, "passages"),
        arrow([(700, 264), (620, 264)]),
        text(660, 256, "episodes", anchor="middle"),
        arrow([(485, 222), (485, 168)], both=True),
        text(497, 200, "micro-batches"),
        arrow([(274, 264), (350, 264)], both=True),
        arrow([(274, 232), (310, 232), (310, 116), (350, 116)]),
        arrow([(750, 306), (750, 346), (310, 346), (310, 406), (274, 406)]),
        text(530, 366, "every trajectory, as soon as it is finished", anchor="middle"),
    ]  # fmt: skip


def disk() -> list[str]:
    """What all of them see."""
    return [
        *box(20, 518, 960, 62, "disk", "A file system that every machine sees", [
            "model, questions, index; the run: config.yaml, tokenizer/, checkpoints/global_step_N/, log/",
        ]),
        arrow([(155, 458), (155, 518)]),
        text(167, 500, "a part for each step"),
        arrow([(655, 474), (655, 518)]),
        text(667, 500, "checkpoints, a shard from each worker"),
    ]  # fmt: skip


def drawn() -> str:
    return page(LABEL, WIDTH, HEIGHT, [*once(), *everywhere(), *disk()])


if __name__ == "__main__":
    sys.exit(main(FILE, drawn()))
