"""The hooks of `srl`, one for each kind of plugin.

A plugin is a module named by an entry point of group `srl`. It implements the hooks it needs:

    from srl.plugins import hookimpl

    @hookimpl
    def srl_rewards(register):
        register("em", "srl_em.reward:ExactMatch", "1 for the right answer, else 0.")

Everything is given as `"module:attribute"` and imported when it is used, so listing stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pluggy import HookspecMarker

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from pydantic import BaseModel

    class Register(Protocol):
        """Makes one plugin known under `name`.

        `factory` is called with an instance of `options` (a pydantic model), or with nothing where
        there is no such model; a value that is not callable is the plugin itself. `summary` is one
        line for `srl plugins list`.
        """

        def __call__(
            self,
            name: str,
            factory: str | Callable[..., object],
            summary: str,
            options: str | type[BaseModel] | None = None,
        ) -> None: ...


hookspec = HookspecMarker("srl")


@hookspec
def srl_retrievers(register: Register) -> None:
    """Register retrievers: objects that build an index of passages, open it, and answer queries with hits."""


@hookspec
def srl_rewards(register: Register) -> None:
    """Register rewards: objects whose `score` turns finished trajectories into scores."""


@hookspec
def srl_tools(register: Register) -> None:
    """Register tools that a policy may call: `srl.rollout.protocol.Tool` objects, or sources of several."""


@hookspec
def srl_algorithms(register: Register) -> None:
    """Register algorithms: `srl.advantage.Algorithm` values whose estimator turns scores into advantages."""
