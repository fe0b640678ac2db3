"""Sends requests to a search API, with retries, a rate limit and a spending cap."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from itertools import count
from threading import BoundedSemaphore, Event, Lock
from typing import Any, NamedTuple

import httpx

from srl.index import Fault
from srl.safe import quoted, refusal
from srl.serve.http import retry_after
from srl_web.api import Result, open_part, read_answers, read_results
from srl_web.hits import cleaned
from srl_web.keys import SigningTransport
from srl_web.options import Options

MAX_BYTES = 5_000_000
BACKOFF_S, RETRY_S = 0.5, 20.0
"""Delay before the second attempt, doubled with each further one; and how long after the first attempt
another may start. A query fails at once if the API requests a longer delay."""
_TEMPORARY = {408, 425, 429}
_SHOWN = 200


class _TemporaryFault(Fault):
    """A fault that another attempt may not have."""


class _Response(NamedTuple):
    """The parts of an API's response that are used; contains no key."""

    status: int
    retry_after_s: float | None
    text: str


class Limits:
    """How often an API may be asked: `rate` times a second, evenly spaced, and `cap` times in all."""

    def __init__(self, rate: float | None, cap: int | None, clock: Callable[[], float]) -> None:
        self._interval, self._cap = 1 / rate if rate else 0.0, cap
        self._clock, self._next = clock, clock()
        self._lock = Lock()
        self.spent = 0

    def take(self) -> float:
        """Count one request; the seconds until it may be sent. Raises Fault at the cap."""
        with self._lock:
            if self._cap is not None and self.spent >= self._cap:
                raise Fault(
                    "refused", f"the spending cap of {self._cap:,} requests is reached; raise max_requests"
                )
            self.spent += 1
            now = self._clock()
            start = max(now, self._next)
            self._next = start + self._interval
            return start - now


class Caller:
    """Sends requests to the API of `options`, within its limits. Thread-safe."""

    def __init__(
        self,
        options: Options,
        keys: Mapping[str, str],
        transport: httpx.BaseTransport | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._options, self._api = options, options.chosen_api
        self._host = httpx.URL(self._api.url).host
        self._clock, self._jitter = clock, jitter
        self._stopped = Event()
        self._sleep = sleep or self._stopped.wait
        self.limits = Limits(options.rate, options.max_requests, clock)
        self._slots = BoundedSemaphore(options.concurrency)
        self._client = httpx.Client(
            transport=SigningTransport(self._api, keys, transport),
            timeout=options.timeout_s,
            headers={"User-Agent": "srl-search-web"},
        )

    def stop(self) -> None:
        """Let nothing wait any longer, and start no further attempt."""
        self._stopped.set()

    def ask(self, query: str, k: int) -> list[Result]:
        """The API's results for one query, direct answers first. Raises Fault.

        Temporary faults are retried, with up to `attempts` requests, and until `RETRY_S` after the first.
        """
        deadline = None
        for attempt in count(1):
            self._sleep(self.limits.take())
            deadline = deadline or self._clock() + RETRY_S
            try:
                return self._read(self._send(query, k))
            except _TemporaryFault as fault:
                wait = fault.retry_after_s
                if wait is None:  # exponential, half of it jitter
                    wait = BACKOFF_S * 2 ** (attempt - 1) * (0.5 + self._jitter() / 2)
                is_last = attempt == self._options.attempts or self._clock() + wait > deadline
                if is_last or self._stopped.is_set():
                    raise
            self._sleep(wait)
        raise AssertionError("the loop ends by itself")

    def _send(self, query: str, k: int) -> _Response:
        """Send one request. What httpx raises has the request, so no Fault's traceback shows it."""
        options, timeout_s = self._options, self._options.timeout_s
        values = {
            "query": query,
            "k": min(k, self._api.max_k),
            "language": options.language,
            "country": options.country,
            "answers": options.answers,
        }
        try:
            return self._exchange(values, self._clock() + timeout_s)
        except (TimeoutError, httpx.TimeoutException):
            raise _TemporaryFault("timed_out", f"{self._host} did not answer in {timeout_s:g} s") from None
        except httpx.ConnectError as error:
            raise _TemporaryFault("refused", f"{self._host}: no connection ({error})") from None
        except httpx.HTTPError as error:
            what = f"{self._host}: connection failed: {type(error).__name__}: {error}"
            raise _TemporaryFault("failed", what) from None

    def _exchange(self, values: Mapping[str, Any], deadline: float) -> _Response:
        """One request and its response. Raises TimeoutError at the deadline, though bytes still arrive."""
        call, body = open_part(self._api, values), bytearray()
        with (
            self._slots,
            self._client.stream(
                self._api.method, self._api.url, params=call.params, headers=call.headers, json=call.body
            ) as response,
        ):
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    raise Fault("failed", f"{self._host} answered with more than {MAX_BYTES:,} bytes")
                if self._clock() > deadline:
                    raise TimeoutError
        wait = retry_after(response.headers.get("Retry-After", ""))
        return _Response(response.status_code, wait, body.decode("utf-8", "replace"))

    def _read(self, response: _Response) -> list[Result]:
        """The results in a response. Raises Fault, also for a response that is not what the API describes."""
        if response.status != 200:
            raise self._fault_of(response)
        try:
            answer = json.loads(response.text)
            results = read_results(self._api, answer)
            direct = read_answers(self._api, answer) if self._options.answers else []
        except (ValueError, RecursionError) as error:
            what = "not JSON" if isinstance(error, json.JSONDecodeError) else str(error)
            text = quoted(response.text, _SHOWN)
            raise Fault("failed", f"{self._host}: {what}; response: {text}") from None
        return cleaned([*direct, *results])

    def _fault_of(self, response: _Response) -> Fault:
        """The fault for an HTTP status other than 200."""
        status = response.status
        what = f"{self._host} answered {refusal(status, response.text, _SHOWN)}"
        if status == 414:
            return Fault("rejected", what)
        if status in (401, 403):
            return Fault("refused", f"{what}; the request used {' and '.join(self._api.environment())}")
        if status in _TEMPORARY or status >= 500:
            return _TemporaryFault("failed" if status >= 500 else "refused", what, response.retry_after_s)
        return Fault("failed" if status < 400 else "refused", what)
