"""The HTTP search server of an index: /retrieve, /access, /health, /metrics."""

from __future__ import annotations

import json
import os
from asyncio import to_thread
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from math import ceil
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srl import __version__
from srl.errors import expected
from srl.index import Fault, Index
from srl.safe import quoted
from srl.serve.server.answers import AnswerCache, EncodedHits, document, write_answer
from srl.serve.server.auth import Guard
from srl.serve.server.metrics import Metrics, RequestRecord
from srl.serve.server.queue import RETRY_AFTER_S, Answered, SearchQueue
from srl.serve.wire import DIGEST_HEADER, MAX_BODY_BYTES, MAX_HITS, PagesRequest, SearchRequest
from srl.trajectory import Passage

CACHE_BYTES = 128 << 20
TIMEOUT_S = 25.0
"""For a search, queueing included; below the 30 s time-out of common clients."""
MAX_WAITING = 8192
"""Queries in the queue; further requests get a 503."""
LIVE_THREADS = 8
MOST_THREADS = 4
_STATUS = {"rejected": 422, "timed_out": 504, "refused": 503, "failed": 502}
M = TypeVar("M", bound=BaseModel)


def create_app(
    index: Index,
    topk: int = 3,
    *,
    threads: int | None = None,
    processes: int = 1,
    max_batch: int = 256,
    max_waiting: int = MAX_WAITING,
    timeout_s: float = TIMEOUT_S,
    cache_bytes: int = CACHE_BYTES,
    token: str = "",
    hosts: Iterable[str] | None = None,
) -> Starlette:
    """The server of an index; `topk` is the default of requests.

    It is searched by `threads` threads (default: `default_threads`, of each of the `processes` of a server)
    in batches of at most `max_batch` queries. The answer cache takes up to `cache_bytes`, 0 for none; answers
    of a live index are not cached. With a `token`, every route but health requires `Authorization: Bearer`.
    With `hosts`, only requests to one of them or to loopback are allowed, and none from pages of other
    origins. Errors are `{"detail": one line}`.
    """
    metrics = Metrics()
    queue = SearchQueue(
        index,
        threads=threads or default_threads(index, processes),
        max_batch=max_batch,
        max_waiting=max_waiting,
        timeout_s=timeout_s,
        cache=None if index.live else AnswerCache(cache_bytes),
        report=metrics.count_batch,
    )

    async def retrieve(request: Request) -> Response:
        record: RequestRecord = request.state.record
        body = await read_body(request)
        search = read_model(SearchRequest, body)
        texts, k = search.texts, search.hits_per_query(topk)
        if len(texts) * k > MAX_HITS:
            raise HTTPException(422, f"{len(texts):,} queries × {k} hits; at most {MAX_HITS:,} hits")
        # Models write empty queries, and one of them must not fail the batch that it came in.
        record.answered = answered = await queue.search([text for text in texts if text], k)
        hits = iter(_hits(answered))
        in_place = [next(hits) if text else EncodedHits() for text in texts]
        unsearched = {place: "the query is empty" for place, text in enumerate(texts) if not text}
        answer = write_answer(in_place, bool(search.return_scores), search.query is not None, unsearched)
        return Response(answer, headers={DIGEST_HEADER: index.digest}, media_type="application/json")

    async def access(request: Request) -> Response:
        body = read_model(PagesRequest, await read_body(request))
        return Response(await to_thread(_write_pages, body.urls, index), media_type="application/json")

    async def health(request: Request) -> Response:
        """A `live` retriever searches an external service, without passages."""
        manifest = index.manifest
        about = {
            "status": "ok",
            "index_digest": index.digest,
            "corpus_digest": manifest.corpus_digest,
            "retriever": manifest.retriever,
            "options": dict(manifest.options),
            "passages": len(index),
            "live": index.live,
            "waiting": queue.waiting,
            "version": __version__,
        }
        return JSONResponse(about)

    async def prometheus(request: Request) -> Response:
        return Response(metrics.text(queue.waiting), media_type="text/plain; version=0.0.4")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        queue.close()

    guard = Guard(token, hosts)
    return Starlette(
        routes=[
            Route("/retrieve", retrieve, methods=["POST"]),
            Route("/access", access, methods=["POST"]),
            Route("/health", health),
            Route("/metrics", prometheus),
        ],
        middleware=[Middleware(Gate, guard=guard, metrics=metrics)],
        exception_handlers={HTTPException: _problem, Fault: _failed},
        lifespan=lifespan,
    )


def default_threads(index: Index, processes: int = 1) -> int:
    """Threads of a server: 1, or one per core up to 4 if the retriever searches in parallel.

    Two encoders at a time are no faster than one. The processes of a server share the cores.
    """
    if index.live:
        return LIVE_THREADS
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // processes)) if index.parallel else 1


class Gate:
    """What every request passes: who may ask, and the metrics of searches."""

    def __init__(self, app: ASGIApp, guard: Guard, metrics: Metrics) -> None:
        self._app, self._guard, self._metrics = app, guard, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = RequestRecord(scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        app = self._app
        if (refusal := self._guard.refusal(scope)) is not None:
            app = JSONResponse({"detail": refusal.detail}, refusal.status_code, refusal.headers)
        try:
            await app(scope, receive, send_noted)
        finally:
            if record.path == "/retrieve":
                self._metrics.count(record)


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises HTTPException if it is too large."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    return body


def read_model(model: type[M], body: bytes) -> M:
    """A request, as JSON whatever its type says: curl calls it a form. Raises HTTPException."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = expected(first)
        raise HTTPException(422, quoted(f"{where}: {what}" if where else what, 200)) from None


def _hits(answered: Answered) -> list[EncodedHits]:
    """The hits of all queries. If some failed, raises the first Fault with the number of failures."""
    faults = [outcome for outcome in answered.outcomes if isinstance(outcome, Fault)]
    if faults:
        first, queries = faults[0], len(answered.outcomes)
        what = "the search" if queries == 1 else f"{len(faults)} of {queries} searches"
        raise Fault(first.status, f"{what} {first.status.replace('_', ' ')}: {first}", first.retry_after_s)
    return [outcome for outcome in answered.outcomes if isinstance(outcome, EncodedHits)]


def _write_pages(urls: Sequence[str], index: Index) -> bytes:
    """A document for each address, its `url` being that address; null where there is none."""
    pages = [_page(url, index) for url in urls]
    result = b", ".join(b"null" if page is None else document(page) for page in pages)
    unknown = [url for url, page in zip(urls, pages, strict=True) if page is None]
    errors = [{"url": url, "detail": "no passage has this id"} for url in unknown]
    return b'{"result": [%b]%b}' % (result, b', "errors": ' + json.dumps(errors).encode() if errors else b"")


def _page(url: str, index: Index) -> Passage | None:
    """The passage with this id; also tries MediaWiki's other URL form."""
    for name in dict.fromkeys((url, url.replace("index.php/", "index.php?title="))):
        with suppress(KeyError, UnicodeEncodeError):
            return replace(index.passage(name), url=url)
    return None


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """A search without an answer."""
    assert isinstance(error, Fault)
    response = JSONResponse({"detail": str(error).partition("\n")[0]}, _STATUS[error.status])
    if error.status == "refused":
        response.headers["Retry-After"] = str(ceil(error.retry_after_s or RETRY_AFTER_S))
    return response
