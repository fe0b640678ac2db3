"""An MCP server's tools as a policy's: the SDK's own server works, hangs, dies, raises and refuses."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, TextContent
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.live_server import running

from srl.errors import UserError
from srl.rollout.tools import tools_of
from srl.testing import check_tool
from srl.trajectory import Search
from srl_mcp.server import MOST_BYTES, McpServer, Options

SECRET = "mcp-token-0123456789"


def made_server() -> MCPServer:
    server = MCPServer("made", log_level="CRITICAL")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool(name="long-text.v1")
    def long_text(size: int) -> str:
        return "é" * max(0, min(size, 2 * MOST_BYTES))

    @server.tool()
    def quiet() -> list[TextContent]:
        return []

    @server.tool()
    async def hang() -> str:
        await asyncio.Event().wait()
        return "never"

    @server.tool()
    def fail(why: str) -> str:
        raise MCPError(INTERNAL_ERROR, why)

    @server.tool()
    def outage(why: str) -> str:
        from mcp.server.mcpserver.exceptions import ToolError

        raise ToolError(why)

    return server


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(made_server().streamable_http_app()) as url:
        yield url.replace("/retrieve", "/mcp")


def call(url: str, name: str, arguments: dict[str, Any], **options: Any) -> Search:
    server = McpServer(Options(url=url, **{"timeout_s": 20.0, **options}))

    async def run() -> Search:
        return await server.call(name, arguments)

    return asyncio.run(run())


def test_the_tools_of_a_server_are_tools_by_their_names(url):
    tools = {tool.name: tool for tool in asyncio.run(tools_of(McpServer(Options(url=url))))}
    assert tools.keys() == {"add", "long_text_v1", "quiet", "hang", "fail", "outage"}
    assert tools["add"].description == "Add two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]
    assert [t.name for t in asyncio.run(McpServer(Options(url=url, names=["add"])).tools())] == ["add"]
    assert asyncio.run(tools["long_text_v1"].call({"size": 3}, [])).hits[0].passage.contents == "ééé"


OUTCOMES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "works": ("add", {"a": 1, "b": 2}, {}, "ok"),
    "finds nothing": ("quiet", {}, {}, "empty"),
    "hangs": ("hang", {}, {"timeout_s": 0.5}, "timed_out"),
    "is a JSON-RPC error": ("fail", {"why": "no\ndisk"}, {}, "failed"),
    "is an error result": ("outage", {"why": "no such page"}, {}, "rejected"),
    "is not such a fault": ("outage", {"why": "no such page"}, {"faults": "timed? ?out"}, "rejected"),
    "is such a fault": ("outage", {"why": "upstream timed out"}, {"faults": "timed? ?out"}, "failed"),
    "cannot take it": ("add", {"a": "x", "b": 2}, {}, "rejected"),
    "is not there": ("nothing", {}, {}, "rejected"),
    "says too much": ("long-text.v1", {"size": MOST_BYTES}, {}, "failed"),
}


@pytest.mark.parametrize("what", OUTCOMES)
def test_a_call_has_the_outcome(url, what):
    name, arguments, options, status = OUTCOMES[what]
    outcome = call(url, name, arguments, **options)
    assert outcome.status == status
    assert bool(outcome.hits) == (status == "ok")
    assert bool(outcome.error) == (status not in ("ok", "empty"))


def test_a_result_is_cut_before_anything_looks_at_it(url):
    outcome = call(url, "long-text.v1", {"size": 1000}, max_chars=7)
    assert outcome.hits[0].passage.contents == "é" * 7
    late = call(url, "outage", {"why": "x" * 50 + "timed out"}, faults="timed out", max_chars=40)
    assert (late.status, len(late.error)) == ("rejected", 40)


def odd(answer: Any) -> Starlette:
    async def say(request: Any) -> Response:
        return await answer(request)

    return Starlette(routes=[Route("/mcp", say, methods=["GET", "POST", "DELETE"])])


async def dies(request: Any) -> Response:
    async def cut() -> Any:
        yield b'{"jsonrpc": "2.0", '
        raise RuntimeError("gone")

    return StreamingResponse(cut(), media_type="application/json")


async def never(request: Any) -> Response:
    await asyncio.sleep(2)
    return Response()


async def web_page(request: Any) -> Response:
    return Response("<html>sign in</html>", media_type="text/html")


async def unavailable(request: Any) -> Response:
    return Response(status_code=503)


@pytest.mark.parametrize(
    ("answer", "status"),
    [(dies, "failed"), (never, "timed_out"), (web_page, "failed"), (unavailable, "failed")],
    ids=["dies", "never", "web page", "unavailable"],
)
def test_a_broken_transport_is_a_fault(answer, status):
    with running(odd(answer)) as url:
        address = url.replace("/retrieve", "/mcp")
        outcome = call(address, "add", {"a": 1}, timeout_s=0.5 if status == "timed_out" else 5.0)
        with pytest.raises(UserError) as raised:
            asyncio.run(McpServer(Options(url=address, timeout_s=0.5)).tools())
    assert outcome.status == status, outcome
    assert "\n" not in outcome.error
    assert raised.value.key == "tool.mcp.url"


def test_the_token_is_sent_and_is_in_no_error_and_no_log(monkeypatch, caplog):
    seen = []

    async def refuse(request: Any) -> Response:
        seen.append(request.headers.get("authorization"))
        return Response(json.dumps({"error": f"bad token {SECRET}"}), status_code=401)

    monkeypatch.setenv("MADE_TOKEN", SECRET)
    caplog.set_level(logging.DEBUG)
    with running(odd(refuse)) as url:
        outcome = call(url.replace("/retrieve", "/mcp"), "add", {"a": 1}, key_variable="MADE_TOKEN")
    assert set(seen) == {f"Bearer {SECRET}"}
    assert outcome.status == "failed"
    assert SECRET not in outcome.error
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"url": "http://name:pass@127.0.0.1/mcp"}, None),
        ({"url": "http://127.0.0.1/mcp?key=1"}, None),
        ({"url": "file:///etc/passwd"}, "tool.mcp.url"),
        ({"names": ["nothing"]}, "tool.mcp.names"),
    ],
    ids=["password", "query", "file", "names"],
)
def test_a_mistake_in_the_options_is_one_line_with_its_key(url, options, key):
    with pytest.raises(UserError) as raised:
        asyncio.run(McpServer(Options(**{"url": url, **options})).tools())
    assert raised.value.key == key or key is None
    assert "pass@" not in str(raised.value)


def test_the_server_conforms_to_the_kit(url):
    check_tool(McpServer(Options(url=url, names=["add", "quiet", "outage"], timeout_s=20.0)))
