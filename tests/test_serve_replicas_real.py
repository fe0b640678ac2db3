"""`srl serve retriever --replicas` as it is typed: real processes that die, are started again, and end."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from srl.cli import main
from srl.index import build_index
from srl.serve import HttpSearch
from srl.trajectory import Passage, Search

pytestmark = pytest.mark.slow
QUERIES = 200


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("index") / "i"
    build_index([Passage(str(row), f'"T"\nred fox {row}') for row in range(QUERIES)], directory)
    return directory


@contextmanager
def serving(directory: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, once it takes requests; killed at the end if it still runs."""
    command = [sys.executable, "-c", "import sys; from srl.cli import main; sys.exit(main())"]
    command += ["serve", "retriever", "--index", str(directory), "--port", "0", "--replicas", "2", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def health(url: str) -> dict[str, Any]:
    with urlopen(url.replace("/retrieve", "/health")) as answer:
        return dict(json.load(answer))


def again_whole(url: str) -> list[dict[str, Any]]:
    """The replicas, once the first has been started again and all answer."""
    while True:
        with suppress(OSError):  # a connection may go to one that has just died
            found = health(url)
            if found["status"] == "ok" and found["replicas"][0]["starts"] > 1:
                return list(found["replicas"])


def pids(url: str) -> list[int]:
    return [one["pid"] for one in health(url)["replicas"]]


def wait_for_the_end(pids: list[int]) -> None:
    """Of processes that are not ours to wait for."""
    for pid in pids:
        with suppress(ProcessLookupError):
            end = os.pidfd_open(pid)
            assert select.select([end], [], [], 60)[0], f"{pid} still runs"
            os.close(end)


def searches(url: str, numbers: range, pause: threading.Event | None = None) -> list[Search]:
    """A query for each number, sixteen at a time, each in a request of its own."""

    async def ask() -> list[Search]:
        search, room = HttpSearch(url, max_batch=1), asyncio.Semaphore(16)

        async def one(number: int) -> Search:
            async with room:
                if pause is not None and number == QUERIES // 4:
                    pause.set()
                return await search.search(f"fox {number}")

        try:
            return await asyncio.gather(*map(one, numbers))
        finally:
            await search.aclose()

    return asyncio.run(ask())


@pytest.mark.must_run
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_replicas_answer_at_one_port_and_all_end_with_a_signal(directory, sent, code):
    with serving(directory, "--log-json") as (process, url):
        whole = health(url)
        assert (whole["status"], whole["passages"], len(whole["replicas"])) == ("ok", QUERIES, 2)
        assert main(["serve", "check", url, "--query", "red fox", "--query", "fox"]) == 0
        assert {one.status for one in searches(url, range(40))} == {"ok"}
        running = pids(url)
        process.send_signal(sent)
        _, err = process.communicate(timeout=120)
    assert process.returncode == code
    wait_for_the_end(running)
    notes = [line for line in err.splitlines() if not line.startswith("{")]
    assert notes[0].startswith(f"serving {QUERIES} passages by bm25, index ")
    assert notes[0].endswith(", 2 replicas")
    assert notes[1:] == ["srl: interrupted" if code == 130 else "srl: terminated"]
    logged = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert set(Counter(one["replica"] for one in logged)) == {1, 2}


def test_replicas_answer_no_request_to_another_host(directory):
    with serving(directory) as (_, url):
        for _ in range(4):
            with pytest.raises(HTTPError, match="403"):
                urlopen(Request(url.replace("/retrieve", "/health"), headers={"Host": "example.com"}))
        assert health(url)["status"] == "ok"


@pytest.mark.must_run
def test_a_replica_that_is_killed_costs_no_search_and_comes_back(directory):
    with serving(directory) as (process, url):
        first, second = pids(url)
        quarter = threading.Event()

        def kill() -> None:
            quarter.wait(120)
            os.kill(first, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        found = searches(url, range(QUERIES), quarter)
        killer.join()
        assert {one.status for one in found} == {"ok"}
        now = again_whole(url)
        assert [one["starts"] for one in now] == [2, 1]
        assert (now[0]["pid"] != first, now[1]["pid"]) == (True, second)
        process.terminate()
        _, err = process.communicate(timeout=120)
    assert "replica 1 of 2 was ended by SIGKILL" in err


def test_no_replica_outlives_the_one_that_started_it(directory):
    with serving(directory) as (process, url):
        running = pids(url)
        process.kill()
        process.wait()
        wait_for_the_end(running)


def test_an_index_that_a_replica_cannot_open_is_one_line_and_exit_code_2(directory):
    with serving(directory, "--set", "n_threads=0") as (process, url):
        _, err = process.communicate(timeout=120)
    assert (url, process.returncode) == ("", 2)
    assert len(err.splitlines()) == 1
    assert "n_threads" in err


def test_metrics_of_all_replicas_count_every_request_with_the_token(directory, monkeypatch):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", "s3cret")
    with serving(directory) as (process, url):
        assert {one.status for one in searches(url, range(60))} == {"ok"}
        page = url.replace("/retrieve", "/metrics")
        with pytest.raises(HTTPError, match="401"):
            urlopen(page)
        with urlopen(Request(page, headers={"Authorization": "Bearer s3cret"})) as answer:
            found = {one.name: one.samples for one in text_string_to_metric_families(answer.read().decode())}
        command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (*pids(url), process.pid)]
        process.terminate()
        process.communicate(timeout=120)
    counted = {
        one.labels["replica"]: one.value
        for one in found["srl_search_queries"]
        if one.name == "srl_search_queries_total"
    }
    assert sum(counted.values()) == 60
    assert set(counted) == {"1", "2"}
    assert [one.value for one in found["srl_search_replica_up"]] == [1.0, 1.0]
    assert not any(b"s3cret" in line for line in command_lines)
