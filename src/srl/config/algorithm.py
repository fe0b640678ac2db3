"""What the configuration needs to know of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class Algorithm(Protocol):
    """What the configuration needs of an algorithm plugin, an `srl.advantage.Algorithm`."""

    @property
    def name(self) -> str: ...

    @property
    def needs_critic(self) -> bool: ...

    @property
    def defaults(self) -> Mapping[str, object]: ...

    @property
    def requires(self) -> Mapping[str, tuple[object, ...]]: ...

    @property
    def estimator(self) -> Callable[..., object]: ...
