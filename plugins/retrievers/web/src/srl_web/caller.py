"""Sends requests to the search API, with retries, a rate limit and a spending cap."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx
from tenacity import AsyncRetrying, RetryCallState, before_sleep_log, retry_if_exception_type

from srl.index.retriever import Fault
from srl.safe_text import quoted
from srl.serve.client.retry import backoff, retry_after
from srl_web.api import Call, Result, open_part, read_answers, read_results
from srl_web.hits import cleaned
from srl_web.limits import Budget, Rate
from srl_web.options import Options
from srl_web.secrets import Secrets, SigningTransport, api_transport, no_cookies

log = logging.getLogger("srl.web")

MAX_BYTES = 5_000_000
_TEMPORARY = {408, 425, 429}
_SHOWN = 200


class _Answer(NamedTuple):
    """The parts of an API's response that are used; contains no key."""

    status: int
    kind: str
    retry_after_s: float | None
    text: str
    size: int


class _TemporaryFault(Fault):
    """A temporary fault: another attempt may succeed."""


class Caller:
    """Sends requests to the API of `options` within its limits. For one event loop."""

    def __init__(
        self,
        options: Options,
        secrets: Secrets,
        budget: Budget,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._options, self._api = options, options.asked
        self._budget = budget
        self._host = httpx.URL(self._api.url).host
        self._sleep, self._jitter = sleep, jitter
        self._clock = clock or asyncio.get_running_loop().time
        self._rate = Rate(options.rate, self._clock, sleep)
        self._slots = asyncio.Semaphore(options.concurrency)
        inner = transport or api_transport(self._api.url)
        self._client = httpx.AsyncClient(
            transport=SigningTransport(self._api, secrets, inner),
            timeout=options.timeout_s,
            headers={"User-Agent": "srl-search-web"},
            cookies=no_cookies(),
        )

    async def ask(self, query: str, k: int) -> list[Result]:
        """The API's results for one query, direct answers first. Raises Fault.

        Temporary faults are retried up to `attempts` times, and at most `retry_s` after the first request.
        """
        deadline: float | None = None

        async def attempt() -> list[Result]:
            nonlocal deadline
            async with self._slots:
                await self._rate.turn()
                if deadline is None:
                    deadline = self._clock() + self._options.retry_s
                return await self._attempt(query, k)

        def is_over(state: RetryCallState) -> bool:
            late = deadline is None or self._clock() + state.upcoming_sleep > deadline
            return late or state.attempt_number >= self._options.attempts

        return await AsyncRetrying(
            retry=retry_if_exception_type(_TemporaryFault),
            stop=is_over,
            wait=self._wait,
            sleep=self._sleep,
            before_sleep=before_sleep_log(log, logging.DEBUG),
            reraise=True,
        )(attempt)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _wait(self, state: RetryCallState) -> float:
        """Seconds before the next attempt: `Retry-After`, or else exponential back-off, half of it jitter."""
        fault = state.outcome.exception() if state.outcome else None
        if isinstance(fault, Fault) and fault.retry_after_s is not None:
            return fault.retry_after_s
        return backoff(self._options.backoff_s, state.attempt_number, self._jitter())

    async def _attempt(self, query: str, k: int) -> list[Result]:
        self._budget.take()
        answer = await self._send(query, k)
        if answer.status != 200:
            raise self._fault_of(answer)
        return self._read(answer)

    async def _send(self, query: str, k: int) -> _Answer:
        """Send one request. Faults are raised outside `except`, so that tracebacks have no signed request."""
        api, options = self._api, self._options
        call = open_part(
            api,
            {
                "query": query,
                "k": min(k, api.max_k),
                "language": options.language,
                "country": options.country,
                "answers": options.answers,
            },
        )
        try:
            async with asyncio.timeout(options.timeout_s):
                return await self._exchange(call)
        except (TimeoutError, httpx.TimeoutException):
            fault = _TemporaryFault("timed_out", f"{self._host} did not answer in {options.timeout_s:g} s")
        except httpx.ConnectError as error:
            fault = _TemporaryFault("refused", f"{self._host}: no connection ({error})")
        except httpx.HTTPError as error:
            what = f"connection failed: {type(error).__name__}: {error}"
            fault = _TemporaryFault("failed", f"{self._host}: {what}")
        raise fault

    async def _exchange(self, call: Call) -> _Answer:
        api, body = self._api, bytearray()
        async with self._client.stream(
            api.method, api.url, params=call.params, headers=call.headers, json=call.body
        ) as response:
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_BYTES:
                    break
        kind = response.headers.get("Content-Type", "no content type")
        text = body.decode("utf-8", "replace")
        return _Answer(
            response.status_code, kind, retry_after(response.headers.get("Retry-After", "")), text, len(body)
        )

    def _fault_of(self, answer: _Answer) -> Fault:
        """The fault for an HTTP status other than 200."""
        status, said = answer.status, _said(answer.text)
        what = f"{self._host} answered HTTP {status}" + (f": {said}" if said else "")
        if status == 414:
            return Fault("rejected", f"{what} (the query is too long)")
        if status in (401, 403):
            names = " and ".join(self._api.environment()) or "no key"
            return Fault("refused", f"{what}; the request used {names}")
        if status in _TEMPORARY:
            return _TemporaryFault("refused", what, answer.retry_after_s)
        if status >= 500:
            return _TemporaryFault("failed", what, answer.retry_after_s)
        if status < 400:
            return Fault("failed", f"{what} instead of results; give the API's final URL")
        return Fault("refused", what)

    def _read(self, answer: _Answer) -> list[Result]:
        if answer.size > MAX_BYTES:
            raise Fault("failed", f"{self._host} answered with more than {MAX_BYTES:,} bytes")
        try:
            found = json.loads(answer.text)
            results = read_results(self._api, found)
        except RecursionError:
            raise Fault("failed", f"{self._host} answered with JSON that is nested too deeply") from None
        except json.JSONDecodeError:
            what = f"{self._host} answered with something that is not JSON ({answer.kind})"
            raise Fault("failed", what) from None
        except ValueError as error:
            said = _said(answer.text)
            what = f"{self._host}: {error}" + (f"; response: {said}" if said else "")
            raise Fault("failed", what) from None
        direct = read_answers(self._api, found) if self._options.answers else []
        return cleaned([*direct, *results])


def _said(text: str) -> str:
    """The first message in an API's JSON error, on one line; empty if there is none."""
    try:
        found = _message(json.loads(text))
    except (ValueError, RecursionError):
        return ""
    return quoted(found, _SHOWN)


def _message(value: Any) -> str:
    """The first text in `error`, `message` or `detail`, which may be nested."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return next(filter(None, map(_message, value)), "")
    if not isinstance(value, dict):
        return ""
    return next(filter(None, (_message(value.get(name)) for name in ("error", "message", "detail"))), "")
