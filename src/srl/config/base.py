"""What the sections are made of: a frozen, strict model, and the types that several share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""What numpy, torch and vLLM all take."""
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
KlEstimator = Literal["k1", "k2", "k3"]
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def one_or_many(value: object) -> object:
    """A single text becomes a tuple of one, a list a tuple: nobody can change it afterwards."""
    if isinstance(value, str | PurePath):
        return (str(value),)
    return list_to_tuple(value)


def list_to_tuple(value: object) -> object:
    """Lists, as YAML has them, become tuples."""
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Marks a text that is, or may be, a path."""


File = Annotated[str, OnDisk()]
Files = Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(min_length=1), OnDisk()]
Texts = Annotated[tuple[str, ...], BeforeValidator(one_or_many), Field(min_length=1)]
Listed = BeforeValidator(list_to_tuple)


class Section(BaseModel):
    """A group of keys: frozen, strict, and closed to unknown ones."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class PluginSection(Section):
    """A section that also holds one subsection of options for each plugin, named like the plugin."""

    model_config = ConfigDict(extra="allow")

    def options(self, plugin: str) -> dict[str, Any]:
        """The options given to `plugin`; empty when there are none."""
        return dict((self.model_extra or {}).get(plugin) or {})
