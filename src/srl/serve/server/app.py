"""The HTTP search server: /retrieve, /access, /health, /metrics and /docs, for one index or several."""

from __future__ import annotations

import os
import re
from asyncio import to_thread
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from srl import __version__
from srl.errors import UserError
from srl.index import Index, open_index
from srl.serve.server import openapi
from srl.serve.server.access_endpoint import read_urls, write_pages
from srl.serve.server.answer_cache import AnswerCache
from srl.serve.server.auth import Guard
from srl.serve.server.metrics import Metrics
from srl.serve.server.openapi import docs_page
from srl.serve.server.queue import SearchQueue
from srl.serve.server.replica_messages import OWN, Peers, whole_health, whole_metrics
from srl.serve.server.request_log import RequestLog
from srl.serve.server.retrieve_endpoint import RetrieveHandler, ServedIndex, problem
from srl.serve.wire import DIGEST_HEADER, Limits, RequestError

CACHE_BYTES = 128 << 20
DEFAULT_NAME = "default"
RETRIEVE = "/retrieve"
LIVE_THREADS = 8
MOST_THREADS = 4
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ROUTES = "POST /retrieve and /access, GET /health, /healthz, /metrics, /docs and /openapi.json"


class SearchApp(FastAPI):
    """Checks access to every route, and routes searches itself.

    FastAPI's routing takes as long as all the rest of a cached search.
    """

    guard: Guard
    handler: RetrieveHandler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, method = scope["path"], scope["method"]
            search = method == "POST" and (path == RETRIEVE or path.startswith(f"{RETRIEVE}/"))
            if (error := self.guard.refusal(scope)) is not None:
                if search:
                    return await self.handler.refuse(error, scope, receive, send)
                return await problem(str(error), error.status)(scope, receive, send)
            if search:
                return await self.handler.serve(path[len(RETRIEVE) + 1 :], scope, receive, send)
            if method == "HEAD":
                scope = {**scope, "method": "GET"}
        return await super().__call__(scope, receive, send)


def create_app(
    indexes: Index | Mapping[str, Index],
    topk: int = 3,
    limits: Limits | None = None,
    *,
    threads: int | None = None,
    max_batch: int = 256,
    batch_wait_s: float = 0.0,
    cache_bytes: int = CACHE_BYTES,
    token: str = "",
    hosts: Iterable[str] | None = None,
    log: RequestLog | None = None,
    peers: Peers | None = None,
) -> SearchApp:
    """The server of one index, or of several by name, the first of which is the default.

    `topk` is the default of requests. Each index is searched by `threads` threads (default:
    `default_threads`) in batches of at most `max_batch` queries; while the index is idle, a batch is
    delayed by `batch_wait_s` to let more queries join. The answer cache takes up to `cache_bytes`, 0 for
    none; answers of a live index are not cached. With a `token`, every route but health requires
    `Authorization: Bearer`. With `hosts`, only requests to one of them or to loopback are allowed, and none
    from pages of other origins. With `peers` this is one of several processes at one port, and reports on
    all of them. Invalid requests get a 4xx with `{"detail": one line}`. Raises UserError for an index name
    that does not fit in a URL.
    """
    named = {DEFAULT_NAME: indexes} if isinstance(indexes, Index) else dict(indexes)
    _check_names(named)
    limits, metrics, cache = limits or Limits(), Metrics(), AnswerCache(cache_bytes)
    served = {
        name: ServedIndex(
            name,
            index,
            SearchQueue(
                index,
                threads=threads or default_threads(index, peers.count if peers else 1),
                max_batch=max_batch,
                batch_wait_s=batch_wait_s,
                max_waiting=limits.waiting,
                timeout_s=limits.timeout_s,
                cache=None if index.live else cache,
                report=partial(metrics.count_batch, name),
            ),
        )
        for name, index in named.items()
    }
    metrics.watch_cache(cache)
    metrics.watch_indexes(named, {name: one.queue for name, one in served.items()})
    app = _app(served)
    app.guard, app.handler = Guard(token, hosts), RetrieveHandler(served, topk, limits, metrics, log)
    _add_searches(app, app.handler, limits)
    _add_views(app, served, metrics, peers)
    return app


def default_threads(index: Index, replicas: int = 1) -> int:
    """Threads per index: 1, or one per core up to 4 if the retriever searches in parallel.

    Two encoders at a time are no faster than one. Replicas share the cores.
    """
    if index.live:
        return LIVE_THREADS
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // replicas)) if index.parallel else 1


def _check_names(named: Mapping[str, Index]) -> None:
    if not named:
        raise UserError("no index to serve; expected at least one")
    for name in named:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{name!r} is not a valid index name: expected letters, digits, dots, dashes and underscores"
            )


