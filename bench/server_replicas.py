"""`srl serve retriever` with one and with two replicas: questions per second, memory, bytes on the wire.

BM25 over 300,000 passages made of 2WikiMultihopQA's sentences answers NQ-open's questions with three passages
each, on loopback, without the cache. Three servers run at the same time, warmed up, and are measured in turn
with wrk: one replica on one core with the load on another, which gives questions per second per core; and one
and two replicas on all cores, which they share with the load. On two cores that last comparison shows what a
second process costs without a separate core, not its gain with one. Questions per second of the server's
own CPU time, over all its processes, depend little on other load of the machine.

    python bench/server_replicas.py --data ../shared/data        (needs wrk and taskset)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from lexical import OPTIONS
from made_passages import nq_questions
from server import SCRIPT, await_answer, free_port, load, summary, write_corpus

RESULT = Path(__file__).parent / "results" / "server_replicas.json"
LOADS = {"64 clients": (64, 1), "4 clients, batches of 128": (4, 128)}
"""Name → clients, questions per request; srl's client sends at most 128 at a time."""
ONE_CORE, ONE, TWO = "1 replica, 1 core", "1 replica, all cores", "2 replicas, all cores"
SERVERS = {ONE_CORE: 1, ONE: 1, TWO: 2}
"""Name → replicas."""


@contextmanager
def running(index: Path) -> Iterator[dict[str, tuple[str, int]]]:
    """URL and process id of each server, once they answer."""
    started: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
    srl = str(Path(sys.executable).with_name("srl"))
    try:
        for name, replicas in SERVERS.items():
            port = free_port()
            command = [srl, "-q", "serve", "retriever", "--index", str(index), "--port", str(port)]
            command += ["--cache-mb", "0", "--replicas", str(replicas)]
            pinned = ["taskset", "-c", "0"] if name == ONE_CORE else []
            process = subprocess.Popen([*pinned, *command], stdout=subprocess.DEVNULL)
            started[name] = f"http://127.0.0.1:{port}", process
        for url, _ in started.values():
            await_answer(url)
        yield {name: (url, process.pid) for name, (url, process) in started.items()}
    finally:
        for _, process in started.values():
            process.terminate()
        for _, process in started.values():
            process.wait()


@contextmanager
def pinned(server: str) -> Iterator[None]:
    """The load on a core of its own, where the server has one."""
    cores = os.sched_getaffinity(0)
    if server == ONE_CORE:
        os.sched_setaffinity(0, cores - {0})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def processes(url: str, pid: int) -> dict[str, int]:
    """The processes of a server by what they are."""
    replicas = httpx.get(f"{url}/health").json().get("replicas")
    if replicas is None:
        return {"server": pid}
    return {"parent": pid} | {f"replica {one['replica']}": one["pid"] for one in replicas}


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds of CPU time that these processes have had."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def run(server: str, url: str, pid: int, folder: Path, name: str, seconds: int) -> dict[str, float]:
    """One load of a server: what wrk saw, and questions for each second of the server's CPU time."""
    pids = processes(url, pid).values()
    with pinned(server):
        before = cpu_s(pids)
        found = load(url, folder, *LOADS[name], seconds)
        used = cpu_s(pids) - before
    return found | {"cpus": used / seconds, "questions_per_cpu_s": found["questions_per_s"] * seconds / used}


def memory_mib(pid: int) -> dict[str, float]:
    """What a process holds alone, and what it maps and may share: after the load, so all of it is in use."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    alone = kib["Private_Clean"] + kib["Private_Dirty"]
    return {
        "alone": round(alone / 1024, 1),
        "shared": round((kib["Rss"] - alone) / 1024, 1),
        "proportional": round(kib["Pss"] / 1024, 1),
    }


def memory(servers: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Of each process of each server."""
    return {
        name: {what: memory_mib(each) for what, each in processes(url, pid).items()}
        for name, (url, pid) in servers.items()
    }


