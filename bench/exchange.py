"""Sends 10,000 trajectories through each exchange format and back, and counts what does not come back.

    python bench/exchange.py [--trajectories 10000] [--out bench/results/exchange.json]

The trajectories are those of `bench/log_page.py`, with the lengths of a search run. Messages are read with
pyarrow, Inspect's logs with inspect_ai, and a dump is written as verl writes one and read as
`srl inspect import` reads it. Facts are compared trajectory by trajectory: `differ` counts those that are not
the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
from inspect_ai.log import list_eval_logs, read_eval_log
from log_page import PHASE, RUN, STEP, Maker

import srl.store
from srl.browse.inspect_eval import write_eval_logs
from srl.browse.messages import write_messages
from srl.browse.trajectories import Filter
from srl.browse.verl_dump import dump_files, read_dump
from srl.store import LogWriter, Record, RunInfo
from srl.trajectory import Trajectory

Facts = dict[str, Any]


def texts(made: Trajectory, kind: str) -> list[str]:
    return [segment.text for segment in made.segments if segment.kind == kind]


def facts(record: Record) -> Facts:
    """What every format keeps of a trajectory."""
    made, score = record.trajectory, record.score
    assert score is not None
    return {
        "prompt": made.question.prompt[0]["content"], "policy": texts(made, "policy"),
        "observations": texts(made, "observation"), "golden answers": list(made.question.golden_answers),
        "answer": made.answer, "reward": score.value,
    }  # fmt: skip


def more(record: Record) -> Facts:
    """What Inspect's logs keep besides."""
    searches = record.trajectory.searches
    return facts(record) | {
        "queries": [search.query for search in searches],
        "passages": [[hit.passage.contents for hit in search.hits] for search in searches],
        "passage ids": [[hit.passage.id for hit in search.hits] for search in searches],
        "latency": [search.latency_s for search in searches],
    }


def of_messages(folder: Path, log: Path) -> Iterator[tuple[str, Facts]]:
    with srl.store.open(log) as connection:
        write_messages(connection, Filter(), folder / "messages.parquet")
    with pq.ParquetFile(folder / "messages.parquet") as file:
        for batch in file.iter_batches(STEP):
            for row in batch.to_pylist():
                by_role: dict[str, list[str]] = {"user": [], "assistant": [], "tool": []}
                for message in row["messages"]:
                    by_role[message["role"]].append(message["content"])
                yield row["id"], {
                    "prompt": by_role["user"][0], "policy": by_role["assistant"],
                    "observations": by_role["tool"], "golden answers": row["golden_answers"],
                    "answer": row["answer"], "reward": row["reward"],
                }  # fmt: skip


def of_inspect(folder: Path, log: Path) -> Iterator[tuple[str, Facts]]:
    with srl.store.open(log) as connection:
        write_eval_logs(connection, Filter(), folder / "logs")
    for info in list_eval_logs(str(folder / "logs")):
        for sample in read_eval_log(info.name).samples or ():
            tools = [message for message in sample.messages if message.role == "tool"]
            wrote = [message for message in sample.messages if message.role == "assistant"]
            scores = sample.scores or {}
            found = [tool.metadata or {} for tool in tools]
            yield sample.metadata["id"], {
                "prompt": sample.messages[0].text, "policy": [message.text for message in wrote],
                "observations": [message.text for message in tools], "golden answers": list(sample.target),
                "answer": scores["em"].answer, "reward": scores["reward"].value,
                "queries": [call.arguments["query"] for one in wrote for call in one.tool_calls or ()],
                "passages": [[hit["contents"] for hit in one["hits"]] for one in found],
                "passage ids": [[hit["id"] for hit in one["hits"]] for one in found],
                "latency": [one["latency_s"] for one in found],
            }  # fmt: skip


def of_dump(folder: Path, steps: list[list[Record]]) -> Iterator[tuple[str, Facts]]:
    (folder / "dump").mkdir()
    for records in steps:
        lines = [json.dumps(_dumped(record)) + "\n" for record in records]
        (folder / "dump" / f"{records[0].trajectory.step}.jsonl").write_text("".join(lines), encoding="utf-8")
    for file, records in zip(dump_files(folder / "dump"), steps, strict=True):
        for record, back in zip(records, read_dump(file), strict=True):
            yield record.trajectory.id, facts(back)


def _dumped(record: Record) -> Facts:
    made, score = record.trajectory, record.score
    assert score is not None
    prompt, *after = made.segments
    return {
        "input": prompt.text, "output": "".join(segment.text for segment in after),
        "gts": {"target": list(made.question.golden_answers)}, "score": score.value, "step": made.step,
    }  # fmt: skip


def compared(
    back: Iterator[tuple[str, Facts]], expected: dict[str, Record], of: Callable[[Record], Facts]
) -> dict[str, Any]:
    """How many came back, which facts differed how often, and the seconds."""
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    differ: Counter[str] = Counter()
    for one, found in back:
        wanted = of(expected[one])
        assert wanted.keys() == found.keys()
        differ.update(name for name in wanted if wanted[name] != found[name])
        count += 1
    return {
        "trajectories": count, "facts": len(of(next(iter(expected.values())))), "differ": dict(differ),
        "wall_s": round(time.perf_counter() - began, 1), "cpu_s": round(time.process_time() - cpu, 1),
    }  # fmt: skip


def _lighter(records: list[Record]) -> list[Record]:
    """Without the numbers of tokens, which no format keeps."""
    return [Record(record.trajectory, record.score) for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/exchange.json"))
    given = parser.parse_args()
    maker = Maker()
    steps = [_lighter(maker.step(step)) for step in range(1, given.trajectories // STEP + 1)]
    expected = {record.trajectory.id: record for records in steps for record in records}
    with TemporaryDirectory() as place:
        folder = Path(place)
        log = folder / RUN
        with LogWriter(log / "log", RunInfo(RUN, "made", "grpo", model="made")) as writer:
            for records in steps:
                writer.write(records[0].trajectory.step, PHASE, records, {})
        result = {
            "messages": compared(of_messages(folder, log), expected, facts),
            "inspect-eval": compared(of_inspect(folder, log), expected, more),
            "dump of verl": compared(of_dump(folder, steps), expected, facts),
        }
    given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
