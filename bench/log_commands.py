"""How long the commands of `srl inspect` take on a large log, and its disk beside JSON lines and SQLite.

    python bench/log_commands.py [--trajectories 200000] [--running] [--log DIR] [--out RESULTS]

The log is that of `bench/log_page.py`, which is made if it is not there, in parts with `--running`. Each
command is a process of its own, run `ROUNDS` times: the median of its wall clock and of its processor time,
and its peak memory. SQLite has the same rows of `STEPS` steps, lists of numbers as packed bytes and an index
on the trajectory; its size and that of JSON lines are scaled to the log.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from log_page import RUN, jsonl_bytes, ready, save, saved

from srl.store import reading, rows
from srl.store.schema import PARTS

ROUNDS, STEPS = 3, 2
OUT = "OUT"
WRAPPER = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print([time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6])
"""


VERDICTS = "SELECT phase, step, verdict, count(*) FROM trajectories GROUP BY ALL"
SEARCHES = "SELECT phase, step, count(*), avg(latency_s), sum(gold_rank = 1) FROM searches GROUP BY ALL"


def commands(run: Path) -> dict[str, list[str]]:
    """The commands by their names, with ids of trajectories in the middle of the log."""
    query = (
        "SELECT id, step FROM trajectories WHERE step = (SELECT max(step) // 2 FROM steps) AND position = 7"
    )
    [some] = reading([run], lambda log: rows(log, query))
    one, step = some["id"], some["step"]
    return {
        "start alone": ["--version"],
        "runs": ["inspect", "runs"],
        "trajectories": ["inspect", "trajectories"],
        "trajectories, filtered": ["inspect", "trajectories", "--verdict", "reader", "--sort", "-reward"],
        "show": ["inspect", "show", one],
        "group": ["inspect", "show", one, "--group"],
        "tokens": ["inspect", "show", one, "--tokens"],
        "verdicts by step": ["inspect", "sql", VERDICTS],
        "curve": ["inspect", "curve", "--metric", "train/em"],
        "searches by step": ["inspect", "sql", SEARCHES],
        "diff of two steps": ["inspect", "diff", f"last@{step}", f"last@{step + 50}"],
        "why": ["inspect", "why"],
        "sql": ["inspect", "sql", "SELECT step, avg(em) FROM trajectories GROUP BY step ORDER BY step"],
        "export of one step": ["inspect", "export", "--steps", str(step), "-o", OUT],
        "text": ["inspect", "trajectories", "--contains", "nothing has this text"],
    }


def measured(arguments: Sequence[str], workspace: Path) -> dict[str, float]:
    """Median seconds of wall clock and processor, and the most memory in GB, of one command."""
    took = [_once(arguments, workspace) for _ in range(ROUNDS)]
    wall, cpu, memory = zip(*took, strict=True)
    return {
        "wall_s": round(statistics.median(wall), 2),
        "cpu_s": round(statistics.median(cpu), 2),
        "memory_gb": round(max(memory), 2),
    }


def _once(arguments: Sequence[str], workspace: Path) -> tuple[float, float, float]:
    """Run by a small process, since a child counts the memory of its parent as its own until it starts."""
    with TemporaryDirectory() as place:
        out = [str(Path(place, "out.parquet")) if one == OUT else one for one in arguments]
        said = subprocess.run(
            [sys.executable, "-S", "-c", WRAPPER, str(Path(sys.executable).with_name("srl")), *out],
            capture_output=True, text=True, check=True, env=os.environ | {"SRL_WORKSPACE": str(workspace)},
        ).stdout  # fmt: skip
    wall, cpu, memory = json.loads(said)
    return wall, cpu, memory


def sqlite_bytes(run: Path) -> float:
    """The mean size of a trajectory in SQLite, of the first `STEPS` steps."""
    with TemporaryDirectory(dir=run) as place:
        file = Path(place, "log.sqlite")
        with sqlite3.connect(file) as database:
            for table in PARTS:
                _copy(database, run, table)
            [(count,)] = database.execute("SELECT count(*) FROM trajectories").fetchall()
        database.close()
        return file.stat().st_size / count


def _copy(database: sqlite3.Connection, run: Path, table: str) -> None:
    names = PARTS[table].names
    listed = ", ".join(f'"{name}"' for name in names)
    database.execute(f"CREATE TABLE {table} ({listed})")
    found = reading([run], lambda log: rows(log, f"SELECT {listed} FROM raw.{table} WHERE step <= {STEPS}"))
    places = ", ".join("?" * len(names))
    database.executemany(f"INSERT INTO {table} VALUES ({places})", _packed(found))
    key = "id" if table == "trajectories" else "trajectory_id"
    if key in names:
        database.execute(f"CREATE INDEX {table}_{key} ON {table} ({key})")


def _packed(found: Sequence[dict[str, Any]]) -> Iterator[list[object]]:
    for row in found:
        yield [_value(name, value) for name, value in row.items()]


def _value(name: str, value: Any) -> object:
    if name == "token_ids" or (isinstance(value, list) and value and isinstance(value[0], float)):
        return np.asarray(value, np.int32 if name == "token_ids" else np.float32).tobytes()
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value) if name == "written" else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=200_000)
    parser.add_argument("--log", type=Path, default=Path("log-page"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/log_commands.json"))
    parser.add_argument("--running", action="store_true", help="Leave the log in parts.")
    parser.add_argument("--only", help="Names of commands, with commas between; others are kept.")
    given = parser.parse_args()
    run = given.log / "runs" / RUN
    state = ready(run, given.trajectories, given.running)
    chosen = given.only.split(",") if given.only else None
    found = {name: line for name, line in commands(run).items() if not chosen or name in chosen}
    result: dict[str, Any] = saved(given.out).get(state, {}) if chosen else {}
    result.setdefault("commands", {})
    for name, line in found.items():
        result["commands"][name] = measured(line, given.log)
        print(name, result["commands"][name], file=sys.stderr)
    if not chosen:
        count = reading([run], lambda log: log.execute("SELECT count(*) FROM trajectories").fetchall())[0][0]
        disk = sum(file.stat().st_size for file in (run / "log").rglob("*") if file.is_file())
        result |= {
            "trajectories": count,
            "disk_gb": round(disk / 1e9, 2),
            "jsonl_gb": round(jsonl_bytes(run) * count / 1e9, 2),
            "sqlite_gb": round(sqlite_bytes(run) * count / 1e9, 2),
        }
    save(given.out, state, result)


if __name__ == "__main__":
    main()
