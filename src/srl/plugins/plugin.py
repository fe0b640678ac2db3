"""What is known of a plugin before it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Plugin:
    """One registered plugin, or one with an `error`: it could not be imported, or its name is taken."""

    kind: str
    name: str
    package: str
    version: str
    summary: str
    error: str = ""
    factory: str | Callable[..., object] | None = None
    options: str | type[BaseModel] | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.package} {self.version})"
