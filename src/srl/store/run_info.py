"""What a log says of its run, and whether its writer still lives."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import read_manifest, write_manifest

KIND = "log"
RUNNING = "running"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Which run a log is of. `started` is UTC in ISO format; `parent` the run it came from."""

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


@dataclass(frozen=True, slots=True)
class Writer:
    """A process; `since` tells it from a later one with the same number."""

    host: str
    pid: int
    since: str

    @classmethod
    def here(cls) -> Writer:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _since(os.getpid()))

    @property
    def alive(self) -> bool | None:
        """Whether it still runs; None on another machine, where nobody can tell."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return not self.since or _since(self.pid) == self.since


def _since(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return stat.rpartition(b")")[2].split()[19].decode()


def save(log: Path, run: RunInfo, status: str, ended: str | None = None) -> None:
    """Write the log's manifest, with this process as its writer; a run taken up again keeps its start."""
    started = load(log)["run"]["started"] if has_log(log) else run.started
    config = json.loads(json.dumps(dict(run.config), default=str))
    described = asdict(run) | {"config": config, "started": started or now()}
    write_manifest(
        log, KIND, {"run": described, "status": status, "ended": ended, "writer": asdict(Writer.here())}
    )


def has_log(log: Path) -> bool:
    """Whether a log has been started in this directory."""
    return (log / "manifest.json").is_file()


def load(log: Path) -> dict[str, Any]:
    """The manifest of a log. Raises UserError where there is none, or a newer one."""
    return read_manifest(log, KIND)


def status(manifest: Mapping[str, Any]) -> str:
    """What has become of the run: `interrupted` where it says that it runs and its writer is gone."""
    if manifest["status"] != RUNNING:
        return str(manifest["status"])
    return {True: RUNNING, False: "interrupted", None: "unknown"}[Writer(**manifest["writer"]).alive]


def claim(log: Path) -> None:
    """Raise UserError when another living process writes this log."""
    if not has_log(log):
        return
    manifest = load(log)
    writer = Writer(**manifest["writer"])
    if manifest["status"] == RUNNING and writer.pid != os.getpid() and writer.alive:
        raise UserError(
            f"{log} is being written by process {writer.pid}; wait for it to end, or stop it, before resuming"
        )


def run_row(log: Path) -> dict[str, Any]:
    """The run's row in the table `runs`."""
    manifest = load(log)
    run = dict(manifest["run"])
    return run | {
        "status": status(manifest),
        "started": _utc(run["started"]),
        "ended": _utc(manifest["ended"]),
        "config": json.dumps(run["config"], ensure_ascii=False),
        "host": manifest["writer"]["host"],
        "pid": manifest["writer"]["pid"],
        "path": str(log),
    }


def now() -> str:
    """The present in UTC, as the manifest writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _utc(stamp: str | None) -> datetime | None:
    if not stamp:
        return None
    moment = datetime.fromisoformat(stamp)
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
