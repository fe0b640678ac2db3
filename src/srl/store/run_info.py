"""The manifest of a log: which run it is of, how the run ended, and whether its writer is still alive."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import MANIFEST, DamagedError, read_manifest, write_manifest
from srl.process import Process

KIND = "log"
RUNNING, FINISHED = "running", "finished"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run of a log. `started` is UTC in ISO format; `parent` is the run it came from."""

    run_id: str
    preset: str = ""
    algo: str = ""
    seed: int = 0
    model: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    index_digest: str = ""
    srl_version: str = ""
    started: str = ""
    parent: str = ""


def begin(log: Path, run: RunInfo, written: datetime | None) -> None:
    """Write the manifest of a log that this process starts or resumes.

    A resumed run keeps its start, and the seconds that it ran until it ended, or until its last step was
    `written` (UTC) if it was killed. Raises UserError for the log of a run of another name.
    """
    times: dict[str, Any] = {"ended": None, "resumed": now(), "earlier_s": 0.0}
    started = run.started or now()
    if has_log(log):
        before = load(log)
        check_name(log, run.run_id, before)
        started = before["run"]["started"]
        until = _utc(before["ended"]) or written or _resumed(before)
        worked_s = max((until - _resumed(before)).total_seconds(), 0.0)
        times |= {"earlier_s": before.get("earlier_s", 0.0) + worked_s, "watches": before.get("watches", [])}
    _write(log, run, started, RUNNING, times)


def check_name(log: Path, run_id: str, manifest: Mapping[str, Any]) -> None:
    """Raises UserError for the log of a run that has another name: a directory that was copied or renamed."""
    if (name := manifest["run"]["run_id"]) != run_id:
        raise UserError(
            f"{log.parent} has the log of the run {name}, and a log cannot have two names",
            hint="give the directory that name again, or start a new run from its checkpoint: "
            f"srl train --model {log.parent}",
        )


def end(log: Path, run: RunInfo, status: str, error: str = "") -> None:
    """Record the end of the run, and the error that ended it."""
    before = load(log)
    times: dict[str, Any] = {n: before[n] for n in ("resumed", "earlier_s", "watches") if n in before}
    _write(log, run, before["run"]["started"], status, {"ended": now(), "error": error, **times})


def write_watches(log: Path, fired: Sequence[Mapping[str, Any]]) -> None:
    """Replace the watches that fired, in order; a run that is rolled back keeps the reason."""
    write_manifest(log, KIND, load(log) | {"watches": list(fired)})


def _write(log: Path, run: RunInfo, started: str, status: str, times: Mapping[str, Any]) -> None:
    """Write the manifest, with this process as the log's writer."""
    config = json.loads(json.dumps(dict(run.config), default=str))
    fields = asdict(run) | {"config": config, "started": started}
    payload = {"run": fields, "status": status, **times, "writer": asdict(Process.here())}
    write_manifest(log, KIND, payload)


def has_log(log: Path) -> bool:
    """Whether a log has been started in this directory."""
    return (log / MANIFEST).is_file()


def load(log: Path) -> dict[str, Any]:
    """The manifest of a log. Raises DamagedError if it is missing, is damaged, or has another format."""
    try:
        manifest = read_manifest(log, KIND)
        Process(**manifest["writer"])
        _resumed(manifest)
        _utc(manifest["ended"])
        if not all(isinstance(text, str) for text in (manifest["run"]["run_id"], manifest["status"])):
            raise TypeError("run_id and status are texts")
    except UserError as error:
        raise DamagedError(error) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{log / MANIFEST}: unexpected content ({error!r})") from error
    return manifest


def status(manifest: Mapping[str, Any]) -> str:
    """The status of the run: `interrupted` if it is marked as running, but its writer is gone."""
    if manifest["status"] != RUNNING:
        return str(manifest["status"])
    return {True: RUNNING, False: "interrupted", None: "unknown"}[Process(**manifest["writer"]).alive]


def is_finished(log: Path) -> bool:
    """Whether there is a log, and its run has come to its end."""
    return has_log(log) and load(log)["status"] == FINISHED


def check_not_written(log: Path) -> None:
    """Raises UserError if, by the manifest, another live process writes this log.

    The lock says so too, but not on a file system that has none.
    """
    manifest = load(log) if has_log(log) else {}
    if manifest.get("status") != RUNNING:
        return
    writer = Process(**manifest["writer"])
    if writer.pid != os.getpid() and writer.alive:
        raise UserError(f"{log} is being written by {writer}", hint="wait for it to end, or stop it")


def run_row(log: Path) -> dict[str, Any]:
    """The run's row in the table `runs`."""
    manifest = load(log)
    run = dict(manifest["run"])
    return run | {
        "status": status(manifest),
        "started": _utc(run["started"]),
        "ended": _utc(manifest["ended"]),
        "resumed": _resumed(manifest),
        "earlier_s": manifest.get("earlier_s", 0.0),
        "error": manifest.get("error", ""),
        "config": json.dumps(run["config"], ensure_ascii=False),
        "host": manifest["writer"]["host"],
        "pid": manifest["writer"]["pid"],
        "path": str(log),
    }


def watch_rows(log: Path) -> list[dict[str, Any]]:
    """The run's rows in the table `watches`."""
    manifest = load(log)
    of_run = {"run_id": manifest["run"]["run_id"]}
    return [of_run | {"number": n, **fired} for n, fired in enumerate(manifest.get("watches", []), start=1)]


def now() -> str:
    """The current time in UTC, as in the manifest."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _resumed(manifest: Mapping[str, Any]) -> datetime:
    """When the last session began (UTC)."""
    moment = _utc(manifest.get("resumed")) or _utc(manifest["run"]["started"])
    if moment is None:
        raise ValueError("the run has no start")
    return moment


def _utc(stamp: str | None) -> datetime | None:
    if not stamp:
        return None
    moment = datetime.fromisoformat(stamp)
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
