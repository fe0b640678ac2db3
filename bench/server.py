"""`srl serve retriever` compared with a server built like Search-R1's: throughput and latency, with wrk.

Both serve 300,000 passages made of 2WikiMultihopQA's sentences and answer NQ-open's questions with three
passages each, on loopback: to one client, to 64 clients with one question per request, and to four clients
with batches of 256. The servers run at the same time, warmed up, and are measured in turn; wrk shares the
machine's cores. srl's server is measured with and without its cache (with it, the 3,610 questions repeat).

    python bench/server.py --data ../shared/data        (needs wrk)
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from lexical import build_bm25, build_lucene
from made_passages import made_passages, nq_questions

from srl.data.corpus import write_corpus

RESULT = Path(__file__).parent / "results" / "server.json"
LOADS = {"1 client": (1, 1), "64 clients": (64, 1), "4 clients, batches of 256": (4, 256)}
"""Name → clients, questions per request."""
SERVERS = ("srl, cache off", "srl, cache on", "Search-R1's form")

SCRIPT = """
local bodies, turn = {}, 0
function init(args)
  for line in io.lines(args[1]) do bodies[#bodies + 1] = line end
end
function request()
  turn = turn % #bodies + 1
  return wrk.format("POST", "/retrieve", {["Content-Type"] = "application/json"}, bodies[turn])
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('@{"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "errors": %d}',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def build(corpus: Path, folder: Path) -> None:
    """Both indexes: ours at `folder`/bm25, Lucene's with the texts in it at `folder`/lucene."""
    build_bm25(corpus, folder / "bm25")
    build_lucene(corpus, folder / "lucene", 1, "-storeRaw")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(server: str, folder: Path, port: int) -> list[str]:
    """The command that starts a server; all may use both cores."""
    if server == "Search-R1's form":
        script = Path(__file__).with_name("search_r1_server.py")
        return [sys.executable, str(script), str(folder / "lucene"), str(port)]
    cache = ["--cache-mb", "0"] if server == "srl, cache off" else []
    srl = str(Path(sys.executable).with_name("srl"))
    return [srl, "-q", "serve", "retriever", "--index", str(folder / "bm25"), "--port", str(port), *cache]


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """The URLs of all servers, once they answer; terminates them afterwards."""
    processes, urls = [], {}
    try:
        for server in SERVERS:
            port = free_port()
            processes.append(subprocess.Popen(command(server, folder, port), stdout=subprocess.DEVNULL))
            urls[server] = f"http://127.0.0.1:{port}"
        for url in urls.values():
            await_answer(url)
        yield urls
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def await_answer(url: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            httpx.post(f"{url}/retrieve", json={"queries": ["genoa"]}, timeout=30).raise_for_status()
            return
        except httpx.TransportError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def load(url: str, folder: Path, clients: int, batch: int, seconds: int) -> dict[str, float]:
    """One run of wrk: requests and questions per second, latency of a request in ms."""
    done = subprocess.run(
        ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--timeout", "30s", "-s", str(folder / "load.lua"),
         url, "--", str(folder / f"bodies-{batch}")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    match = re.search(r"@(\{.*\})", done.stdout)
    assert match, done.stdout
    figures = json.loads(match[1])
    rate = figures["requests"] / figures["seconds"]
    return {"requests_per_s": rate, "questions_per_s": rate * batch, "p50_ms": figures["p50_ms"],
            "p99_ms": figures["p99_ms"], "errors": figures["errors"]}  # fmt: skip


def write_bodies(data: Path, folder: Path) -> None:
    questions = nq_questions(data)
    for batch in {batch for _, batch in LOADS.values()}:
        groups = [questions[start : start + batch] for start in range(0, len(questions) - batch + 1, batch)]
        lines = [json.dumps({"queries": group, "topk": 3, "return_scores": True}) for group in groups]
        (folder / f"bodies-{batch}").write_text("\n".join(lines) + "\n")
    (folder / "load.lua").write_text(SCRIPT)


def measure(data: Path, size: int, rounds: int, seconds: int, warm: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="srl-bench-") as name:
        folder = Path(name)
        corpus = folder / "corpus" / "corpus.jsonl"
        write_corpus(corpus, made_passages(data, size))
        build(corpus, folder)
        write_bodies(data, folder)
        runs: dict[str, dict[str, list[dict[str, float]]]] = {
            name: {each: [] for each in SERVERS} for name in LOADS
        }
        with running(folder) as urls:
            for url in urls.values():
                load(url, folder, 4, 256, warm)
            for _ in range(rounds):
                for name, (clients, batch) in LOADS.items():
                    for server, url in urls.items():
                        runs[name][server].append(load(url, folder, clients, batch, seconds))
                        print(name, server, runs[name][server][-1], file=sys.stderr, flush=True)
    return {"passages": size, "rounds": rounds, "seconds": seconds, "loads": {
        name: {server: summary(each) for server, each in of.items()} for name, of in runs.items()
    }}  # fmt: skip


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Median, lowest and highest of each measurement."""
    return {
        name: {
            "median": median(run[name] for run in runs),
            "low": min(run[name] for run in runs),
            "high": max(run[name] for run in runs),
        }
        for name in runs[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--passages", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--warm", type=int, default=15)
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("this needs wrk; on Debian: apt-get install wrk")
    result = measure(arguments.data, arguments.passages, arguments.rounds, arguments.seconds, arguments.warm)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for name, servers in result["loads"].items():
        theirs = servers["Search-R1's form"]
        for server, figures in servers.items():
            ratio = figures["requests_per_s"]["median"] / theirs["requests_per_s"]["median"]
            questions, p50, p99 = (figures[key]["median"] for key in ("questions_per_s", "p50_ms", "p99_ms"))
            print(f"{name:<28}{server:<20}{questions:>9.0f} questions/s ({ratio:.1f}×)  p50 {p50:.1f} ms  "
                  f"p99 {p99:.1f} ms  errors {figures['errors']['high']:.0f}")  # fmt: skip


if __name__ == "__main__":
    main()
