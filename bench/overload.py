"""`srl serve retriever` under overload: 500 clients, some of them slow or disconnecting.

For a minute 400 clients send requests without a pause, 50 send their bodies one byte at a time, and 50
disconnect before the answer. Every request of the 400 must get an answer (200, or 503 if the queue is full),
the server's memory must not grow, and one second after the load ends a single client must get its answers as
fast as before.

    python bench/overload.py --data ../shared/data
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from lexical import OPTIONS
from made_passages import nq_questions
from server import await_answer, free_port, write_corpus

RESULT = Path(__file__).parent / "results" / "overload.json"
GREEDY, SLOW, DYING = 400, 50, 50
HEAD = "POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


class Crowd:
    """The clients; `answers` counts statuses, `lost` the requests of greedy clients without an answer."""

    def __init__(self, port: int, questions: list[str]) -> None:
        self._port, self._questions = port, questions
        self.answers: Counter[int] = Counter()
        self.lost: Counter[str] = Counter()
        self.sent = 0

    def _request(self, number: int) -> bytes:
        query = self._questions[number % len(self._questions)]
        body = json.dumps({"queries": [query], "topk": 3, "return_scores": True}).encode()
        return HEAD.format(len(body)).encode() + body

    async def greedy(self, client: int, end: float) -> None:
        """Send requests one after the other; reconnect if the server closed the connection."""
        number, streams = client * 97, None
        while time.monotonic() < end:
            try:
                streams = streams or await asyncio.open_connection("127.0.0.1", self._port)
            except OSError as error:
                self.lost[f"no connection: {type(error).__name__}"] += 1
                await asyncio.sleep(0.05)
                continue
            self.sent += 1
            number += 1
            try:
                streams[1].write(self._request(number))
                status, again = await asyncio.wait_for(_answer(streams[0]), 60)
                self.answers[status] += 1
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self.lost[type(error).__name__] += 1
                again = False
            if not again:
                streams[1].close()
                streams = None
        if streams:
            streams[1].close()

    async def slow(self, client: int, end: float) -> None:
        """Send a body one byte at a time, until the server closes the connection."""
        while time.monotonic() < end:
            with contextlib.suppress(OSError, EOFError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                for byte in self._request(client):
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.2)
                    if time.monotonic() > end:
                        break
                writer.close()
            await asyncio.sleep(0.2)

    async def dying(self, client: int, end: float) -> None:
        """Send half a request or a whole one, then disconnect."""
        number = client
        while time.monotonic() < end:
            number += 1
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                request = self._request(number)
                writer.write(request if number % 2 else request[: len(request) // 2])
                await writer.drain()
                writer.transport.abort()
            await asyncio.sleep(0.1)

    async def come(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        kinds = [(self.greedy, GREEDY), (self.slow, SLOW), (self.dying, DYING)]
        await asyncio.gather(*(kind(client, end) for kind, count in kinds for client in range(count)))


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """The status of a whole answer, and whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    await reader.readexactly(int(lines["content-length"]))
    return int(head.split()[1]), lines.get("connection") != "close"


def resident_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10


async def lone(port: int, questions: list[str], count: int = 50) -> list[float]:
    """Seconds of each of `count` sequential requests of one client."""
    crowd, seconds = Crowd(port, questions), []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for number in range(count):
        begin = time.perf_counter()
        writer.write(crowd._request(number))
        status, _ = await _answer(reader)
        if status != 200:
            raise SystemExit(f"a single client got status {status}")
        seconds.append(time.perf_counter() - begin)
    writer.close()
    return seconds


async def measure(port: int, pid: int, questions: list[str], seconds: float) -> dict[str, Any]:
    before = await lone(port, questions)
    crowd = Crowd(port, questions)
    load, memory = asyncio.create_task(crowd.come(seconds)), []
    while not load.done():
        memory.append(resident_mib(pid))
        await asyncio.wait([load], timeout=1)
    load.result()
    begin = time.perf_counter()
    first = (await lone(port, questions, 1))[0]
    recovered = time.perf_counter() - begin
    after = await lone(port, questions)
    return {
        "seconds": seconds, "clients": {"greedy": GREEDY, "slow": SLOW, "dying": DYING}, "sent": crowd.sent,
        "answers": dict(sorted(crowd.answers.items())), "lost": dict(crowd.lost),
        "memory_mib": {"first_tenth": max(memory[: len(memory) // 10 + 1]), "highest": max(memory),
                       "last": memory[-1]},
        "recovery_s": recovered, "first_answer_ms": first * 1e3,
        "lone_p50_ms": {"before": median(before) * 1e3, "after": median(after) * 1e3},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--passages", type=int, default=300_000)
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args()
    from srl.index import build_index

    with tempfile.TemporaryDirectory(prefix="srl-bench-") as name:
        folder = Path(name)
        corpus = write_corpus(asked.data, asked.passages, folder)
        build_index(corpus, folder / "bm25", "bm25", OPTIONS)
        srl, port = str(Path(sys.executable).with_name("srl")), free_port()
        command = [srl, "-q", "serve", "retriever", "--index", str(folder / "bm25"), "--port", str(port)]
        server = subprocess.Popen([*command, "--cache-mb", "0"], stdout=subprocess.DEVNULL)
        try:
            await_answer(f"http://127.0.0.1:{port}")
            found = asyncio.run(measure(port, server.pid, nq_questions(asked.data), asked.seconds))
        finally:
            server.terminate()
            server.wait()
    RESULT.write_text(json.dumps({"passages": asked.passages, **found}, indent=2) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
