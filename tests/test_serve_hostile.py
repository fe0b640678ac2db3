"""Clients that are slow, dead, or send what nobody should: the server answers, and holds nothing for them."""

from __future__ import annotations

import json
import re
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.live_server import running

from srl.index import Index, build_index, open_index
from srl.serve.server import create_app
from srl.serve.server.connections import BoundedConnection
from srl.serve.wire import Limits
from srl.trajectory import Hit, Passage

LIMITS = Limits(body_bytes=1 << 20, buffered_bytes=2 << 20)


class Impatient(BoundedConnection):
    header_s = drain_s = write_s = 0.5


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory: Path = tmp_path_factory.mktemp("hostile") / "i"
    build_index([Passage("a", '"T"\nred fox'), Passage("b", '"T"\n' + "blue " * 20_000)], directory)
    return open_index(directory)


@pytest.fixture(scope="module")
def url(index: Index) -> Iterator[str]:
    with running(create_app(index, limits=LIMITS)) as url:
        yield url


@pytest.fixture(scope="module")
def impatient(index: Index) -> Iterator[str]:
    """A server for the tests that wait until it hangs up; to others it may do so when they are slow."""
    with running(create_app(index, limits=LIMITS), Impatient) as url:
        yield url


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as raw:
        yield raw


def until_closed(raw: socket.socket) -> bytes:
    """All that comes before the server hangs up."""
    parts = []
    try:
        while part := raw.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def whole_answer(raw: socket.socket) -> bytes:
    """The first answer, by its length: the connection may stay open."""
    answer = b""
    while not (found := re.search(rb"(?i)content-length: (\d+)\r\n.*?\r\n\r\n", answer, re.DOTALL)):
        answer += raw.recv(1 << 16)
    while len(answer) < found.end() + int(found[1]):
        answer += raw.recv(1 << 16)
    return answer


def head(length: int, more: str = "") -> bytes:
    return f"POST /retrieve HTTP/1.1\r\nHost: x\r\n{more}Content-Length: {length}\r\n\r\n".encode()


def is_alive(url: str) -> bool:
    """Whether a search is answered; an impatient server may hang up on a slow test once or twice."""
    with httpx.Client(trust_env=False, timeout=60) as client:
        for _ in range(5):
            try:
                return len(client.post(url, json={"query": "red"}).json()["result"][0]) == 1
            except (httpx.TransportError, KeyError):
                continue
    return False


