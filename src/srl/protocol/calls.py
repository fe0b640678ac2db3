"""Calls of tools, as what a turn says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote: the tool's name and its arguments.

    `error` says what is wrong with it, for the policy to read; such a call is not executed. `raw` is how it
    was written, where that is more than the arguments.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    raw: str = ""

    @property
    def query(self) -> str:
        """What was searched for, where the call says it."""
        query = self.arguments.get("query")
        return query if isinstance(query, str) else ""

    @property
    def written(self) -> str:
        """The arguments as JSON; of a call that cannot be read, what was written."""
        return self.raw if self.error else json.dumps(dict(self.arguments), ensure_ascii=False)
