"""Real runs on verl whose parts are killed: each goes on, or ends in one line and goes on when resumed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from starlette.responses import PlainTextResponse
from tests.live_server import free_port, running
from tests.verl_runs import kill, only_run, processes_of, said, srl, wait_until_gone, write_config

from srl.index import build_index, open_index
from srl.serve.server import create_app
from srl.store import reading
from srl.train.resume import how_to_resume, step_to_resume

pytestmark = [pytest.mark.slow, pytest.mark.must_run, pytest.mark.timeout(1800)]
pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

STEPS = 7
LIMIT_S = 600
SMALL = {
    "trainer.total_training_steps": STEPS, "trainer.sample_freq": 0, "trainer.test_freq": STEPS,
    "search.retries": 12, "cluster.agent_workers": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def towns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("towns")
    return folder


def index(towns: Path) -> Path:
    """The index of the towns' corpus."""
    found = towns / "index"
    if not found.is_dir():
        build_index(towns / "corpus.jsonl", found, "bm25", {})
    return found


class Search:
    """`srl serve retriever` at one port, which comes and goes."""

    def __init__(self, index: Path) -> None:
        self.port = free_port()
        self.index, self.url = index, f"http://127.0.0.1:{self.port}/retrieve"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns once it answers: the URL is printed then."""
        code = "import sys; from srl.cli import main; sys.exit(main())"
        typed = ["serve", "retriever", "--index", str(self.index), "--port", str(self.port)]
        command = [sys.executable, "-c", code, *typed]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == self.url

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def answers(self) -> bool:
        try:
            with urlopen(self.url.replace("/retrieve", "/health"), timeout=2):
                return True
        except OSError:
            return False


class Typed:
    """`srl` as it is typed in a terminal, and what it has said so far."""

    def __init__(self, workspace: Path, *arguments: str) -> None:
        self.workspace = workspace
        self.before = len(said(workspace)) if workspace.with_name(f"{workspace.name}.out").exists() else 0
        self.process = srl(*arguments, workspace=workspace)

    @property
    def text(self) -> str:
        return said(self.workspace)[self.before :]

    def reaches(self, step: int) -> None:
        self.until(lambda: f"\nstep {step}/" in self.text)

    def until(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; fails where the process ends before."""
        while not condition():
            try:
                self.process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"it ended too early: {self.text[-4000:]}")

    def ends(self) -> tuple[int, list[str]]:
        """Exit code and all that was said after the last figures."""
        code = self.process.wait(LIMIT_S)
        figures = ("step ", "val at ", "test at ")
        lines = self.text.splitlines()
        last = max(number for number, line in enumerate(lines) if line.startswith(figures))
        return code, lines[last + 1 :]


@contextmanager
def typed(workspace: Path, *arguments: str) -> Iterator[Typed]:
    found = Typed(workspace, *arguments)
    try:
        yield found
    finally:
        kill(found.process)


def end(run: Path, title: str, sent: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to the first of the run's processes whose title begins so; its number."""
    titles = {pid: title_of(pid) for pid in sorted(processes_of(run))}
    pid = next(pid for pid, found in titles.items() if found.startswith(title))
    os.kill(pid, sent)
    return pid


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def counts(run: Path) -> list[tuple[str, int, int, int]]:
    """Of each step and evaluation: episodes, and those that were lost."""
    query = (
        "SELECT phase, step, count(*), sum((NOT valid)::INT) FROM trajectories GROUP BY 1, 2 ORDER BY 1, 2"
    )
    return reading([run], lambda log: log.execute(query).fetchall())


def entries(run: Path) -> list[tuple[str, int]]:
    query = "SELECT phase, step FROM raw.steps ORDER BY ALL"
    return reading([run], lambda log: log.execute(query).fetchall())


def refusing_searches(app: Any) -> Any:
    """A search server that answers the requests without a query of a health check, and no other."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/retrieve":
            await app(scope, receive, send)
            return
        request = await receive()

        async def again() -> Any:
            return request

        refused = json.loads(request["body"])["queries"]
        await (PlainTextResponse("out of order", 500) if refused else app)(scope, again, send)

    return serve


def test_a_validation_whose_searches_fail_ends_the_run(towns, tmp_path):
    workspace = tmp_path / "ws"
    write_config(towns, "grpo")  # corpus and model
    with running(refusing_searches(create_app(open_index(index(towns))))) as url:
        settings = {**SMALL, "search.retries": 0, "search.url": url, "search.max_failed": 0.0}
        file = write_config(towns, "grpo", **settings)
        with typed(workspace, "train", "--backend", "verl", "--algo", "grpo", "--config", str(file)) as begun:
            assert begun.process.wait(LIMIT_S) == 2, begun.text[-4000:]
            last = begun.text.splitlines()[-1]
    run = only_run(workspace)
    assert re.match(r"srl: search failed in \d+ of \d+ episodes, more than search.max_failed=0 \(", last)
    assert entries(run) == [], "a validation without its searches is not in the log"
    wait_until_gone(run)


def test_a_run_outlives_its_search_server_and_goes_on_after_its_processes_died(towns, tmp_path):
    workspace = tmp_path / "ws"
    write_config(towns, "grpo")  # corpus and model
    index(towns)
    search = Search(towns / "index")
    file = write_config(towns, "grpo", **SMALL, **{"search.url": search.url})
    try:
        search.start()
        with typed(workspace, "train", "--backend", "verl", "--algo", "grpo", "--config", str(file)) as first:
            first.reaches(1)
            search.stop()
            assert not search.answers()
            search.start()
            first.reaches(2)
            run = only_run(workspace)
            pid = end(run, "ray::AgentLoopWorker")
            died = f"srl: the rollout worker died (process {pid} on 127.0.0.1)"
            code, said_last = first.ends()
        command = f"`srl --workspace {workspace} train --resume --run {run.name}`"
        go_on = f"resume with {command}"
        assert (code, said_last) == (2, [f"{died}; {go_on}"])
        wait_until_gone(run)
        assert all(lost == 0 for *_, lost in counts(run)), "no search was lost while its server was away"

        with typed(workspace, "train", "--resume") as second:
            second.until(lambda: "\nstep " in second.text)
            os.killpg(second.process.pid, signal.SIGINT)
            code, said_last = second.ends()
            saved = step_to_resume(run, "verl")
            assert (code, said_last) == (130, [f"srl: interrupted; {how_to_resume(run, saved)}"])
        wait_until_gone(run)

        with typed(workspace, "train", "--resume") as third:
            assert third.process.wait(LIMIT_S) == 0, third.text[-4000:]
    finally:
        search.stop()
    wait_until_gone(run)
    trained = [("train", step) for step in range(1, STEPS + 1)]
    assert entries(run) == [("test", 0), ("test", STEPS), *trained, ("val", 0), ("val", STEPS)]
    assert [count for phase, _, count, _ in counts(run) if phase == "train"] == [8] * STEPS
