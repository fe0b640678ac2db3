"""What the log's writing costs a training step, and whether training waits for it.

    python bench/log_writing.py [--steps 40] [--out bench/results/log_writing.json]

Steps of 64 and of 1,024 episodes with the lengths of `bench/log_page.py` are recorded as `srl train` records
them: the training thread waits until the step before is written, then hands over the next one. Beside each
write the training thread runs Python code, and its longest pause shows how long the writer held the
interpreter. Every `COMPACT_AT` steps the writer compacts them, so one write is long: training waits for it
only if it takes longer than a step. The share of a step is the processor time of the writer's thread, of the
time in which one GPU generates the tokens of the step at the speeds that `bench/verl_overhead.py` assumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from log_page import PHASE, RUN, Maker

from srl.store import LogWriter, Record, RunInfo
from srl.store.writer import COMPACT_AT
from srl.train.background_writes import BackgroundWrites

RESULTS = Path(__file__).parent / "results" / "log_writing.json"
EPISODES = (64, 1024)
SPEEDS = (1_000, 5_000)
"""Tokens a second that one GPU generates, slow and fast."""
METRICS = {"critic/score/mean": 0.4, "train/em": 0.4, "response_length/mean": 210.0}


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one step: in the training thread, its longest pause, and of the writer's thread."""

    hand_over: float
    pause: float
    wall: float
    processor: float


def record_steps(log: Path, records: Sequence[Record], steps: int) -> list[Step]:
    """Record `steps` steps of these episodes in a new log at `log`."""
    writer, writes = LogWriter(log, RunInfo(RUN)), BackgroundWrites()
    found = []
    for step in range(1, steps + 1):
        given = [replace(one, trajectory=replace(one.trajectory, step=step)) for one in records]
        took: list[tuple[float, float]] = []
        began = time.perf_counter()
        writes.wait()
        writes.do(_timed, lambda step=step, given=given: writer.write(step, PHASE, given, METRICS), took)
        handed = time.perf_counter() - began
        pause = longest_pause(lambda took=took: bool(took))
        [(wall, processor)] = took
        found.append(Step(handed, pause, wall, processor))
    writes.close()
    return found


def _timed(write: Callable[[], None], took: list[tuple[float, float]]) -> None:
    """Call `write` in the thread of the writer; append its seconds of wall clock and of processor."""
    wall, processor = time.perf_counter(), time.thread_time()
    write()
    took.append((time.perf_counter() - wall, time.thread_time() - processor))


def longest_pause(done: Callable[[], bool]) -> float:
    """Run Python code until `done`; the most seconds between two of its turns."""
    longest, last = 0.0, time.perf_counter()
    while not done():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def measure(episodes: int, steps: int) -> dict[str, Any]:
    """The cost of steps of so many episodes."""
    records = Maker().step(1, episodes)
    tokens = sum(len(one.trajectory.token_ids) for one in records)
    end = time.perf_counter() + 1
    idle = longest_pause(lambda: time.perf_counter() > end)
    with TemporaryDirectory() as place:
        found = record_steps(Path(place, "log"), records, steps)
    processor = fmean(step.processor for step in found)
    return {
        "tokens": tokens,
        "hand_over_ms": _summary([1e3 * step.hand_over for step in found]),
        "pause_ms": _summary([1e3 * step.pause for step in found]),
        "idle_pause_ms": round(1e3 * idle, 1),
        "write_s": _summary([step.wall for step in found]),
        "processor_s": round(processor, 3),
        "shares": {f"{speed:,} tokens/s": round(processor / (tokens / speed), 4) for speed in SPEEDS},
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "longest": round(max(values), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=COMPACT_AT + 8, help="Steps of each size.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows = {}
    for episodes in EPISODES:
        rows[str(episodes)] = measure(episodes, given.steps)
        print(episodes, rows[str(episodes)], file=sys.stderr)
    result = {"format": 1, "steps": given.steps, "compacted_every": COMPACT_AT, "episodes": rows}
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
