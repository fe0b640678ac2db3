"""The load of a run on 8 and 64 GPUs on searches, links and the log, calculated from constants with sources.

    python bench/scale.py                               computes bench/results/scale.json
    python bench/scale.py --measure --data ../shared/data    measures this machine's constants first

A constant is measured (by us, in bench/results), published (a manufacturer's data sheet) or assumed (and
marked as such). The calculation is for one step of GRPO as in the preset search-r1-v0.2: 512 questions × 5
episodes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RESULT = RESULTS / "scale.json"

PARAMETERS = {"7B": 7_615_616_512, "32B": 32_763_876_352}
"""Of Qwen2.5, as published."""

CASES = ("slow", "middle", "fast")
GENERATES = {"7B": (1000, 2500, 5000), "32B": (230, 580, 1160)}
"""Tokens a second and GPU while generating, in each case: assumed. 32B: 7B's, divided by the ratio of the
parameters."""

MFU = (0.25, 0.35, 0.5)
"""Share of a GPU's arithmetic that training and reading reach, in each case: assumed."""

TOKEN_S = {"7B": 0.010, "32B": 0.025}
"""Seconds from one token of an episode to its next: assumed."""

WIKI = 21_015_324
"""Passages of wiki-18."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """What a step samples. The lengths are assumed; the paper's responses have about 1,100 tokens."""

    count: int = 512 * 5
    minis: int = 8
    prompt: int = 200
    written: int = 350
    searches: float = 2.0
    observation: int = 400
    longest: int = 1250
    """Tokens that the longest episode writes: half of its 5 × 500."""
    micro: int = 16384
    """Tokens of a forward and backward pass."""

    @property
    def tokens(self) -> float:
        return self.prompt + self.written + self.searches * self.observation


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of eight H100 SXM, in bytes a second and direction."""

    flops: float = 989e12
    """Of a GPU, dense BF16: published."""
    mfu: float = MFU[1]
    """Share of it that is reached."""
    nvlink: float = 450e9
    """Of a GPU: published, 900 GB/s in both directions."""
    network: float = 8 * 50e9
    """Between machines: an InfiniBand port of 400 Gb/s for each GPU, published."""
    ethernet: float = 25e9 / 8
    """For all that is no tensor: searches, TransferQueue, log."""
    pcie: float = 50e9
    """Of a GPU: 64 GB/s published, of which 50 are assumed to arrive."""
    gpus: int = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """What this repository's benches found on two cores of a shared machine."""

    search_s: float
    """Processor seconds of a `bm25` search in 5 million passages (lexical.json)."""
    http_s: float
    """Processor seconds of the server, and of its client, for each search beyond that (server.json)."""
    flat_s: float
    """Processor seconds of an exact search in a million vectors of 768 numbers (dense.json)."""
    search_bytes: float
    """Of a search with three passages over HTTP, question and answer."""
    log_bytes: float
    """Of an episode in the finished log."""
    sent_bytes: float
    """Of an episode on its way to the log's writer."""
    write_s: float
    """Processor seconds of the writer for an episode."""


QUEUE_FIELDS = {
    "prompts": (8, 1, 3), "responses": (8, 1, 5), "input_ids": (8, 1, 3), "position_ids": (8, 1, 3),
    "response_mask": (8, 1, 7), "loss_mask": (8, 1, 3), "rollout_log_probs": (4, 1, 2),
    "rm_scores": (4, 1, 2), "log_probs": (4, 2, 2), "entropy": (4, 2, 1), "old_log_probs": (4, 1, 2),
    "ref_log_prob": (4, 1, 2), "advantages": (4, 1, 2), "returns": (4, 1, 2),
}  # fmt: skip
"""Bytes a token of each field in verl 0.9.1's TransferQueue, and how often it is put and got in a step: read
in its trainer and agent loop. Each is counted for all tokens of an episode, so this is too much, not too
little."""

CORE_USE = 0.7
"""Share of a search server's cores that is planned with: assumed."""
PEAK = 3.0
"""The most searches in a second, in those of the mean second: assumed. All episodes begin at once."""
GPU_FLAT = 64 / (WIKI * 768 * 2 / (0.5 * 3.35e12))
"""Exact searches a second of one H100 in wiki-18 by E5 in 16-bit floats: 64 at a time, each time all vectors
are read at half of the published 3.35 TB/s. Assumed."""
GATHER, REDUCE = 2, 4
"""Bytes a parameter of FSDP: weights are gathered in BF16, gradients reduced in float32."""
SHARED_DISK = 5e9
"""Bytes a second of the file system for checkpoints: assumed."""
STATE = 12
"""Bytes a parameter of a checkpoint and of what is offloaded: float32 weights and AdamW's two moments."""


