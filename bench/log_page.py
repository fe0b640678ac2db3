"""How fast `srl inspect` and `srl inspect web` answer on a large log, made by this script.

    python bench/log_page.py [--trajectories 100000] [--log DIR] [--out RESULTS]

The log is one run of steps with 1,000 trajectories each, with lengths as of a search run: a prompt of about
130 tokens, three turns of the policy, two searches with three passages of about 100 words. `TEMPLATES` steps
are made and written as others with new ids and scores, so texts repeat between steps, not in one. A log that
was interrupted is continued, and a finished one is measured as it is. Each page is asked for `ROUNDS` times
through the application: the first time, and the median of the others. Each command is a process of its own:
the median of its wall clock.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from starlette.testclient import TestClient

from srl.browse.formatting import json_line
from srl.browse.transcript import as_json, transcripts
from srl.browse.web import create_app
from srl.store import LogWriter, Record, RunInfo, reading
from srl.store.parts import PARTS_DIRECTORY, live_parts, next_number, write_compacted, write_part
from srl.store.records import part_tables
from srl.store.run_info import is_finished
from srl.store.writer import COMPACT_AT
from srl.trajectory import Hit, Passage, Phase, Question, Score, Search, Segment, Trajectory
from srl.workspace import Workspace

RUN = "20260101T000000Z-made-grpo-s0-0001"
STEP, GROUP, TEMPLATES, ROUNDS = 1000, 5, 10, 4
WORDS = 20_000
PHASE: Phase = "train"


class Maker:
    """Makes records whose texts are drawn from a vocabulary with Zipf's frequencies."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
        self._words = ["".join(self._draw.choice(letters[:20], 2 + n % 9)) for n in range(WORDS)]
        self._passages = [self._passage(number) for number in range(5000)]

    def text(self, words: int) -> str:
        """Text of about as many words."""
        places = np.minimum(self._draw.zipf(1.3, words) - 1, WORDS - 1)
        return " ".join(self._words[place] for place in places)

    def _passage(self, number: int) -> Passage:
        return Passage(str(number), f'"{self.text(3)}"\n{self.text(100)}')

    def step(self, step: int, episodes: int = STEP) -> list[Record]:
        """The records of a step: groups of `GROUP` samples, the last one smaller if it must be."""
        groups = range(-(-episodes // GROUP))
        records = [
            self._record(question, sample, step)
            for question in (self._question(int(self._draw.integers(1 << 40))) for _ in groups)
            for sample in range(GROUP)
        ]
        return records[:episodes]

    def _question(self, number: int) -> Question:
        text = f"{self.text(10)}?"
        prompt = ({"role": "user", "content": f"{self.text(90)} Question: {text}"},)
        return Question(f"q{number}", text, (self.text(2),), "nq", "train", prompt, {"hops": 1 + number % 2})

    def _record(self, question: Question, sample: int, step: int) -> Record:
        segments = [Segment("prompt", self._ids(130), question.prompt[0]["content"], 0)]
        searches = []
        for turn in range(2):
            query = self.text(6)
            segments.append(self._policy(f"<think>{self.text(40)}</think> <search>{query}</search>", turn))
            places = self._draw.integers(len(self._passages), size=3)
            hits = tuple(Hit(self._passages[place], 20.0 - rank) for rank, place in enumerate(places))
            searches.append(Search(query, hits, "ok", 0.02, turn=turn, shown=3))
            shown = "\n".join(hit.passage.contents for hit in hits)
            observation = f"\n\n<information>{shown}</information>\n\n"
            segments.append(Segment("observation", self._ids(420), observation, turn))
        right = self._draw.random() < 0.4
        answer = question.golden_answers[0] if right else self.text(2)
        segments.append(self._policy(f"<think>{self.text(40)}</think> <answer>{answer}</answer>", 2))
        trajectory = Trajectory(question, segments, searches, "answered", answer, sample, step, PHASE, 3, 2)
        values = self._draw.normal(size=len(trajectory.token_ids)).tolist()
        return Record(trajectory, Score(float(right), {"em": float(right)}), values, values, values, values)

    def _policy(self, text: str, turn: int) -> Segment:
        ids = self._ids(70)
        return Segment("policy", ids, text, turn, tuple(-self._draw.exponential(0.4, len(ids))))

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.integers(1, 150_000, count).tolist())


def as_step(rows: pa.Table, table: str, step: int) -> pa.Table:
    """A table of a template as that of `step`: other ids, question ids and scores."""
    draw = random.Random(step)
    columns: dict[str, list[Any]] = {"step": [step] * rows.num_rows}
    key = {"trajectories": "id", "segments": "trajectory_id", "searches": "trajectory_id"}.get(table)
    if key:
        other = step * 0x9E3779B1 & 0xFFFFFFFFFFFF
        columns[key] = [f"{int(value, 16) ^ other:012x}" for value in rows[key].to_pylist()]
    if table == "trajectories":
        columns["question_id"] = [f"{value}-{step % 50}" for value in rows["question_id"].to_pylist()]
        columns["reward"] = [float(draw.random() < 0.4) for _ in range(rows.num_rows)]
    for name, values in columns.items():
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(name), pa.array(values, rows.schema.field(name).type))
    return rows


