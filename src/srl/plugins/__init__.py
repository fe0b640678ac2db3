"""Plugins: what `srl` can search with, reward with and learn with."""

from pluggy import HookimplMarker

__all__ = ["hookimpl"]

hookimpl = HookimplMarker("srl")
"""Marks a function of a plugin as the implementation of the hook of the same name."""