@pytest.mark.parametrize("sent", [b"", b"POST /retr", b"POST /retrieve HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_client_that_never_ends_its_headers_is_hung_up_on(impatient, sent):
    with connected(impatient) as raw:
        raw.sendall(sent)
        assert until_closed(raw) == b""
    assert is_alive(impatient)


def test_a_body_that_does_not_arrive_is_a_408(index):
    with running(create_app(index, limits=Limits(body_s=0.2))) as url:
        with connected(url) as raw:
            raw.sendall(head(1000) + b'{"query": ')
            answer = whole_answer(raw)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within 0.2 s" in answer
        assert is_alive_with(url)


def test_a_client_that_dies_in_its_body_or_before_its_answer_is_forgotten(url):
    for sent in (head(1000) + b"{", head(16) + b'{"query": "red"}'):
        with connected(url) as raw:
            raw.sendall(sent)
    assert is_alive(url)


def test_headers_that_never_end_after_a_first_request_are_hung_up_on(impatient):
    asked = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(impatient) as raw:
        raw.sendall(asked + asked[:-5])
        answer = until_closed(raw)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert is_alive(impatient)


def test_an_empty_line_after_a_request_keeps_no_connection_open(impatient):
    with connected(impatient) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert whole_answer(raw).startswith(b"HTTP/1.1 200 ")
        raw.sendall(b"\r\n")
        assert until_closed(raw) == b""
    assert is_alive(impatient)


def test_headers_of_more_than_64_kilobytes_are_a_431(url):
    sent = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-More: " + b"x" * (64 << 10)
    with connected(url) as raw:
        raw.sendall(sent)
        assert until_closed(raw).startswith(b"HTTP/1.1 431 ")
    assert is_alive(url)


@pytest.mark.parametrize("length", [b"Content-Length: 20000000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_body_that_is_too_large_is_refused_before_it_is_all_there(url, length):
    with connected(url) as raw:
        raw.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\n" + length + b"\r\n")
        if b"chunked" in length:
            raw.sendall(b"%x\r\n" % (2 << 20) + b"x" * (2 << 20))
        answer = whole_answer(raw)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"the body is larger than 1,048,576 bytes" in answer


def test_a_query_of_ten_megabytes_is_a_413_that_its_sender_can_read(url):
    with httpx.Client(trust_env=False, timeout=60) as client:
        response = client.post(url, json={"query": "x" * 10_000_000})
        assert response.status_code == 413
        assert client.post(url, json={"query": "red"}).status_code == 200


@pytest.mark.parametrize(
    "odd",
    [
        {"topk": "a." * 200_000 + "://"},
        {"return_scores": "://@" * 200_000},
        {"index": ["authorization: bearer "] * 40_000},
        {"k": [[{"a": "\x1b" * 100_000}]]},
        {"query": ["a"], "topk": 3},
    ],
    ids=["url", "users", "headers", "controls", "list"],
)
def test_a_request_that_is_odd_and_large_is_a_422_at_once(url, odd):
    response = httpx.post(url, json={"query": "a", **odd}, timeout=30, trust_env=False)
    assert response.status_code == 422
    assert len(response.content) < 500
    assert is_alive_with(url)


def test_bodies_that_arrive_at_once_are_bounded_together(url):
    """Three slow ones of 900 KB: two fit into the 2 MB, the third is told to come again."""
    part = b'{"query": "' + b"x" * 900_000
    with ExitStack() as open_ones:
        slow = [open_ones.enter_context(connected(url)) for _ in range(3)]
        for raw in slow:
            raw.sendall(head(1_000_000) + part)
        ((refused,), _, _) = select.select(slow, [], [], 60)
        assert whole_answer(refused).startswith(b"HTTP/1.1 503 ")
        for raw in slow:
            if raw is not refused:
                raw.sendall(b'"}'.rjust(1_000_000 - len(part), b"x"))
                assert b"999,987 characters" in whole_answer(raw)
    assert is_alive(url)


def test_a_client_that_stops_reading_is_hung_up_on(impatient):
    body = json.dumps({"queries": ["blue"] * 200, "topk": 3}).encode()
    with connected(impatient) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(head(len(body)) + body)
        assert raw.recv(8) == b"HTTP/1.1"
        assert is_alive(impatient)
        raw.settimeout(0.05)
        _wait_for_reset(raw)
    assert is_alive(impatient)


def _wait_for_reset(raw: socket.socket) -> None:
    """Until writing fails: nothing is read meanwhile."""
    for _ in range(400):
        try:
            raw.send(b" ")
        except TimeoutError:
            continue
        except OSError:
            return
        threading.Event().wait(0.02)
    raise AssertionError("the server still holds the answer")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GARBAGE\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_400_or_a_hang_up(impatient, sent):
    with connected(impatient) as raw:
        raw.sendall(sent)
        answer = until_closed(raw)
    assert answer == b"" or answer[9:12] in (b"400", b"404", b"405"), answer
    assert is_alive(impatient)


def test_requests_in_one_packet_are_answered_in_order(url):
    bodies = [b'{"query": "red"}', b"{", b'{"query": "none"}']
    with connected(url) as raw:
        *first, last = bodies
        asked = [head(len(body)) + body for body in first]
        raw.sendall(b"".join(asked) + head(len(last), "Connection: close\r\n") + last)
        answer = until_closed(raw)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"200"]


class Stuck:
    """A retriever that waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        assert self.go.wait(60)
        return [[Hit(Passage(query, query), 1.0)] for query in queries]


def test_more_requests_than_there_is_room_for_are_all_answered_at_once(index):
    """One is searched, four wait, the rest are told when to come back; then the server is as before."""
    stuck = Stuck()
    app = create_app(Index(index.directory, index.manifest, stuck), limits=Limits(waiting=4))
    codes: list[int] = []
    refused = threading.Event()

    def ask(name: str, url: str) -> None:
        response = httpx.post(url, json={"query": name}, timeout=60, trust_env=False)
        codes.append(response.status_code)
        if response.status_code == 503:
            refused.set()
            assert response.headers["Retry-After"] == "1"

    with running(app) as url:
        askers = [threading.Thread(target=ask, args=(f"q{n}", url)) for n in range(30)]
        for asker in askers:
            asker.start()
        assert refused.wait(60)
        stuck.go.set()
        for asker in askers:
            asker.join(60)
        assert len(codes) == 30
        assert set(codes) == {200, 503}
        assert is_alive_with(url)


def is_alive_with(url: str) -> bool:
    return httpx.post(url, json={"query": "a"}, timeout=60, trust_env=False).status_code == 200


def test_a_search_that_hangs_is_a_504_and_health_goes_on(index):
    stuck = Stuck()
    app = create_app(Index(index.directory, index.manifest, stuck), limits=Limits(timeout_s=0.05))
    with running(app) as url:
        response = httpx.post(url, json={"query": "a"}, timeout=60, trust_env=False)
        assert response.status_code == 504
        assert "no answer within 0.05 s" in response.json()["detail"]
        assert httpx.get(url.replace("retrieve", "health"), timeout=60, trust_env=False).status_code == 200
        stuck.go.set()
