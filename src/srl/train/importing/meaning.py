"""What is known while a configuration is converted: the settings there, the keys here, what was said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from srl.config.checks import algorithm_plugin
from srl.train.importing.key_table import defaults_of
from srl.train.importing.source import Source

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@dataclass
class Meaning:
    """A source, our keys so far, the sentences about changes, and the keys there that are dealt with."""

    source: Source
    ours: dict[str, Any]
    changes: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def theirs(self, key: str, otherwise: Any = None) -> Any:
        """The value of their key, its default there where it is not given; it counts as dealt with."""
        value = self.given(key)
        return defaults_of(self.source.dialect).get(key, otherwise) if value is None else value

    def given(self, key: str) -> Any:
        """The value of their key where the source has one, else None; it counts as dealt with."""
        self.used.add(key)
        return self.source.settings.get(key)

    def say(self, *parts: str) -> None:
        """One sentence, in parts."""
        self.changes.append("".join(parts))

    @property
    def has_critic(self) -> bool:
        """Whether the algorithm learns from a critic."""
        return algorithm_plugin(self.ours["algorithm.name"]).needs_critic
