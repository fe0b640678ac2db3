"""Merging: the runs of several machines or workspaces as one folder of runs, each with one finished log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from srl.errors import UserError
from srl.files import MANIFEST, atomic_directory, write_manifest
from srl.store import run_info
from srl.store.database import in_one_line
from srl.store.finished import write_database
from srl.store.parts import FINISHED, PARTS_DIRECTORY, live_parts
from srl.store.reader import existing_logs, reading
from srl.store.rescores import DIRECTORY as RESCORES
from srl.store.rescores import read_rescores, rescore_files, writing_rescores
from srl.store.watches import read_watches, write_watches
from srl.workspace import EVALUATION


@dataclass(frozen=True, slots=True)
class Merged:
    """A run of the merged folder, and from how many logs it came."""

    run_id: str
    logs: int
    steps: int
    trajectories: int


def merge_logs(sources: Sequence[Path], out: Path) -> list[Merged]:
    """Write every run at `sources` (runs, folders of runs, workspaces) to `runs/` in the new directory `out`.

    Logs of one run, from several machines, become one. The sources are only read, without a lock: a run can
    be resumed meanwhile. Raises UserError, and writes nothing, if one of them is being written or changes
    meanwhile, or two clash: other runs of the same name, or the same step in both.
    """
    found = dict.fromkeys(log.resolve() for source in sources for log in existing_logs(source))
    with _unchanged(list(found)) as check:
        by_run: dict[str, list[Path]] = {}
        for log in found:
            manifest = run_info.load(log)
            if run_info.status(manifest) == run_info.RUNNING:
                raise run_info.being_written(log, manifest)
            by_run.setdefault(manifest["run"]["run_id"], []).append(log)
        for run_id, logs in by_run.items():
            _check_same_run(run_id, logs)
            _check_disjoint(run_id, logs)
        with atomic_directory(out) as directory:
            for run_id, logs in by_run.items():
                _write_run(directory / "runs" / run_id / "log", logs)
            check()
    return [_merged(run_id, logs, out) for run_id, logs in by_run.items()]


@contextmanager
def _unchanged(logs: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """Inside, the function raises UserError if one of `logs` has changed; also in place of other errors."""
    before = {log: _state(log) for log in logs}

    def check() -> None:
        if changed := next((log for log in logs if _state(log) != before[log]), None):
            raise UserError(
                f"{changed} was resumed, finished or pruned while it was merged; nothing is written; repeat "
                "the command when that has ended, or leave it out"
            )

    try:
        yield check
    except Exception:
        check()
        raise


def _state(log: Path) -> object:
    """What is another after a resume, a finish and a prune: the manifest, and the database or the parts."""
    manifest = (log / MANIFEST).read_bytes()
    with suppress(FileNotFoundError):
        stat = (log / FINISHED).stat()
        return manifest, stat.st_ino, stat.st_mtime_ns
    return manifest, [part.path.name for part in live_parts(log / PARTS_DIRECTORY, strict=False)]


def _check_same_run(run_id: str, logs: Sequence[Path]) -> None:
    """Raise UserError if these logs are not of one run. It may have gone on with other settings, elsewhere,
    where its model, index and workspace have other paths."""
    first, *others = (_identity(run_info.load(log)["run"]) for log in logs)
    for log, other in zip(logs[1:], others, strict=True):
        if changed := sorted(name for name in first if first[name] != other.get(name)):
            raise UserError(
                f"two runs are called {run_id}, in {logs[0].parent} and {log.parent}: they differ in "
                f"{', '.join(changed)}; nothing is written; merge them into two directories"
            )


def _identity(run: Mapping[str, Any]) -> dict[str, Any]:
    """What a run has wherever it goes on."""
    kept = {name: run[name] for name in ("started", "preset", "algo", "seed", "parent")}
    return kept | {"model": Path(run["model"]).name}


def _check_disjoint(run_id: str, logs: Sequence[Path]) -> None:
    """Raise UserError if two logs have the same step, or of an evaluation the same trajectory."""
    seen: dict[tuple[object, ...], Path] = {}
    for log in logs if len(logs) > 1 else ():
        for key in reading([log], _keys):
            if key in seen:
                step, phase, *trajectory = key
                what = f"trajectory {trajectory[0]}" if trajectory else f"{phase} step {step}"
                raise UserError(
                    f"{run_id}: {what} is in {seen[key].parent} and in {log.parent}; nothing is written; "
                    "leave one of them out"
                )
            seen[key] = log


def _keys(connection: duckdb.DuckDBPyConnection) -> list[tuple[object, ...]]:
    """What only one log of a run may have: steps, and trajectories of evaluations."""
    steps = "SELECT DISTINCT step, phase FROM raw.steps WHERE phase <> $evaluation ORDER BY ALL"
    of_evaluation = "SELECT step, phase, id FROM raw.trajectories WHERE phase = $evaluation ORDER BY ALL"
    return [
        key
        for query in (steps, of_evaluation)
        for key in connection.execute(query, {"evaluation": EVALUATION}).fetchall()
    ]


def _write_run(log: Path, logs: Sequence[Path]) -> None:
    """Write one finished log of all `logs`, with the manifest of the one that was written last."""
    log.mkdir(parents=True)
    latest = run_info.load(max(logs, key=_began))
    payload: dict[str, Any] = {name: latest[name] for name in latest if name not in ("format", "kind")}
    write_manifest(log, run_info.KIND, payload)
    try:
        write_database(log / FINISHED, run_info.run_row(log), logs)
    except (duckdb.Error, pa.ArrowException) as error:
        raise UserError(f"{', '.join(map(str, logs))}: {in_one_line(error)}") from error
    write_watches(log, latest["run"]["run_id"], _fired(sorted(logs, key=_began)))
    for name in sorted({file.name for one in logs for file in rescore_files(one)}):
        with writing_rescores(log / RESCORES / name) as write:
            for one in logs:
                write(read_rescores(one / RESCORES / name))


def _began(log: Path) -> str:
    """When the last session that wrote a log began."""
    manifest = run_info.load(log)
    return str(manifest.get("resumed") or manifest["run"]["started"])


def _fired(logs: Sequence[Path]) -> list[dict[str, Any]]:
    """The watches of all logs, in the order in which they fired.

    A run that went on elsewhere knows what had fired until then, so its log begins with the same rows.
    """
    fired: list[dict[str, Any]] = []
    earlier: list[list[dict[str, Any]]] = []
    for log in logs:
        found = read_watches(log).drop_columns(["run_id", "number"]).to_pylist()
        fired += found[max((_shared(found, other) for other in earlier), default=0) :]
        earlier.append(found)
    return fired


def _shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of their first rows two lists have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _merged(run_id: str, logs: Sequence[Path], out: Path) -> Merged:
    query = "SELECT count(DISTINCT (step, phase)), (SELECT count(*) FROM raw.trajectories) FROM raw.steps"
    [(steps, trajectories)] = reading([out / "runs" / run_id], lambda log: log.execute(query).fetchall())
    return Merged(run_id, len(logs), steps, trajectories)
