"""Retries of failed requests: how often, the back-off with its jitter, and `Retry-After`."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from math import inf
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt

T = TypeVar("T")

MAX_WAIT_S = 10.0
"""The longest wait before a retry, whatever `Retry-After` says; the back-off is added to it."""


async def retried(
    attempt: Callable[[], Awaitable[T]],
    *,
    attempts: int,
    is_retryable: Callable[[T], bool],
    wait_s: Callable[[int, T], float],
    sleep: Callable[[float], Awaitable[None]],
) -> T:
    """The first result of `attempt` that is not retryable, or the last of `attempts`.

    `wait_s` gives the seconds to wait after an attempt from its number (from 1) and its result.
    """

    def result(state: RetryCallState) -> T:
        assert state.outcome is not None, "an attempt has ended"
        found: T = state.outcome.result()
        return found

    retrying = AsyncRetrying(
        retry=retry_if_result(is_retryable),
        stop=stop_after_attempt(attempts),
        wait=lambda state: wait_s(state.attempt_number, result(state)),
        sleep=sleep,
        retry_error_callback=result,
    )
    return await retrying(attempt)


def backoff(base_s: float, attempt: int, jitter: float, limit_s: float = inf) -> float:
    """Seconds of exponential back-off after attempt number `attempt` (from 1), half of it jitter (0 to 1)."""
    return min(base_s * 2 ** (attempt - 1), limit_s) * (0.5 + jitter / 2)


def repeatable_jitter(attempt: int, queries: Sequence[str]) -> float:
    """A number from 0 to 1 that depends on the queries alone, so that a repeated run waits the same.

    Jitter keeps clients from returning all at once.
    """
    key = blake2b("\0".join([str(attempt), *queries]).encode(), digest_size=4).digest()
    return int.from_bytes(key) / 2**32


def retry_after(value: str) -> float | None:
    """Seconds in a `Retry-After` header, given as a number or a date (RFC 9110, 10.2.3); None if neither."""
    if re.fullmatch("[0-9]+", value.strip()):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
        return max(0.0, (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time())
    except (ValueError, OverflowError, IndexError):
        return None
