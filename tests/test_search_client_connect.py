"""Where the search client finds its servers, and which index must answer."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import httpx
import pytest
from tests.search_handlers import URL, Handler, Recorder, ask, client, echo, raises, status

from srl.errors import UserError
from srl.serve import HttpSearch
from srl.serve.client.request import is_loopback, new_client, retrieve_url


def test_an_answer_from_another_index_is_a_fault_that_names_both():
    def changed(request: httpx.Request) -> httpx.Response:
        response = echo(request)
        response.headers["X-Index-Digest"] = "d2"
        return response

    search = client(Recorder(echo, changed))
    assert search.index_digest == ""
    before, after = ask(search, "a")[0], ask(search, "b")[0]
    assert (before.status, before.index_digest) == ("ok", "d1")
    assert (after.status, after.hits, after.attempts) == ("failed", (), 1)
    assert f"{URL} has another index: expected digest d1, found d2;" in after.error
    assert search.index_digest == "d1"


def test_the_digest_of_a_run_binds_from_the_first_answer():
    search = client(echo, digest="0123456789abcdef")
    (found,) = ask(search, "a")
    assert (found.status, found.hits) == ("failed", ())
    assert "has another index: expected digest 0123456789ab, found d1;" in found.error


def connect(handler: Handler, *urls: str) -> str:
    async def once() -> str:
        search = HttpSearch(urls or URL, transport=httpx.MockTransport(handler))
        try:
            return await search.connect()
        finally:
            await search.aclose()

    return asyncio.run(once())


def test_connecting_learns_the_index_from_health_and_asks_for_an_answer_without_a_search():
    seen = []

    def server(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        if request.method == "GET":
            return httpx.Response(200, json={"index_digest": "d7"})
        assert json.loads(request.content)["queries"] == []
        return httpx.Response(200, json={"result": []})

    assert connect(server) == "d7"
    assert seen == ["http://127.0.0.1:8000/health", URL]


@pytest.mark.parametrize("health", [status(404), status(200, "<html>"), status(200, "[]"), status(200, "{}")])
def test_a_server_without_health_is_asked_a_query_and_may_have_no_digest(health):
    def server(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return health(request)
        assert len(json.loads(request.content)["queries"]) == 1
        return httpx.Response(200, json={"result": [[]]})

    assert connect(server) == ""


def test_connecting_to_nobody_says_what_to_type():
    with pytest.raises(UserError, match=r"no search server answers at .*type: srl serve retriever"):
        connect(raises(httpx.ConnectError))


def test_whatever_a_library_raises_while_connecting_is_one_line():
    def fail(request: httpx.Request) -> httpx.Response:
        raise UnicodeError("label too long")

    with pytest.raises(UserError, match=r"no search server answers at .* \(UnicodeError: label too long\)"):
        connect(fail)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h:1", "http://h:1/retrieve"),
        ("http://h:1/", "http://h:1/retrieve"),
        ("https://h/v2/search", "https://h/v2/search"),
    ],
)
def test_a_url_without_a_path_means_retrieve(given, used):
    assert retrieve_url(given) == used


@pytest.mark.parametrize("given", ["", "localhost:8000", "ftp://h/x", "http://", "http://h:port/"])
def test_what_is_no_url_is_refused(given):
    with pytest.raises(UserError, match="expected http://HOST:PORT/retrieve"):
        HttpSearch(given)


def test_loopback_never_goes_through_a_proxy():
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "10.0.0.1", "example.org")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_proxy_is_for_the_servers_elsewhere_alone(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    client = new_client(["http://127.0.0.1:8000", "http://[::1]:8000", "http://node2:8000"], "")

    def pool(url: str) -> str:
        return type(client._transport_for_url(httpx.URL(url))._pool).__name__

    assert pool("http://node2:8000/retrieve") == "AsyncHTTPProxy"
    assert {pool(f"http://{host}:8000/retrieve") for host in ("127.0.0.1", "[::1]")} == {
        "AsyncConnectionPool"
    }


def test_a_health_page_that_never_ends_is_no_answer():
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()

    async def once() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        search = HttpSearch(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=0.1)
        try:
            await search.connect()
        finally:
            await search.aclose()
            server.close()

    with pytest.raises(UserError, match=r"no search server answers at .* \(TimeoutError"):
        asyncio.run(once())
