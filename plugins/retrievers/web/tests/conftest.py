"""A search API that is a function, one that is a socket on this machine, and retrievers that ask them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest

from srl_web.options import Options
from srl_web.retriever import WebRetriever

sys.path.insert(0, str(Path(__file__).parent))  # for web_answers

KEY = "s3cr3t/key+of=tests"
QUICK = {"cache": None, "rate": None, "backoff_s": 0, "timeout_s": 60}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Keys for everybody, no proxy, and a cache directory of the test's own."""
    for name in ("SERPAPI_API_KEY", "GOOGLE_API_KEY", "SERPER_API_KEY", "BRAVE_API_KEY", "TAVILY_API_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("GOOGLE_CSE_ID", "engine-id")
    monkeypatch.setenv("MY_KEY", KEY)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def key() -> str:
    return KEY


class Asked(list):
    """The requests that an API was sent, in order."""


@pytest.fixture
def web() -> Iterator[Callable[..., WebRetriever]]:
    """`web(answer, **options)`: an open retriever whose API is the function `answer(request)`.

    The requests as they leave this machine, keys and all, are in its `asked`.
    """
    opened = []

    def make(answer: Callable[[httpx.Request], httpx.Response] | None = None, **options) -> WebRetriever:
        if not {"provider", "api"} & set(options):
            options["provider"] = "serper"
        asked = Asked()

        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return answer(request)

        transport = httpx.MockTransport(handle) if answer else None
        retriever = WebRetriever(Options(**{**QUICK, **options}), transport).open(None)
        retriever.asked = asked
        opened.append(retriever)
        return retriever

    yield make
    for retriever in opened:
        retriever.close()


class Loopback:
    """A server on a free port that does to each connection what `handle(connection)` does."""

    def __init__(self, handle: Callable[[socket.socket], None]) -> None:
        self._handle = handle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections = 0
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.append(connection)
                Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with suppress(OSError):
            self._handle(connection)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self._open):
            one.close()


@pytest.fixture
def loopback() -> Iterator[Callable[..., Loopback]]:
    """`loopback(handle)`: a server whose `handle(connection)` reads and writes as it likes."""
    servers: list[Loopback] = []

    def make(handle: Callable[[socket.socket], None]) -> Loopback:
        servers.append(Loopback(handle))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def pages(loopback) -> Callable[[dict[str, bytes]], Loopback]:
    """`pages({path: whole HTTP answer})`: a web server; other paths are not found."""

    def make(answers: dict[str, bytes]) -> Loopback:
        def handle(connection: socket.socket) -> None:
            request = read_request(connection)
            server.requests.append(request)
            path = request.split(" ")[1]
            connection.sendall(answers.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))
            connection.close()

        server = loopback(handle)
        server.requests = []
        return server

    return make


def read_request(connection: socket.socket) -> str:
    """The head of a request."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            break
        data += more
    return data.decode("latin-1")
