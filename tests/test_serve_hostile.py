"""Clients that die or send what nobody should, and more of them than there is room for."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.live_server import running

from srl.index import Index, build_index, open_index
from srl.serve.server import create_app
from srl.serve.wire import MAX_BODY_BYTES
from srl.trajectory import Hit, Passage


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory: Path = tmp_path_factory.mktemp("hostile") / "i"
    build_index([Passage("a", '"T"\nred fox')], directory)
    return open_index(directory)


@pytest.fixture(scope="module")
def url(index: Index) -> Iterator[str]:
    with running(create_app(index)) as url:
        yield url


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as raw:
        yield raw


def whole_answer(raw: socket.socket) -> bytes:
    """The first answer, by its length: the connection may stay open."""
    answer = b""
    while not (end := re.search(rb"(?i)content-length: (\d+)\r\n.*?\r\n\r\n", answer, re.DOTALL)):
        answer += raw.recv(1 << 16)
    while len(answer) < end.end() + int(end[1]):
        answer += raw.recv(1 << 16)
    return answer


def post(url: str, **body: object) -> httpx.Response:
    return httpx.post(url, json=body, timeout=60, trust_env=False)


def test_a_body_that_never_ends_is_refused_when_it_is_too_large(url):
    """Its sender can read why, on the connection that it sends on."""
    with connected(url) as raw:
        raw.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        raw.sendall(b"%x\r\n" % (MAX_BODY_BYTES + 1) + b"x" * (MAX_BODY_BYTES + 1))
        assert whole_answer(raw).startswith(b"HTTP/1.1 413 ")
    with httpx.Client(trust_env=False, timeout=60) as client:
        assert client.post(url, json={"query": "x" * 2 * MAX_BODY_BYTES}).status_code == 413
        assert client.post(url, json={"query": "red"}).status_code == 200


class Stuck:
    """A retriever that waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        assert self.go.wait(60)
        return [[Hit(Passage(query, query), 1.0)] for query in queries]


def test_more_requests_than_there_is_room_for_are_all_answered_at_once(index):
    """One is searched, four wait, the rest are told when to come back; then the server is as before."""
    stuck, codes, refused = Stuck(), [], threading.Event()
    app = create_app(Index(index.directory, index.manifest, stuck), max_waiting=4)

    def ask(name: str, url: str) -> None:
        response = post(url, query=name)
        codes.append(response.status_code)
        if response.status_code == 503:
            assert response.headers["Retry-After"] == "1"
            refused.set()

    with running(app) as url:
        askers = [threading.Thread(target=ask, args=(f"q{n}", url)) for n in range(30)]
        for asker in askers:
            asker.start()
        assert refused.wait(60)
        stuck.go.set()
        for asker in askers:
            asker.join(60)
        assert (len(codes), set(codes)) == (30, {200, 503})
        assert post(url, query="a").status_code == 200


def test_a_search_that_hangs_is_a_504_and_health_goes_on(index):
    stuck = Stuck()
    with running(create_app(Index(index.directory, index.manifest, stuck), timeout_s=0.05)) as url:
        assert post(url, query="a").status_code == 504
        health = httpx.get(url.replace("retrieve", "health"), timeout=60, trust_env=False)
        assert json.loads(health.content)["status"] == "ok"
        stuck.go.set()
