"""Whatever a server does, a search has a typed outcome; and the token goes to the server alone."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import Callable

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.errors import UserError
from srl.serve import HttpSearch
from srl.serve.client import request
from srl.trajectory import Search

Handler = Callable[[httpx.Request], httpx.Response]
GOOD = b'{"result": [[{"document": {"id": "1", "contents": "c"}, "score": 1.0}]]}'
MOVED = b"HTTP/1.1 302 Found\r\nLocation: "
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = "a-secret-that-nobody-may-read"


def client(handler: Handler, **options: object) -> HttpSearch:
    return HttpSearch("http://one", transport=httpx.MockTransport(handler), retries=0, **options)


def ask(search: HttpSearch, query: str = "a") -> Search:
    async def once() -> Search:
        try:
            return await search.search(query)
        finally:
            await search.aclose()

    return asyncio.run(once())


def answer(status: int = 200, content: bytes = GOOD, **headers: str) -> Handler:
    return lambda request: httpx.Response(status, content=content, headers=headers)


def raw(data: bytes, then_hang: bool = False) -> Search:
    """What comes of a query to a server that sends `data`, whatever it is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(data)
        await writer.drain()
        if then_hang:
            await reader.read()
        writer.close()

    async def once() -> Search:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        search = HttpSearch(f"http://127.0.0.1:{port}", retries=0, timeout_s=0.2 if then_hang else 30)
        found = await search.search("a")
        await search.aclose()
        server.close()
        return found

    return asyncio.run(once())


def head(length: int | str, *more: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {length}", *more, "", ""]).encode()


def test_an_answer_sent_by_hand_is_read():
    assert raw(head(len(GOOD)) + GOOD).status == "ok"
    assert raw(b"HTTP/1.1 200 OK\r\n\r\n" + GOOD).status == "ok"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x16\x03\x01\x00\xff" * 40, id="bytes of another protocol"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="another protocol"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-", id="half a head"),
        pytest.param(head(500) + GOOD, id="half a body"),
        pytest.param(head(len(GOOD) - 9) + GOOD, id="a length that is too small"),
        pytest.param(head("many") + GOOD, id="a length that is none"),
        pytest.param(head(0), id="an empty body"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", id="no content"),
        pytest.param(CHUNKED + b"zz\r\n{", id="a chunk that is none"),
        pytest.param(CHUNKED + b'5\r\n{"res', id="half a chunk"),
        pytest.param(head(len(GOOD), "Content-Encoding: gzip") + GOOD, id="gzip that is none"),
        pytest.param(head(20, "Content-Encoding: gzip") + gzip.compress(GOOD)[:20], id="half of a gzip"),
        pytest.param(head(len(GOOD), "X: " + "x" * 200_000) + GOOD, id="an endless head"),
        pytest.param(b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n", id="a status that is none"),
        pytest.param(MOVED + b"http://127.0.0.1:x/\r\n\r\n", id="a redirect to no port"),
        pytest.param(MOVED + b"ftp://x/\r\n\r\n", id="a redirect to another protocol"),
    ],
)
def test_what_is_no_answer_is_a_fault_with_a_message(data):
    found = raw(data)
    assert (found.status, found.hits, found.attempts) == ("failed", (), 1)
    assert found.error.startswith("http://127.0.0.1:")
    assert "\n" not in found.error


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\n", head(500) + GOOD])
def test_no_answer_in_time_is_a_time_out(data):
    found = raw(data, then_hang=True)
    assert found.status == "timed_out"
    assert "no answer within 0.2 s" in found.error


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(request, "MAX_ANSWER_BYTES", 1000)
    found = ask(client(answer(content=b" " * 1001)))
    assert (found.status, "larger than 1,000 bytes" in found.error) == ("failed", True)


@pytest.mark.parametrize(
    ("code", "status"),
    [(413, "rejected"), (422, "rejected"), (503, "refused"), (504, "timed_out")]
    + [(code, "failed") for code in (204, 301, 400, 401, 403, 404, 429, 500, 501, 502, 999)],
)
def test_each_http_status_has_its_outcome(code, status):
    found = ask(client(answer(code, b"because")))
    assert (found.status, found.attempts) == (status, 1)
    assert f"HTTP {code}: because" in found.error


