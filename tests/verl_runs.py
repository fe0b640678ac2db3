"""Runs on verl from the command line, for the slow tests: the small world of towns, Ray on this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from tests import training
from tests.training import write_setting

from srl.config.keys import plain
from srl.index import build_index

LIMIT_S = 840
"""For a run of two steps: 100 seconds on two idle cores, most of them to import what it needs."""
VARIABLE = "SRL_VERL_RUN"


def write_config(folder: Path, algo: str, **settings: object) -> Path:
    """A configuration file of a small run on the towns, which `srl train --config` reads."""
    if not (folder / "model").is_dir():
        write_setting(folder)
    found = training.config(folder, algo, **settings)
    path = folder / f"{algo}.yaml"
    path.write_text(yaml.safe_dump({"extends": None, **plain(found.model_dump())}), encoding="utf-8")
    return path


def said(workspace: Path) -> str:
    """What all commands on `workspace` have said so far."""
    out = workspace.with_name(f"{workspace.name}.out")
    return out.read_text(encoding="utf-8") if out.exists() else ""


class Typed:
    """`srl` as it is typed in a terminal, in a process group of its own, and what it has said."""

    def __init__(self, workspace: Path, *arguments: str) -> None:
        self.workspace, self.before = workspace, len(said(workspace))
        environment = {**os.environ, "SRL_WORKSPACE": str(workspace), "OMP_NUM_THREADS": "1"}
        environment.pop(VARIABLE, None)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "srl", *arguments], text=True, env=environment, process_group=0,
            stdout=workspace.with_name(f"{workspace.name}.out").open("a"), stderr=subprocess.STDOUT,
            cwd=workspace.parent,
        )  # fmt: skip

    def __enter__(self) -> "Typed":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(120)

    @property
    def text(self) -> str:
        return said(self.workspace)[self.before :]

    def until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; fails where the process ends before."""
        while not condition():
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"it ended too early: {self.text[-4000:]}")

    def ends(self) -> tuple[int, str]:
        """Exit code and the last line that was said."""
        return self.process.wait(LIMIT_S), self.text.splitlines()[-1]


def finished(*arguments: str, workspace: Path) -> str:
    """What all commands on `workspace` have said, once this one ended well."""
    with Typed(workspace, *arguments) as command:
        assert command.ends()[0] == 0, command.text[-4000:]
    return said(workspace)


def checkpointed(workspace: Path, step: int) -> bool:
    """Whether verl has named a checkpoint of `step` or later the latest."""
    markers = list(workspace.glob("runs/*/checkpoints/latest_checkpointed_iteration.txt"))
    return bool(markers) and int(markers[0].read_text() or 0) >= step


def processes_of(run: Path) -> list[int]:
    """The processes that belong to a run: those with its directory in their environment."""
    mark = f"{VARIABLE}={run.resolve()}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in place.read_bytes().split(b"\0"):
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


def wait_until_gone(run: Path) -> None:
    """Until no process of the run is left: some die just after the one that started them."""
    deadline = time.monotonic() + 240
    while left := processes_of(run):
        assert time.monotonic() < deadline, f"processes of the run are left: {left}"
        time.sleep(0.2)


def index_of(towns: Path) -> Path:
    """The index of the towns' corpus."""
    if not (towns / "index").is_dir():
        build_index(towns / "corpus.jsonl", towns / "index", "bm25", {})
    return towns / "index"


def end(run: Path, title: str) -> int:
    """Kill the first of the run's processes whose title begins so; its number."""
    pid = next(pid for pid in sorted(processes_of(run)) if title_of(pid).startswith(title))
    os.kill(pid, signal.SIGKILL)
    return pid


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