def _app(served: Mapping[str, ServedIndex]) -> SearchApp:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for one in served.values():
            one.queue.close()

    app = SearchApp(title="srl search", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    return app


def _add_searches(app: FastAPI, handler: RetrieveHandler, limits: Limits) -> None:
    names = list(handler.served)
    body, name = openapi.retrieve_request(limits, names), openapi.name_in_path(names)
    asked: dict[str, Any] = {
        "response_model": openapi.Answer,
        "responses": openapi.answers("The hits of each query.")
        | openapi.problems(400, 401, 403, 404, 408, 409, 413, 415, 422, 502, 503, 504),
    }

    @app.post(f"{RETRIEVE}/{{name}}", summary="Search one index.", openapi_extra=body | name, **asked)
    @app.post(
        RETRIEVE,
        summary="Search the default index, or the one that the body names.",
        openapi_extra=body,
        **asked,
    )
    async def retrieve() -> None:
        """Declared for OpenAPI; `SearchApp` routes it to the RetrieveHandler."""

    @app.post(
        "/access",
        summary="Passages by id, which may be a web address.",
        response_model=openapi.Pages,
        openapi_extra=openapi.access_request(limits),
        responses=openapi.problems(400, 401, 403, 408, 413, 415, 422, 503),
    )
    async def access(request: Request) -> Response:
        urls = read_urls(await handler.bodies.read(request.scope["headers"], request.receive), limits)
        indexes = [one.index for one in handler.served.values()]
        return Response(await to_thread(write_pages, urls, indexes), media_type="application/json")

    @app.get(
        "/health/{name}",
        summary="One index.",
        response_model=openapi.NamedHealth,
        openapi_extra=name,
        responses=openapi.problems(403, 404),
    )
    async def health_of(request: Request) -> Response:
        served = handler.choose(request.path_params["name"])
        return _health(describe(served), served)


def _add_views(
    app: FastAPI, served: Mapping[str, ServedIndex], metrics: Metrics, peers: Peers | None
) -> None:
    first = next(iter(served.values()))

    def others(request: Request) -> Peers | None:
        """The other replicas to ask; None if one of them is asking."""
        return None if request.url.query == OWN else peers

    @app.get("/healthz", summary="The same as /health.", response_model=openapi.Health)
    @app.get("/health", summary="The indexes that are served.", response_model=openapi.Health)
    async def health(request: Request) -> Response:
        own = {**describe(first), "indexes": {name: describe_index(one) for name, one in served.items()}}
        if (all_of := others(request)) is not None:
            own = whole_health(all_of.number, own, *await all_of.get("/health"))
        return _health(own, first)

    @app.get(
        "/metrics",
        summary="Metrics for Prometheus.",
        response_class=PlainTextResponse,
        responses=openapi.problems(401, 403),
    )
    async def prometheus(request: Request) -> Response:
        text = metrics.text()
        if (all_of := others(request)) is not None:
            text = whole_metrics(all_of.number, text, *await all_of.get("/metrics"))
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        return HTMLResponse(docs_page(app.openapi(), str(request.base_url)))


def describe_index(served: ServedIndex) -> dict[str, Any]:
    index, manifest = served.index, served.index.manifest
    return {
        "index_digest": index.digest,
        "corpus_digest": manifest.corpus_digest,
        "retriever": manifest.retriever,
        "options": dict(manifest.options),
        "passages": len(index),
        "live": index.live,
        "waiting": served.queue.waiting,
    }


def describe(served: ServedIndex) -> dict[str, Any]:
    """The facts in /health/NAME."""
    return {"status": "ok", **describe_index(served), "version": __version__}


def _health(facts: dict[str, Any], served: ServedIndex) -> Response:
    return JSONResponse(facts, headers={DIGEST_HEADER: served.index.digest})


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 list the routes."""
    assert isinstance(error, HTTPException)
    response = problem(
        f"no route {request.method} {request.url.path}; available: {_ROUTES}", error.status_code
    )
    response.headers.update(error.headers or {})
    return response


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return problem(str(error), error.status)


async def _gone(request: Request, error: Exception) -> Response:
    return problem("the client disconnected", 400)


@dataclass(frozen=True, slots=True)
class IndexSource:
    """An index on disk, and the options of its retriever for this machine."""

    directory: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Indexes by name, and the arguments of `create_app`; `log_requests` turns the request log on."""

    indexes: Mapping[str, IndexSource]
    topk: int = 3
    limits: Limits = field(default_factory=Limits)
    threads: int | None = None
    max_batch: int = 256
    batch_wait_s: float = 0.0
    cache_bytes: int = CACHE_BYTES
    token: str = field(default="", repr=False)
    hosts: tuple[str, ...] | None = None
    log_requests: bool = False
    log_queries: bool = False

    def open(self, name: str) -> Index:
        """Raises UserError."""
        return open_index(self.indexes[name].directory, self.indexes[name].options)

    def app(self, opened: Mapping[str, Index], peers: Peers | None = None) -> SearchApp:
        """The server of these indexes; with `peers`, one of several."""
        replica = peers.number if peers else None
        wanted = self.log_requests or self.log_queries
        return create_app(
            opened,
            self.topk,
            self.limits,
            threads=self.threads,
            max_batch=self.max_batch,
            batch_wait_s=self.batch_wait_s,
            cache_bytes=self.cache_bytes,
            token=self.token,
            hosts=self.hosts,
            log=RequestLog(queries=self.log_queries, replica=replica) if wanted else None,
            peers=peers,
        )

    def as_json(self) -> dict[str, Any]:
        """For another process; the inverse of `read`."""
        return asdict(self)

    @classmethod
    def read(cls, known: Mapping[str, Any]) -> ServerSettings:
        indexes = {name: IndexSource(**source) for name, source in known["indexes"].items()}
        hosts = None if known["hosts"] is None else tuple(known["hosts"])
        return cls(**{**known, "indexes": indexes, "limits": Limits(**known["limits"]), "hosts": hosts})


def facts_of(index: Index) -> dict[str, Any]:
    """What is reported about an index that is served."""
    return {
        "passages": len(index),
        "live": index.live,
        "retriever": index.manifest.retriever,
        "digest": index.digest,
    }