@pytest.mark.parametrize(
    "error",
    [
        httpx.InvalidURL("no URL"),
        UnicodeError("label too long"),
        RuntimeError("Cannot send a request, as the client has been closed."),
        RecursionError("too deep"),
        KeyError("no such thing"),
        OSError(24, "Too many open files"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_library_raises_is_an_outcome(error):
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    found = ask(client(fail))
    assert found.status == "failed"
    assert found.error.startswith("http://one/retrieve: ")


@pytest.mark.parametrize("score", ["1e400", "9" * 400, "NaN", "null", "[]"])
def test_a_score_that_is_no_number_is_a_fault(score):
    body = f'{{"result": [[{{"document": {{"id": "1", "contents": "c"}}, "score": {score}}}]]}}'
    assert ask(client(answer(content=body.encode()))).status == "failed"


def test_connections_that_are_closed_during_a_search_make_it_fail_and_no_more():
    async def close_under_it() -> Search:
        arrived = asyncio.Event()

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            arrived.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(never, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        search = HttpSearch(url, retries=0, timeout_s=0.2)
        asked = asyncio.create_task(search.search("a"))
        await arrived.wait()
        await search.aclose()
        found = await asked
        server.close()
        return found

    assert asyncio.run(close_under_it()).is_fault


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["result", "document", "id", "contents", "text", "title", "score"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)
bodies = st.binary(max_size=60) | json_values.map(lambda value: json.dumps({"result": [[value]]}).encode())


@settings(deadline=None)
@given(st.integers(200, 599), bodies, st.sampled_from(["", "3", "soon"]), st.text(max_size=8))
def test_no_answer_raises_and_none_is_silent(code, body, retry_after, query):
    async def no_time(seconds: float) -> None:
        pass

    headers = {"Retry-After": retry_after}
    found = ask(client(answer(code, body, **headers), sleep=no_time), query)
    assert found.query == query
    assert bool(found.error) == (found.status not in ("ok", "empty"))
    assert bool(found.hits) == (found.status == "ok")


class TestToken:
    @pytest.fixture(autouse=True)
    def token(self, monkeypatch):
        monkeypatch.setenv("SRL_SEARCH_TOKEN", TOKEN)

    def test_it_goes_with_every_request_and_with_none_where_it_is_not_set(self, monkeypatch):
        sent: list[str | None] = []

        def note(request: httpx.Request) -> httpx.Response:
            sent.append(request.headers.get("Authorization"))
            return httpx.Response(200, content=GOOD)

        ask(client(note))
        monkeypatch.setenv("SRL_SEARCH_TOKEN", "")
        ask(client(note))
        assert sent == [f"Bearer {TOKEN}", None]

    @pytest.mark.parametrize(
        ("target", "arrives"),
        [("http://one/elsewhere", True), ("http://two/retrieve", False), ("http://one:81/retrieve", False)],
    )
    def test_it_is_not_sent_on_to_another_host(self, target, arrives):
        seen: dict[str, str | None] = {}

        def redirect(request: httpx.Request) -> httpx.Response:
            seen[str(request.url)] = request.headers.get("Authorization")
            if str(request.url) == target:
                return httpx.Response(200, content=GOOD)
            return httpx.Response(307, headers={"Location": target})

        assert ask(client(redirect)).status == "ok"
        assert seen == {
            "http://one/retrieve": f"Bearer {TOKEN}",
            target: f"Bearer {TOKEN}" if arrives else None,
        }

    def test_a_server_that_wants_another_one_says_so(self):
        found = ask(client(answer(401, b"who are you?")))
        assert (found.status, found.attempts) == ("failed", 1)
        assert "HTTP 401: who are you?; set the environment variable SRL_SEARCH_TOKEN" in found.error
        assert "SRL_SEARCH_TOKEN" in found.error

    def test_it_is_in_no_error_and_no_log(self, caplog):
        caplog.set_level(logging.DEBUG)

        def repeat(request: httpx.Request) -> httpx.Response:
            return httpx.Response(500, text=f"headers: {request.headers['Authorization']}")

        search = client(repeat)
        assert "headers: Bearer [hidden]" in ask(search).error
        for query in "bcdefg":
            refused = ask(search, query)
        assert refused.status == "refused"
        assert TOKEN not in refused.error + caplog.text

    @pytest.mark.parametrize("token", ["two words", "line\nbreak", "schlüssel", "nul\x7f"])
    def test_what_no_header_can_carry_is_refused_and_not_shown(self, monkeypatch, token):
        monkeypatch.setenv("SRL_SEARCH_TOKEN", token)
        with pytest.raises(UserError, match="SRL_SEARCH_TOKEN is not a valid token") as raised:
            client(answer())
        assert token not in str(raised.value)