def wire(url: str, questions: list[str]) -> dict[str, float]:
    """Medians over questions asked alone, as our client sends them: bytes of HTTP, without TCP's own."""
    asked, heads, answered, answer_heads, texts = [], [], [], [], []
    with httpx.Client() as client:
        for question in questions:
            body = json.dumps({"queries": [question], "topk": 3, "return_scores": True}).encode()
            response = client.post(
                f"{url}/retrieve", content=body, headers={"Content-Type": "application/json"}
            )
            asked.append(len(body))
            heads.append(_head("POST /retrieve HTTP/1.1", response.request.headers))
            answered.append(len(response.content))
            answer_heads.append(_head("HTTP/1.1 200 OK", response.headers))
            hits = response.json()["result"][0]
            texts += [len(hit["document"]["contents"].encode()) for hit in hits]
    return {
        "request_body": median(asked), "request_headers": median(heads),
        "answer_body": median(answered), "answer_headers": median(answer_heads),
        "passage": median(texts),
    }  # fmt: skip


def _head(first: str, headers: httpx.Headers) -> int:
    return len(first) + 4 + sum(len(name) + len(value) + 4 for name, value in headers.raw)


def write_bodies(questions: list[str], folder: Path) -> None:
    for batch in {batch for _, batch in LOADS.values()}:
        groups = [questions[start : start + batch] for start in range(0, len(questions) - batch + 1, batch)]
        lines = [json.dumps({"queries": group, "topk": 3, "return_scores": True}) for group in groups]
        (folder / f"bodies-{batch}").write_text("\n".join(lines) + "\n")
    (folder / "load.lua").write_text(SCRIPT)


def built(data: Path, size: int, folder: Path, index: Path | None) -> Path:
    """An index of `size` made passages: the one given, else one that is built."""
    from srl.index import build_index, read_index_manifest

    if index is None:
        index = folder / "bm25"
        build_index(write_corpus(data, size, folder), index, "bm25", OPTIONS)
    assert read_index_manifest(index).passages == size
    return index


def measure(
    data: Path, size: int, given: Path | None, rounds: int, seconds: int, warm: int
) -> dict[str, Any]:
    questions = nq_questions(data)
    runs: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {server: [] for server in SERVERS} for name in LOADS
    }
    with tempfile.TemporaryDirectory(prefix="srl-bench-") as name:
        folder = Path(name)
        index = built(data, size, folder, given)
        write_bodies(questions, folder)
        before = os.getloadavg()
        with running(index) as servers:
            for url, _ in servers.values():
                load(url, folder, 4, 128, warm)
            for _ in range(rounds):
                for name in LOADS:
                    for server, (url, pid) in servers.items():
                        runs[name][server].append(run(server, url, pid, folder, name, seconds))
                        print(name, server, runs[name][server][-1], file=sys.stderr, flush=True)
            found = {"memory_mib": memory(servers), "wire_bytes": wire(servers[ONE][0], questions[:500])}
        size_mib = sum(file.stat().st_size for file in index.rglob("*")) / 2**20
    return {
        "passages": size, "index_mib": round(size_mib, 1), "cores": len(os.sched_getaffinity(0)),
        "load_average_before": before[0], "rounds": rounds, "seconds": seconds,
        "loads": {name: {server: summary(each) for server, each in of.items()} for name, of in runs.items()},
        **found,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--passages", type=int, default=300_000)
    parser.add_argument("--index", type=Path, help="of these passages, where it is built already")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--warm", type=int, default=8)
    asked = parser.parse_args()
    for tool in ("wrk", "taskset"):
        if shutil.which(tool) is None:
            raise SystemExit(f"this needs {tool}; on Debian: apt-get install wrk util-linux")
    found = measure(asked.data, asked.passages, asked.index, asked.rounds, asked.seconds, asked.warm)
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    for name, servers in found["loads"].items():
        for server, figures in servers.items():
            keys = ("questions_per_s", "questions_per_cpu_s", "p50_ms", "p99_ms")
            questions, of_core, p50, p99 = (figures[key]["median"] for key in keys)
            print(f"{name:<28}{server:<24}{questions:>9.0f} questions/s  {of_core:>9.0f} for a CPU second  "
                  f"p50 {p50:.1f} ms  p99 {p99:.1f} ms  errors {figures['errors']['high']:.0f}")  # fmt: skip
    print(json.dumps({"memory_mib": found["memory_mib"], "wire_bytes": found["wire_bytes"]}, indent=2))


if __name__ == "__main__":
    main()
