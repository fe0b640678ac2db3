"""The description of the run in a log, and whether its writer is still alive."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import FORMAT, MANIFEST, read_manifest, write_manifest
from srl.process import Process
from srl.store.lock import in_use

KIND = "log"
RUNNING = "running"

_EPOCH = datetime(1970, 1, 1)


class DamagedError(UserError):
    """A file of a log has unexpected content."""


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
    `written` (UTC) if it was killed.
    """
    started, earlier_s = run.started or now(), 0.0
    if has_log(log):
        before = load(log)
        check_name(log, run.run_id, before)
        started = before["run"]["started"]
        earlier_s = _worked_s(before, written)
    _write(log, run, started, RUNNING, {"ended": None, "resumed": now(), "earlier_s": earlier_s})


def check_name(log: Path, run_id: str, manifest: Mapping[str, Any]) -> None:
    """Raises UserError for the log of a run that has another name: a directory that was copied or renamed."""
    if (known := manifest["run"]["run_id"]) != run_id:
        raise UserError(
            f"{log.parent} has the log of the run {known}, and a log cannot have two names: give the "
            "directory that name again, or start a new run from its checkpoint: "
            f"srl train --model {log.parent}"
        )


def end(log: Path, run: RunInfo, status: str, error: str = "") -> None:
    """Record the end of the run, and the error that ended it."""
    before = load(log)
    times = {name: before[name] for name in ("resumed", "earlier_s")}
    _write(log, run, before["run"]["started"], status, {"ended": now(), "error": error, **times})


def _write(log: Path, run: RunInfo, started: str, status: str, times: Mapping[str, Any]) -> None:
    """Write the manifest, with this process as the log's writer."""
    config = json.loads(json.dumps(dict(run.config), default=str))
    described = asdict(run) | {"config": config, "started": started}
    payload = {"run": described, "status": status, **times, "writer": asdict(Process.here())}
    write_manifest(log, KIND, payload)


def _worked_s(manifest: Mapping[str, Any], written: datetime | None) -> float:
    """Seconds that a run ran in all its sessions; `written` is the end of a session that was killed."""
    resumed = _resumed(manifest)
    until = _utc(manifest["ended"]) or written or resumed
    return _earlier_s(manifest) + max((until - resumed).total_seconds(), 0.0)


def _resumed(manifest: Mapping[str, Any]) -> datetime:
    """When the last session began; older logs only have the start of the first."""
    return _utc(manifest.get("resumed")) or _utc(manifest["run"]["started"]) or _EPOCH


def _earlier_s(manifest: Mapping[str, Any]) -> float:
    return float(manifest.get("earlier_s") or 0.0)


def has_log(log: Path) -> bool:
    """Whether a log has been started in this directory."""
    return (log / "manifest.json").is_file()


def load(log: Path) -> dict[str, Any]:
    """The manifest of a log. Raises DamagedError if it is missing, damaged, or newer."""
    try:
        manifest = read_manifest(log, KIND)
        _check(manifest)
    except UserError as error:
        raise DamagedError(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{log / MANIFEST}: unexpected content ({error!r})") from error
    return manifest


def _check(manifest: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError for unexpected fields."""
    Process(**manifest["writer"])
    _worked_s(manifest, None)
    run_id = manifest["run"]["run_id"]
    if not isinstance(run_id, str) or not isinstance(manifest["status"], str):
        raise TypeError("run_id and status are texts")
    if run_id in ("", ".", "..") or Path(run_id).name != run_id:
        raise ValueError("run_id is the name of a directory")


def status(manifest: Mapping[str, Any]) -> str:
    """The status of the run: `interrupted` if it is marked as running, but its writer is gone."""
    if manifest["status"] != RUNNING:
        return str(manifest["status"])
    return {True: RUNNING, False: "interrupted", None: "unknown"}[Process(**manifest["writer"]).alive]


def check_not_written(log: Path) -> None:
    """Raise UserError if, by the manifest, another live process writes this log, or a newer srl wrote it.

    The lock says so too, but not on a file system that has none.
    """
    if not has_log(log):
        return
    try:
        manifest = load(log)
    except DamagedError:
        if _is_newer(log):
            raise
        return
    writer = Process(**manifest["writer"])
    if manifest["status"] == RUNNING and writer.pid != os.getpid() and writer.alive:
        raise being_written(log, manifest)


def being_written(log: Path, manifest: Mapping[str, Any]) -> UserError:
    """The error for a log that the process in its manifest writes."""
    since = manifest.get("resumed") or manifest["run"]["started"]
    return in_use(log, "written", Process(**manifest["writer"]), since)


def _is_newer(log: Path) -> bool:
    try:
        found = json.loads((log / MANIFEST).read_bytes())["format"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(found, int) and found > FORMAT


def run_row(log: Path) -> dict[str, Any]:
    """The run's row in the table `runs`."""
    manifest = load(log)
    run = dict(manifest["run"])
    return run | {
        "status": status(manifest),
        "started": _utc(run["started"]),
        "ended": _utc(manifest["ended"]),
        "resumed": _resumed(manifest),
        "earlier_s": _earlier_s(manifest),
        "error": manifest.get("error", ""),
        "config": json.dumps(run["config"], ensure_ascii=False),
        "host": manifest["writer"]["host"],
        "pid": manifest["writer"]["pid"],
        "path": str(log),
    }


def now() -> str:
    """The current time in UTC, as in the manifest."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _utc(stamp: str | None) -> datetime | None:
    if not stamp:
        return None
    moment = datetime.fromisoformat(stamp)
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