def make(log: Path, trajectories: int) -> None:
    """Write the steps that are missing, compacted as by `srl train`; then finish the log."""
    info = RunInfo(RUN, "made", "grpo", 0, "made", {"trainer": {"seed": 0}}, "", "0.1.0")
    writer = LogWriter(log, info)
    parts, steps = log / PARTS_DIRECTORY, trajectories // STEP
    first = 1 + max((part.last for part in live_parts(parts)), default=0)
    templates: list[dict[str, pa.Table]] = []
    while first <= steps:
        templates = templates or _templates(min(TEMPLATES, steps))
        number, last = next_number(parts, "main"), first + COMPACT_AT - 1
        if last <= steps:
            path = parts / f"steps-{first:06d}-{last:06d}-main-{number:06d}"
            write_compacted(path, _batches(templates, first, last), set())
        else:
            last = first
            tables = {
                name: as_step(rows, name, first) for name, rows in templates[first % len(templates)].items()
            }
            write_part(parts, first, PHASE, "main", number, tables)
        print(f"step {last}", file=sys.stderr)
        first = last + 1
    writer.finish()


def _templates(count: int) -> list[dict[str, pa.Table]]:
    maker = Maker()
    metrics = {"critic/score/mean": 0.4, "train/em": 0.4, "response_length/mean": 210.0}
    return [part_tables(RUN, 1, PHASE, maker.step(1), metrics) for _ in range(count)]


def _batches(
    templates: Sequence[dict[str, pa.Table]], first: int, last: int
) -> Callable[[str], Iterator[pa.Table]]:
    """For each table, that of each step from `first` to `last`."""
    return lambda table: (
        as_step(templates[step % len(templates)][table], table, step) for step in range(first, last + 1)
    )


def jsonl_bytes(run: Path) -> float:
    """The mean size of a trajectory as a line of `srl inspect show --json`, of one step's first hundred."""
    some = reading([run], lambda log: transcripts(log, "step = 1 AND position < 100", []))
    return statistics.fmean(len(json_line(as_json(transcript)).encode()) for transcript in some)


def measure(workspace: Path) -> dict[str, dict[str, float]]:
    """Seconds of each page: the first time, and the median of the others."""
    run = f"/run/{RUN}"
    path = workspace / "runs" / RUN
    [some] = reading([path], lambda log: transcripts(log, "step = 50 AND position = 7", []))
    pages = {
        "runs": "/", "run": run, "listing": f"{run}/trajectories",
        "listing, filtered": f"{run}/trajectories?verdict=reader&em=0",
        "listing, sorted by reward": f"{run}/trajectories?sort=-reward",
        "transcript": f"{run}/trajectory/{some.row['id']}",
        "samples": f"{run}/group/{some.row['id']}",
        "question": f"/question?id={some.row['question_id']}",
        "compare": f"/compare?a={RUN}&b={RUN}&step_a=1&step_b=51",
        "SQL": f"/sql?run={RUN}&q=SELECT+step,avg(reward)+FROM+trajectories+GROUP+BY+step",
    }  # fmt: skip
    client = TestClient(create_app(Workspace(workspace)), base_url="http://127.0.0.1")
    seconds = {}
    for name, address in pages.items():
        first, *later = [timed(client, address) for _ in range(ROUNDS)]
        seconds[name] = {"first": round(first, 3), "again": round(statistics.median(later), 3)}
    return seconds


def timed(client: TestClient, path: str) -> float:
    began = time.perf_counter()
    answer = client.get(path)
    assert answer.status_code == 200, (path, answer.status_code)
    return time.perf_counter() - began


def measure_commands(workspace: Path) -> dict[str, float]:
    """The seconds of each command, with a trajectory of the middle of the log."""
    step = (
        "SELECT id FROM trajectories WHERE step = (SELECT max(step) // 2 FROM steps) AND position = 7 LIMIT 1"
    )
    [[middle]] = reading([workspace / "runs" / RUN], lambda log: log.execute(step).fetchall())
    commands = {
        "runs": ["runs"],
        "trajectories": ["trajectories"],
        "trajectories, filtered": ["trajectories", "--verdict", "reader", "--sort", "-reward"],
        "show": ["show", middle],
        "curve": ["curve", "--metric", "train/em"],
        "sql": ["sql", "SELECT step, avg(reward) FROM trajectories GROUP BY step"],
    }
    start = [sys.executable, "-m", "srl", "--workspace", str(workspace)]
    seconds = {"start alone": _wall_clock([sys.executable, "-m", "srl", "--version"])}
    return seconds | {name: _wall_clock([*start, "inspect", *typed]) for name, typed in commands.items()}


def _wall_clock(command: Sequence[str]) -> float:
    """The median of `ROUNDS` runs."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--log", type=Path, default=Path("log-page"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/log_page.json"))
    arguments = parser.parse_args()
    run = arguments.log / "runs" / RUN
    if not is_finished(run / "log"):
        make(run / "log", arguments.trajectories)
    disk = sum(file.stat().st_size for file in (run / "log").rglob("*") if file.is_file())
    [[count]] = reading([run], lambda log: log.execute("SELECT count(*) FROM trajectories").fetchall())
    result = {
        "trajectories": count,
        "jsonl_gb": round(jsonl_bytes(run) * count / 1e9, 2),
        "disk_gb": round(disk / 1e9, 2),
        "seconds": measure(arguments.log),
        "commands": measure_commands(arguments.log),
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
