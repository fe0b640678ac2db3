"""Where the seconds of a search go: a retriever names its phases, whoever wants to know collects them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter

_collector: ContextVar[dict[str, float] | None] = ContextVar("phases", default=None)


@contextmanager
def collected() -> Iterator[dict[str, float]]:
    """Phase → seconds of everything searched in this block, in this thread or task."""
    seconds: dict[str, float] = {}
    token = _collector.set(seconds)
    try:
        yield seconds
    finally:
        _collector.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the block's seconds as `name`: `embed`, `search`, `rerank` or `web`."""
    seconds, start = _collector.get(), perf_counter()
    try:
        yield
    finally:
        if seconds is not None:
            seconds[name] = seconds.get(name, 0.0) + perf_counter() - start
