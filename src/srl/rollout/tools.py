"""Tools that plugins bring: what a plugin may be, and the guard between an episode and a tool."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Protocol, get_args, runtime_checkable

from srl.errors import UserError, parsing
from srl.rollout.documents import OPENERS
from srl.rollout.protocol import Tool
from srl.safe import one_line, quoted
from srl.trajectory import Hit, Passage, Search, SearchStatus

MOST_CHARS = 100_000
"""Of a text that a tool returns; what follows is cut off before anything looks at it."""
BUILT_IN = frozenset({"search", *OPENERS})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
"""What every format of calls can say."""
_LONGEST_ERROR = 300


@runtime_checkable
class ToolSource(Protocol):
    """A plugin with several tools, such as those of a server, known once a run starts."""

    async def tools(self) -> Sequence[Tool]:
        """The tools. Raises UserError."""
        ...


class Guarded:
    """A tool of a plugin, whose every call has an outcome.

    One that raises has `failed`, one without an answer after `timeout_s` has `timed_out`: neither is the
    policy's mistake.
    """

    def __init__(self, tool: Tool, timeout_s: float) -> None:
        self.name, self.description, self.parameters = tool.name, tool.description, tool.parameters
        self._tool, self._timeout_s = tool, timeout_s

    async def call(self, arguments: Mapping[str, Any], seen: Sequence[Search]) -> Search:
        began, query = perf_counter(), ", ".join(map(str, arguments.values()))
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = _cut(await self._tool.call(arguments, seen))
        except TimeoutError:
            outcome = Search(query, status="timed_out", error=f"no answer within {self._timeout_s:g} s")
        except (Exception, asyncio.CancelledError, SystemExit) as error:  # a plugin may raise anything
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the run is stopped
            why = f"{self.name} raised {type(error).__name__}: {error}"
            outcome = Search(query, status="failed", error=quoted(why, _LONGEST_ERROR))
        return replace(outcome, latency_s=perf_counter() - began)


def _cut(outcome: Search) -> Search:
    """The outcome with no more text than an episode looks at. Raises TypeError where it is none."""
    if not isinstance(outcome, Search) or outcome.status not in get_args(SearchStatus):
        raise TypeError(f"{outcome!r:.80} is no srl.trajectory.Search")
    texts = [outcome.query, outcome.error, outcome.index_digest, outcome.retriever]
    texts += [text for hit in outcome.hits for text in (hit.passage.id, hit.passage.contents)]
    if strange := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"{strange[0]!r:.80} is no text")
    hits = [
        Hit(Passage(hit.passage.id, hit.passage.contents[:MOST_CHARS]), float(hit.score))
        for hit in outcome.hits
    ]
    return replace(outcome, hits=tuple(hits), error=one_line(outcome.error[:MOST_CHARS], _LONGEST_ERROR))


async def tools_of(plugin: Any) -> Sequence[Tool]:
    """The tools that a plugin is or brings, checked. Raises UserError."""
    with parsing(f"{type(plugin).__name__} brings no tools"):
        tools = await plugin.tools() if isinstance(plugin, ToolSource) else [plugin]
    if not isinstance(tools, Sequence):
        raise UserError(f"{plugin!r:.80} brings no list of tools: {tools!r:.80}", key="rollout.tools")
    for tool in tools:
        if why := wrong_with(tool):
            raise UserError(f"the tool {getattr(tool, 'name', tool)!r:.80} {why}", key="rollout.tools")
    return tools


def wrong_with(tool: Any) -> str:
    """What keeps a chat template from declaring a tool; empty if nothing does."""
    if not all(hasattr(tool, member) for member in ("name", "description", "parameters", "call")):
        return "has no name, description, parameters or call"
    if not isinstance(tool.name, str) or not _NAME.fullmatch(tool.name):
        return "has no name of letters, digits and _"
    if tool.name in BUILT_IN:
        return "has the name of a built-in tool"
    if not isinstance(tool.description, str):
        return "has no text for its description"
    try:
        parameters = json.loads(json.dumps(tool.parameters, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict) or parameters.get("type") != "object":
        return "has parameters that are no JSON schema of an object"
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not all(map(_is_schema, properties.values())):
        return "has properties that are no JSON schemas"
    if not isinstance(required, list) or any(name not in list(properties) for name in required):
        return f"requires arguments that it does not have: {required!r:.80}"
    return ""


def _is_schema(schema: Any) -> bool:
    """Whether calls can be checked by it: a type or several, and a list of choices."""
    if not isinstance(schema, dict) or not isinstance(schema.get("enum", []), list):
        return False
    kinds = schema.get("type", [])
    return all(isinstance(kind, str) for kind in (kinds if isinstance(kinds, list) else [kinds]))
