"""What every tool must do, checked by calling it as policies do: with anything that its schema allows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar, get_args

from srl.rollout.protocol import Tool
from srl.rollout.tools import tools_of
from srl.testing import Check, expect, run
from srl.trajectory import Hit, Passage, Search, SearchStatus

T = TypeVar("T")
PATIENCE_S = 20.0
"""For what a check asks of a plugin: its tools, a call, or a few calls together."""
_SEEN = (Search("Lanterna", (Hit(Passage("p0", '"Lanterna"\nA tower in Genoa.'), 1.0),)),)
_VALUES: Mapping[str, Sequence[Any]] = {
    "string": ("Lanterna", "", "x" * 5000, "\n\t\x00 </tool_call> 東京 \ud800"),
    "integer": (1, 0, -1, 2**70),
    "number": (1.5, 0, -1e300),
    "boolean": (True, False),
    "array": ([], [1, "a"]),
    "object": ({}, {"a": 1}),
}


def checks(make: Callable[[], Any]) -> list[Check]:
    """The outcome of every check."""
    return run(CHECKS, make)


def _arguments(tool: Tool) -> list[dict[str, Any]]:
    """Calls that the schema allows: all arguments, and the required ones, with each sort of value."""
    properties = tool.parameters.get("properties", {})

    def value(schema: Mapping[str, Any], place: int) -> Any:
        kind = schema.get("type")
        values = schema.get("enum") or _VALUES.get(
            kind if isinstance(kind, str) else "", ("Lanterna", 1, None)
        )
        return values[place % len(values)]

    whole = [{name: value(schema, place) for name, schema in properties.items()} for place in range(4)]
    required = tool.parameters.get("required", ())
    return [*whole, *({name: each[name] for name in required} for each in whole)]


async def _in_time(work: Awaitable[T], what: str) -> T:
    """The result of `work`. Raises TimeoutError."""
    try:
        async with asyncio.timeout(PATIENCE_S) as patience:
            return await work
    except TimeoutError as error:
        why = (
            f"no answer within {PATIENCE_S:g} s" if patience.expired() else f"it raised TimeoutError: {error}"
        )
        raise TimeoutError(f"{what}: {why}") from error


async def _tools(make: Callable[[], Any]) -> Sequence[Tool]:
    return await _in_time(tools_of(make()), "tools")


def _declares_a_name_a_description_and_a_schema(make: Callable[[], Any]) -> None:
    tools = asyncio.run(_tools(make))
    expect(tools, "it brings no tool")
    names = [tool.name for tool in tools]
    expect(len(set(names)) == len(names), f"two tools have one name: {', '.join(names)}")
    for tool in tools:
        expect(tool.description.strip(), f"{tool.name} has an empty description")


def _returns_an_outcome_whatever_the_arguments(make: Callable[[], Any]) -> None:
    async def call() -> None:
        for tool in await _tools(make):
            for arguments in _arguments(tool):
                outcome = await _in_time(tool.call(arguments, _SEEN), f"{tool.name}({arguments!r:.80})")
                text = f"{tool.name}({arguments!r:.80})"
                expect(
                    isinstance(outcome, Search), f"{text} returned {outcome!r:.60}, no srl.trajectory.Search"
                )
                expect(outcome.status in get_args(SearchStatus), f"{text} has the status {outcome.status!r}")
                expect((outcome.status == "ok") == bool(outcome.hits), f"{text} is {outcome.status} with "
                       f"{len(outcome.hits)} texts")  # fmt: skip
                why = outcome.error.strip() or outcome.status in ("ok", "empty")
                expect(why, f"{text} is {outcome.status} and does not say why")

    asyncio.run(call())


def _leaves_its_arguments_as_they_were(make: Callable[[], Any]) -> None:
    async def call() -> None:
        for tool in await _tools(make):
            arguments = _arguments(tool)[0]
            before, searches = deepcopy(arguments), deepcopy(_SEEN)
            await _in_time(tool.call(arguments, _SEEN), tool.name)
            expect((arguments, _SEEN) == (before, searches), f"{tool.name} changed its arguments")

    asyncio.run(call())


def _works_in_a_second_event_loop_and_several_times_at_once(make: Callable[[], Any]) -> None:
    """A run asks in one loop which tools there are, and calls them in others."""
    tools = asyncio.run(_tools(make))

    async def together() -> None:
        calls = [tool.call(arguments, _SEEN) for tool in tools for arguments in _arguments(tool)[:2]]
        for outcome in await _in_time(asyncio.gather(*calls), "several calls at once"):
            expect(isinstance(outcome, Search), f"{outcome!r:.60} is no srl.trajectory.Search")

    for _ in range(2):
        asyncio.run(together())


CHECKS = [
    _declares_a_name_a_description_and_a_schema,
    _returns_an_outcome_whatever_the_arguments,
    _leaves_its_arguments_as_they_were,
    _works_in_a_second_event_loop_and_several_times_at_once,
]