def micro_batches(tokens: float, episodes: Episodes) -> int:
    return max(1, math.ceil(tokens / episodes.micro))


def fsdp_bytes(parameters: int, gpus: int, episodes: Episodes) -> float:
    """Bytes that all gathers and reductions of a step bring to one rank that holds next to nothing.

    Two passes for log-probs, of the policy and of the reference; then for each mini-batch and micro-batch
    a gather forward, a gather backward, and a reduction.
    """
    mine = episodes.count * episodes.tokens / gpus
    passes = 2 * micro_batches(mine, episodes)
    updates = episodes.minis * micro_batches(mine / episodes.minis, episodes)
    return parameters * (passes * GATHER + updates * (2 * GATHER + REDUCE))


def seconds(size: str, gpus: int, rate: float, machine: Machine, episodes: Episodes) -> dict[str, float]:
    """The parts of a step; nothing overlaps."""
    parameters = PARAMETERS[size]
    compute = gpus * machine.flops * machine.mfu
    tokens, read = episodes.count * episodes.tokens, episodes.count * (episodes.tokens - episodes.written)
    generating = episodes.count * episodes.written / (gpus * rate)
    rollout = max(generating, episodes.longest * TOKEN_S[size]) + 2 * parameters * read / compute
    links = link_seconds(parameters, gpus, machine, episodes)
    return {
        "rollout": rollout,
        "log_probs": 2 * 2 * parameters * tokens / compute,
        "update": 8 * parameters * tokens / compute,
        "communication": max(links.values()),
    }


def link_seconds(parameters: int, gpus: int, machine: Machine, episodes: Episodes) -> dict[str, float]:
    """How long a step keeps each link of the model's own traffic busy.

    Weights go to the rollout once a step. With several machines every gather crosses the network once for
    each machine, all its ports together; inside a machine every GPU receives all of it.
    """
    bytes_in = fsdp_bytes(parameters, gpus, episodes) + GATHER * parameters
    machines = gpus // machine.gpus
    inside = bytes_in * (min(gpus, machine.gpus) - 1) / machine.gpus / machine.nvlink
    between = bytes_in * (machines - 1) / machines / machine.network
    return {"NVLink": inside, "network": between}


def search_cost(measured: Measured, passages: int = WIKI) -> float:
    """Processor seconds of a search: what is scored grows with the corpus, HTTP does not."""
    return measured.search_s * passages / 5e6 + measured.http_s


def search_servers(searches_per_s: float, measured: Measured) -> dict[str, float]:
    """What answers wiki-18's searches at their peak: cores of bm25, cores or GPUs of an exact E5."""
    peak = PEAK * searches_per_s
    return {
        "peak_per_s": round(peak, 1),
        "bm25_cores": round(peak * search_cost(measured) / CORE_USE, 1),
        "e5_flat_cores": round(peak * (measured.flat_s * WIKI / 1e6 + measured.http_s) / CORE_USE),
        "e5_flat_gpus": round(peak / GPU_FLAT / CORE_USE, 2),
    }


def flows(
    size: str, gpus: int, step: dict[str, float], machine: Machine, episodes: Episodes, measured: Measured
) -> dict[str, dict[str, float]]:
    """Each link with the bytes it carries in a step and the share of the time that it is busy.

    Searches and what the episodes send fall in the rollout; the rest spreads over the step.
    """
    parameters, total = PARAMETERS[size], sum(step.values())
    searches = episodes.count * episodes.searches * measured.search_bytes
    put = sum(width * put for width, put, _ in QUEUE_FIELDS.values())
    got = sum(width * got for width, _, got in QUEUE_FIELDS.values())
    queue = (put + got) * episodes.count * episodes.tokens
    sent = episodes.count * measured.sent_bytes
    links = link_seconds(parameters, gpus, machine, episodes)
    moved = 2 * STATE * parameters / gpus
    return {
        "between machines, weights and gradients": _flow(links["network"], machine.network, total),
        "NVLink, weights and gradients": _flow(links["NVLink"], machine.nvlink, total),
        "the log's one writer, its processor": _flow(episodes.count * measured.write_s, 0, total, sent),
        "Ethernet of one machine, TransferQueue": _flow(queue / machine.ethernet, machine.ethernet, total),
        "Ethernet of one machine, episodes to the log": _flow(
            sent / machine.ethernet, machine.ethernet, total
        ),
        "PCIe, weights and optimiser offloaded": _flow(moved / machine.pcie, machine.pcie, total),
        "Ethernet of one search server, all searches": _flow(
            searches / machine.ethernet, machine.ethernet, step["rollout"]
        ),
        "disk, a checkpoint in 100 steps": _flow(STATE * parameters / 100 / SHARED_DISK, SHARED_DISK, total),
        "disk, log": _flow(episodes.count * measured.log_bytes / SHARED_DISK, SHARED_DISK, total),
    }


