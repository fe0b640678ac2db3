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

from srl_web import caller
from srl_web.options import Options
from srl_web.retriever import WebRetriever

sys.path.insert(0, str(Path(__file__).parent))  # for web_answers

KEY = "s3cr3t/key+of=tests"
QUICK = {"cache": None, "rate": None, "timeout_s": 60}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """Keys for every provider, no proxy, no pause between attempts, and a user's cache of the test's own."""
    for name in ("SERPAPI_API_KEY", "GOOGLE_API_KEY", "SERPER_API_KEY", "BRAVE_API_KEY", "TAVILY_API_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("GOOGLE_CSE_ID", "engine-id")
    monkeypatch.setenv("MY_KEY", KEY)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(caller, "BACKOFF_S", 0)


@pytest.fixture
def key() -> str:
    return KEY


@pytest.fixture
def web() -> Callable[..., WebRetriever]:
    """`web(answer, **options)`: an open retriever whose API is the function `answer(request)`.

    The requests as they leave this machine, keys and all, are in its `asked`.
    """

    def make(answer: Callable[[httpx.Request], httpx.Response] | None = None, **options) -> WebRetriever:
        if not {"provider", "api"} & set(options):
            options["provider"] = "serper"
        asked: list[httpx.Request] = []

        def handle(request: httpx.Request) -> httpx.Response:
            asked.append(request)
            return answer(request)

        transport = httpx.MockTransport(handle) if answer else None
        retriever = WebRetriever(Options(**{**QUICK, **options}), transport).open(None)
        retriever.asked = asked
        return retriever

    return make


class Loopback:
    """A server on a free port that does to each connection what `handle(connection)` does."""

    def __init__(self, handle: Callable[[socket.socket], None]) -> None:
        self._handle = handle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
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
        for each in (self._listener, *self._open):
            each.close()


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
