"""`POST /retrieve`: reads the body, searches, writes the answer or a one-line error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from time import perf_counter

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from srl.index import Fault, Index
from srl.serve import wire
from srl.serve.query_batcher import clean
from srl.serve.server.answer_cache import NOTHING, EncodedHits, write_answer
from srl.serve.server.metrics import Metrics
from srl.serve.server.queue import RETRY_AFTER_S, Answered, SearchQueue
from srl.serve.server.request_log import RequestLog
from srl.serve.wire import DIGEST_HEADER, Limits, RequestError, read_request

EMPTY = "the query is empty"
_STATUS = {"rejected": 422, "timed_out": 504, "refused": 503, "failed": 502}


@dataclass(frozen=True, slots=True)
class ServedIndex:
    """An index with its name and its queue."""

    name: str
    index: Index
    queue: SearchQueue

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of an answer."""
        digest = (DIGEST_HEADER.lower().encode(), self.index.digest.encode())
        return [(b"content-type", b"application/json"), digest]


@dataclass(slots=True)
class _RequestRecord:
    """What is known about a request so far, for metrics and log."""

    path: str
    served: ServedIndex | None
    asked: wire.Request | None = None
    answered: Answered | None = None
    start: float = field(default_factory=perf_counter)


class RetrieveHandler:
    """Handles searches of several indexes; the first one is the default."""

    def __init__(
        self,
        served: Mapping[str, ServedIndex],
        topk: int,
        limits: Limits,
        metrics: Metrics,
        log: RequestLog | None,
    ) -> None:
        self.served = served
        self.default = next(iter(served.values()))
        self.bodies = BodyReader(limits)
        self._topk, self._limits = topk, limits
        self._metrics, self._log = metrics, log

    async def serve(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for the index `name`, or for the one that the body names.

        Errors are answered with a status and `{"detail": one line}`.
        """
        record = _RequestRecord(scope["path"], None if name else self.default)
        try:
            body = await self._answer(name, scope, receive, record)
        except (RequestError, Fault, ClientDisconnect) as error:
            await self._refuse(error, record, scope, receive, send)
            return
        assert record.served is not None
        self._count(record, 200)
        headers = [*record.served.headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def refuse(self, error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with an error without reading it; it is counted and logged."""
        await self._refuse(error, _RequestRecord(scope["path"], None), scope, receive, send)

    async def _refuse(
        self, error: Exception, record: _RequestRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response = refusal(error)
        if record.served is not None:
            response.headers[DIGEST_HEADER] = record.served.index.digest
        self._count(record, response.status_code, str(error))
        await response(scope, receive, send)

    def choose(self, name: str, asked: str = "") -> ServedIndex:
        """The index that the path (`name`) or the body (`asked`) names. Raises RequestError."""
        wanted = [given for given in (name, asked) if given] or [self.default.name]
        for given in wanted:
            if given not in self.served:
                raise RequestError(f"no index {given[:80]!r}; available: {', '.join(self.served)}", 404)
        if wanted[0] != wanted[-1]:
            raise RequestError(f"the URL names the index {name!r}, the body {asked!r}"[:200], 409)
        return self.served[wanted[0]]

    async def _answer(self, name: str, scope: Scope, receive: Receive, record: _RequestRecord) -> bytes:
        record.served = record.served or self.choose(name)
        body = await self.bodies.read(scope["headers"], receive)
        record.asked = asked = read_request(body, self._topk, self._limits)
        record.served = self.choose(name, asked.index)
        queries = [clean(query) for query in asked.queries]
        record.answered = await record.served.queue.search([query for query in queries if query], asked.topk)
        found = iter(_found(record.answered))
        errors = {place: EMPTY for place, query in enumerate(queries) if not query}
        in_place = [next(found) if query else NOTHING for query in queries]
        return write_answer(in_place, asked.return_scores, asked.single, errors)

    def _count(self, record: _RequestRecord, status: int, detail: str = "") -> None:
        """Add a request to the metrics, and to the log if there is one."""
        seconds = perf_counter() - record.start
        name = record.served.name if record.served else ""
        self._metrics.count(name, status, seconds, record.answered if status == 200 else None)
        if self._log is not None:
            asked = record.asked
            self._log.write(
                record.path,
                status,
                seconds,
                index=name,
                queries=asked.queries if asked else (),
                k=asked.topk if asked else None,
                answered=record.answered,
                detail=detail,
            )


def _found(answered: Answered) -> list[EncodedHits]:
    """The hits of all queries. If some failed, raises the first Fault with the number of failures."""
    found = [outcome for outcome in answered.outcomes if isinstance(outcome, EncodedHits)]
    asked = len(answered.outcomes)
    if len(found) == asked:
        return found
    first = next(outcome for outcome in answered.outcomes if isinstance(outcome, Fault))
    what = "the search" if asked == 1 else f"{asked - len(found)} of {asked} searches"
    raise Fault(first.status, f"{what} {first.status.replace('_', ' ')}: {first}", first.retry_after_s)


def refusal(error: Exception) -> Response:
    """The answer to a request that failed."""
    if isinstance(error, RequestError):
        return problem(str(error), error.status)
    if not isinstance(error, Fault):
        return problem("the client disconnected", 400)
    response = problem(str(error).partition("\n")[0], _STATUS[error.status])
    if error.status == "refused":
        response.headers["Retry-After"] = str(ceil(error.retry_after_s or RETRY_AFTER_S))
    return response


def problem(detail: str, status: int) -> Response:
    """The error answer of every route."""
    response = JSONResponse({"detail": detail}, status)
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status == 408:
        response.headers["Connection"] = "close"
    if status == 503:
        response.headers["Retry-After"] = str(ceil(RETRY_AFTER_S))
    return response


_CURL = "application/x-www-form-urlencoded"


class BodyReader:
    """Reads request bodies of at most `limits.body_bytes`, and `limits.buffered_bytes` in all at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.buffered = 0

    async def read(self, headers: Sequence[tuple[bytes, bytes]], receive: Receive) -> bytes:
        """The body. Raises RequestError if it is not JSON, too large, too slow, or exceeds the total.

        Raises ClientDisconnect if the client disconnects before its end.
        """
        _check_headers(headers, self._limits)
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    body += chunk
                    self.buffered += len(chunk)
                    self._check_size(len(body))
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {self._limits.body_s:g} s", 408) from None
        finally:
            self.buffered -= len(body)
        return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._limits.body_bytes:
            raise _too_large(self._limits)
        if self.buffered > self._limits.buffered_bytes:
            raise RequestError("too many large requests at once; try again later", 503)


def _too_large(limits: Limits) -> RequestError:
    return RequestError(f"the body is larger than {limits.body_bytes:,} bytes", 413)


def _check_headers(headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> None:
    for name, value in headers:
        if name == b"content-type":
            _check_kind(value.decode("latin-1"))
        elif name == b"content-length":
            if value.isdigit() and int(value[:20]) > limits.body_bytes:
                raise _too_large(limits)
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise RequestError(
                f"the body is encoded as {value.decode('latin-1')[:40]}; send it uncompressed", 415
            )


def _check_kind(value: str) -> None:
    """Accepts JSON, a missing type, and the form type, which curl sends by default."""
    kind = value.partition(";")[0].strip().lower()
    if kind and kind != _CURL and not kind.endswith(("/json", "+json")):
        raise RequestError(f"the body is {kind[:80]}; send application/json", 415)
