"""An MCP server whose tools a policy calls, over HTTP, through the official SDK."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import REQUEST_TIMEOUT, CallToolResult
from pydantic import BaseModel, ConfigDict, Field, field_validator

from srl.errors import UserError
from srl.rollout.protocol import Tool
from srl.safe import header_secret, quoted, refuse_credentials
from srl.serve.http import is_loopback
from srl.trajectory import Search, SearchStatus, rejected, returned

MOST_BYTES = 16 << 20
"""Of an answer; a longer one is a fault."""
MOST_PAGES = 100
"""Of a list of tools."""
KEY = "tool.mcp.url"


class Options(BaseModel):
    """Options, set as in `--set tool.mcp.url=http://127.0.0.1:8000/mcp`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    url: str
    """The server's address, for streamable HTTP."""
    names: tuple[str, ...] | None = None
    """The tools that the policy may call, by the server's names. null: all."""
    timeout_s: float = Field(default=20.0, gt=0)
    """Time-out of a call, connecting included, in seconds."""
    faults: str | None = None
    """A regular expression: an error result in which it matches is the server's fault, not the policy's
    mistake, such as `timed? ?out|unavailable|rate limit`. null: none is."""
    max_chars: int = Field(default=20_000, ge=1)
    """Of a result; what follows is cut off before anything looks at it."""
    key_variable: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The environment variable with the server's bearer token. null: it needs none."""

    @field_validator("faults")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return pattern


class Failure(NamedTuple):
    """Why a request to the server brought nothing."""

    status: SearchStatus
    why: str


class McpServer:
    """The tools of one server. Each call is a connection of its own, so a server that dies may come back."""

    def __init__(self, options: Options) -> None:
        refuse_credentials(KEY, options.url, options.key_variable or "NAME, and set tool.mcp.key_variable")
        self.options = options
        self._host = urlsplit(options.url).hostname or ""
        if not self._host or urlsplit(options.url).scheme not in ("http", "https"):
            raise UserError(f"{options.url!r} is not the URL of a server; expected http://HOST/mcp", key=KEY)
        token = header_secret(options.key_variable) if options.key_variable else ""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = ssl.create_default_context()

    async def tools(self) -> Sequence[Tool]:
        """The tools that the server lists. Raises UserError."""
        entries: list[Any] = []
        try:
            async with self._connected() as client:
                cursor: str | None = None
                for _ in range(MOST_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    entries += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
        except Exception as error:  # a library may raise anything
            failure = _failure(error, self.options.timeout_s)
            raise UserError(f"{self.options.url} lists no tools: {failure.why}", key=KEY) from error
        names = [tool.name for tool in entries]
        if missing := set(self.options.names or ()) - set(names):
            raise UserError(
                f"{self.options.url} has no tool {', '.join(sorted(missing))}: there is {', '.join(names)}",
                key="tool.mcp.names",
            )
        selection = set(names) if self.options.names is None else set(self.options.names)
        return [
            McpTool(self, tool.name, tool.description or "", tool.input_schema)
            for tool in entries
            if tool.name in selection
        ]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Search:
        """The outcome of a call; never raises."""
        query = ", ".join(str(value) for value in arguments.values())[: self.options.max_chars]
        try:
            async with self._connected() as client:
                result = await client.call_tool(name, dict(arguments))
        except Exception as error:  # a library may raise anything; an episode must get an outcome
            failure = _failure(error, self.options.timeout_s)
            return Search(query, status=failure.status, error=f"{name}: {failure.why}")
        text = _text(result)[: self.options.max_chars]
        if not result.is_error:
            return returned(query, *([text] if text else []))
        if self.options.faults and re.search(self.options.faults, text):
            return Search(query, status="failed", error=f"{name}: {quoted(text) or 'an error'}")
        return rejected(query, text or "an error")

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        """A connection, whose every request together has `timeout_s`. Raises TimeoutError."""
        with anyio.fail_after(self.options.timeout_s):  # cancels again what hangs while it is cancelled
            async with (
                httpx2.AsyncClient(
                    headers=self._headers,
                    timeout=self.options.timeout_s,
                    verify=self._tls,
                    trust_env=not is_loopback(self._host),
                    event_hooks={"response": [_limit]},
                ) as http,
                Client(streamable_http_client(self.options.url, http_client=http), cache=None) as client,
            ):
                yield client


class McpTool:
    """A tool of the server; characters that some formats of calls cannot say become `_` in its name."""

    def __init__(self, server: McpServer, name: str, description: str, parameters: Mapping[str, Any]) -> None:
        self.name = re.sub(r"\W|^(?=\d)", "_", name, flags=re.ASCII)
        self.description, self.parameters = description or name, parameters
        self._server, self._name = server, name

    async def call(self, arguments: Mapping[str, Any], seen: Sequence[Search]) -> Search:
        return await self._server.call(self._name, arguments)


def _text(result: CallToolResult) -> str:
    """The text of a result; other content by its type, and what is only structured as JSON."""
    parts = [
        getattr(part, "text", None)
        or getattr(getattr(part, "resource", None), "text", None)
        or f"[{part.type}]"
        for part in result.content
    ]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _failure(error: BaseException, timeout_s: float) -> Failure:
    """The status of a fault: what an error is that a task group wraps."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    late = isinstance(error, MCPError) and error.code == REQUEST_TIMEOUT
    if late or isinstance(error, TimeoutError | httpx2.TimeoutException):
        return Failure("timed_out", f"no answer within {timeout_s:g} s")
    status: SearchStatus = "refused" if isinstance(error, httpx2.ConnectError) else "failed"
    return Failure(status, quoted(f"{type(error).__name__}: {error}"))


async def _limit(response: httpx2.Response) -> None:
    """Let no more than `MOST_BYTES` of an answer be read."""
    response.stream = _Limited(response.stream)


class _Limited(httpx2.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        room = MOST_BYTES
        async for chunk in self._stream:
            if (room := room - len(chunk)) < 0:
                raise ValueError(f"the answer is larger than {MOST_BYTES:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
