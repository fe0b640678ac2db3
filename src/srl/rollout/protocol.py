"""The seam between policy and tools: how a turn is prompted, read and continued; what can be called."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from srl.protocol import Template, ToolCall, unknown_retriever
from srl.rollout.codec import Codec
from srl.trajectory import NamedSearchTool, Search, SearchTool

Messages = Sequence[Mapping[str, str]]
"""The chat messages of a prompt."""


class Turn(NamedTuple):
    """What a turn of the policy says: its text and the calls in it, or that it `ends` the episode."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    ends: bool = False


class Continuation(NamedTuple):
    """What the policy reads between two turns, and the results with what of each is shown in it."""

    kind: Literal["observation", "feedback"]
    text: str
    token_ids: Sequence[int]
    results: Sequence[Search] = ()
    opens_thought: bool = False


class Protocol(typing.Protocol):
    """How policy and tools talk. `name` is in the log; at one of the texts `stop` a turn ends."""

    @property
    def name(self) -> str: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def card(self) -> Mapping[str, str]:
        """What `srl.json` of a model trained so says of it."""
        ...

    @property
    def codec(self) -> Codec: ...
    @property
    def template(self) -> Template: ...
    @property
    def tools(self) -> Mapping[str, Tool]:
        """What can be called, by name."""
        ...

    def prompt(self, messages: Messages) -> tuple[list[int], bool, str]:
        """Ids, whether they end inside an open thought, and text."""
        ...

    def read(self, token_ids: Sequence[int], inside_thought: bool) -> Turn:
        """What the sampled ids say; `inside_thought`: they begin in a thought that the prompt opened."""
        ...

    def continue_with(
        self, results: Sequence[Search], longest: int, room: int, after: Sequence[int]
    ) -> Continuation | None:
        """What follows a turn with these results, none for a turn without a call; it follows the ids `after`.

        It has at most `room` tokens, what was retrieved at most `longest`. None if nothing fits.
        """
        ...

    def encode(self, text: str, after: Sequence[int] | None = None) -> list[int]:
        """The ids by which a policy says a turn of a demonstration, after the ids `after`."""
        ...

    def last_answer(self, turn: Turn) -> str | None:
        """The answer in a last turn that does not end the episode by itself."""
        ...


class Tool(typing.Protocol):
    """What a policy can call; `parameters` is the JSON schema of the arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    async def call(self, arguments: Mapping[str, Any], seen: Sequence[Search]) -> Search:
        """The outcome; it never raises. `seen` is what the episode's calls returned so far."""
        ...


class SearchCall:
    """The tool `search`: a search tool as a policy calls it."""

    name = "search"
    description = "Search for passages that help to answer the question."

    def __init__(self, search: SearchTool) -> None:
        self.search = search
        self.parameters: Mapping[str, Any] = search_parameters(
            search.retrievers if isinstance(search, NamedSearchTool) else ()
        )

    async def call(self, arguments: Mapping[str, Any], seen: Sequence[Search] = ()) -> Search:
        """Where there are no retrievers to choose from, naming one is a mistake."""
        query, retriever = arguments["query"], arguments.get("retriever", "")
        if isinstance(self.search, NamedSearchTool):
            return await self.search.search(query, retriever)
        if retriever:
            error = unknown_retriever(retriever, ())
            return Search(query, status="rejected", error=error, attempts=0, retriever=retriever)
        return await self.search.search(query)


def schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat templates declare it."""
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def search_parameters(retrievers: Sequence[str]) -> dict[str, Any]:
    """The JSON schema of a search's arguments."""
    query = {"type": "string", "description": "What to look for, in a few words."}
    properties: dict[str, Any] = {"query": query}
    if retrievers:
        where = "The search engine to ask, if not the usual one."
        properties["retriever"] = {"type": "string", "enum": list(retrievers), "description": where}
    return {"type": "object", "properties": properties, "required": ["query"]}
