"""The tools of a run whose policy calls them in its model's own way: `rollout.tools`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from srl import process
from srl.config import Config
from srl.errors import UserError
from srl.plugins import manager
from srl.rollout.codec import Codec
from srl.rollout.documents import OPENERS, Documents, FindCall, OpenCall
from srl.rollout.protocol import SearchCall, Tool, schema, search_parameters
from srl.rollout.tools import Guarded, tools_of
from srl.trajectory import SearchTool

KEY = "rollout.tools"


def declared_tools(config: Config) -> list[dict[str, Any]]:
    """The tools that prompts declare, as chat templates have them. Raises UserError."""
    search = schema("search", SearchCall.description, search_parameters(tuple(config.search.retrievers)))
    tools: list[Any] = [call for call in (OpenCall, FindCall) if call.name in config.rollout.tools]
    tools += _of_plugins(config).values()
    return [search, *(schema(tool.name, tool.description, tool.parameters) for tool in tools)]


def load_tools(config: Config, codec: Codec, search: SearchTool) -> dict[str, Tool]:
    """The tools by name, in the order in which they are declared. Raises UserError."""
    tools: dict[str, Tool] = {"search": SearchCall(search)}
    if not OPENERS.isdisjoint(config.rollout.tools):
        longest = config.rollout.max_obs_length
        documents = Documents(search, lambda text: len(codec.encode_text(text)), longest)  # type: ignore[arg-type]
        calls = (OpenCall(documents), FindCall(documents))
        tools |= {call.name: call for call in calls if call.name in config.rollout.tools}
    for tool in _of_plugins(config).values():
        declared = json.dumps(schema(tool.name, tool.description, tool.parameters), ensure_ascii=False)
        if marks := [name for name in codec.added if name in declared and not name.isalnum()]:
            raise UserError(f"the description of the tool {tool.name} has the token {marks[0]}", key=KEY)
        tools[tool.name] = Guarded(tool, config.search.timeout_s)
    return tools


def _of_plugins(config: Config) -> Mapping[str, Tool]:
    plugins = {name: config.tool.options(name) for name in config.rollout.tool_plugins}
    return _brought_by(json.dumps(plugins))


@cache
def _brought_by(plugins: str) -> Mapping[str, Tool]:
    """The tools of plugins, whose options are JSON by their names; each is asked once in a process."""
    tools: dict[str, Tool] = {}
    for name, options in json.loads(plugins).items():
        for tool in process.run_async(tools_of(manager.load("tool", name, options))):
            if tool.name in (*tools, "search", *OPENERS):
                raise UserError(f"{name} has a tool {tool.name!r}, which there is already", key=KEY)
            tools[tool.name] = tool
    return MappingProxyType(tools)
