"""How long the phases of a search take: a retriever times its phases, a caller collects the times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter

_collector: ContextVar[dict[str, float] | None] = ContextVar("timings", default=None)


@contextmanager
def collect_timings() -> Iterator[dict[str, float]]:
    """Phase → seconds of all searches inside the block, in this thread or task."""
    seconds: dict[str, float] = {}
    token = _collector.set(seconds)
    try:
        yield seconds
    finally:
        _collector.reset(token)


@contextmanager
def timed(phase: str) -> Iterator[None]:
    """Add the block's duration to `phase`: `embed`, `search`, `rerank` or `web`."""
    seconds, start = _collector.get(), perf_counter()
    try:
        yield
    finally:
        if seconds is not None:
            seconds[phase] = seconds.get(phase, 0.0) + perf_counter() - start