def _flow(busy: float, rate: float, within: float, size: float | None = None) -> dict[str, float]:
    """`size` where it does not follow from the rate."""
    size = busy * rate if size is None else size
    return {"bytes": round(size), "busy_s": round(busy, 4), "share": round(busy / within, 6)}


def plan(size: str, gpus: int, measured: Measured, episodes: Episodes) -> dict[str, Any]:
    """One model on so many GPUs, slow, middle and fast."""
    cases = {}
    for name, rate, mfu in zip(CASES, GENERATES[size], MFU, strict=True):
        machine = replace(Machine(), mfu=mfu)
        step = seconds(size, gpus, rate, machine, episodes)
        searches = episodes.count * episodes.searches / step["rollout"]
        cases[name] = {
            "step_s": {part: round(value, 2) for part, value in step.items()},
            "total_s": round(sum(step.values()), 1),
            "episodes_per_s": round(episodes.count / sum(step.values()), 2),
            "searches_per_s": round(searches, 1),
            "servers": search_servers(searches, measured),
            "links": flows(size, gpus, step, machine, episodes, measured),
        }
    return {"model": size, "gpus": gpus, "cases": cases}


def slower_networks(episodes: Episodes) -> list[dict[str, Any]]:
    """The share of a step that goes between the machines of 64 GPUs, by network; nothing overlaps."""
    networks = {"8 × 400 Gb/s": 8 * 50e9, "400 Gb/s": 50e9, "100 Gb/s": 12.5e9, "25 Gb/s": 3.125e9}
    rows = []
    for size in PARAMETERS:
        for name, rate in networks.items():
            machine = replace(Machine(), network=rate)
            step = seconds(size, 64, GENERATES[size][1], machine, episodes)
            busy = link_seconds(PARAMETERS[size], 64, machine, episodes)["network"]
            weights = GATHER * PARAMETERS[size] * 7 / 8 / rate
            rows.append(
                {"model": size, "network": name, "total_s": round(sum(step.values()), 1),
                 "network_s": round(busy, 2), "weights_s": round(weights, 3),
                 "share": round(busy / sum(step.values()), 4)}
            )  # fmt: skip
    return rows


def saturation(measured: Measured, episodes: Episodes) -> dict[str, float]:
    """How fast episodes would have to come before one writer, or one machine's Ethernet, is busy always."""
    queue = sum(width * (put + got) for width, put, got in QUEUE_FIELDS.values()) * episodes.tokens
    ethernet = Machine().ethernet
    return {
        "writer_episodes_per_s": round(1 / measured.write_s, 1),
        "transfer_queue_episodes_per_s": round(ethernet / queue, 1),
        "search_ethernet_searches_per_s": round(ethernet / measured.search_bytes, 1),
    }


def computed(measured: Measured) -> dict[str, Any]:
    """Everything that follows from the constants."""
    machine, episodes = Machine(), Episodes()
    return {
        "format": 1,
        "measured": asdict(measured),
        "assumed": {"episodes": asdict(episodes), "machine": asdict(machine), "token_s": TOKEN_S,
                    "generates": GENERATES, "mfu": MFU, "core_use": CORE_USE, "peak": PEAK,
                    "gpu_flat_per_s": round(GPU_FLAT), "shared_disk": SHARED_DISK, "passages": WIKI},
        "search_core_ms": round(1000 * search_cost(measured), 3),
        "plans": [plan(size, gpus, measured, episodes) for size in PARAMETERS for gpus in (8, 64)],
        "networks": slower_networks(episodes),
        "saturation": saturation(measured, episodes),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="Measure this machine's constants first.")
    parser.add_argument("--data", type=Path, help="The folder of data sets, for --measure.")
    arguments = parser.parse_args()
    if arguments.measure:
        from scale_constants import measure

        measured = Measured(**measure(arguments.data, Episodes()))
    else:
        measured = Measured(**json.loads(RESULT.read_text(encoding="utf-8"))["measured"])
    RESULT.write_text(json.dumps(computed(measured), indent=2) + "\n", encoding="utf-8")
    print(f"{RESULT}: {1000 * search_cost(measured):.1f} ms of a core for a search", file=sys.stderr)


if __name__ == "__main__":
    main()
