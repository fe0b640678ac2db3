"""The HTTP search server: `POST /retrieve`, `/health`, `/healthz`, `/metrics`."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from srl import __version__
from srl.errors import UserError
from srl.index import Index
from srl.serve.queue import SearchQueue
from srl.serve.wire import DIGEST_HEADER, Limits, RequestError, read_request, write_answer

log = logging.getLogger(__name__)


class Metrics:
    """What the server has done since it started, for Prometheus."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()
        self.queries = 0
        self.errors = 0
        self.seconds = 0.0

    def count(self, status: int, queries: int, seconds: float) -> None:
        self.requests[status] += 1
        self.queries += queries
        self.errors += status >= 400
        self.seconds += seconds

    def text(self, index: Index) -> str:
        manifest = index.manifest
        about = f'retriever="{manifest.retriever}",digest="{index.digest}",version="{__version__}"'
        lines = [
            "# HELP srl_search_requests_total Requests to /retrieve, by HTTP status.",
            "# TYPE srl_search_requests_total counter",
            *(
                f'srl_search_requests_total{{status="{code}"}} {n}'
                for code, n in sorted(self.requests.items())
            ),
            "# HELP srl_search_queries_total Queries answered.",
            "# TYPE srl_search_queries_total counter",
            f"srl_search_queries_total {self.queries}",
            "# HELP srl_search_errors_total Requests to /retrieve answered with an error.",
            "# TYPE srl_search_errors_total counter",
            f"srl_search_errors_total {self.errors}",
            "# HELP srl_search_request_seconds Time from a request's arrival to its answer.",
            "# TYPE srl_search_request_seconds summary",
            f"srl_search_request_seconds_sum {self.seconds:.6f}",
            f"srl_search_request_seconds_count {self.requests.total()}",
            "# HELP srl_search_index_passages Passages in the index.",
            "# TYPE srl_search_index_passages gauge",
            f"srl_search_index_passages{{{about}}} {len(index)}",
        ]
        return "\n".join(lines) + "\n"


def create_app(index: Index, topk: int = 3, limits: Limits | None = None) -> FastAPI:
    """The server of one index; `topk` stands in where a request names none.

    What is wrong with a request is answered with a 4xx and `{"detail": one line}`.
    """
    limits = limits or Limits()
    queue, metrics = SearchQueue(index), Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        queue.close()

    app = FastAPI(title="srl search", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(HTTPException, _http_error)

    @app.post("/retrieve", openapi_extra=_OPENAPI)
    async def retrieve(request: Request) -> Response:
        start, queries = perf_counter(), 0
        try:
            asked = read_request(await _body(request, limits.body_bytes), topk, limits)
            found = await queue.search(asked.queries, asked.topk)
            queries = len(asked.queries)
            response = Response(write_answer(found, asked.return_scores), media_type="application/json")
        except RequestError as error:
            response = _error(str(error), error.status)
        except ClientDisconnect:
            response = _error("the client went away", 400)
        except Exception as error:  # whatever a retriever raises fails one request, not the server
            log.exception("a search failed")
            response = _error(f"the search failed: {type(error).__name__}: {error}".partition("\n")[0], 500)
        response.headers[DIGEST_HEADER] = index.digest
        metrics.count(response.status_code, queries, perf_counter() - start)
        return response

    @app.get("/health")
    @app.get("/healthz")
    async def health() -> JSONResponse:
        return JSONResponse(describe(index), headers={DIGEST_HEADER: index.digest})

    @app.get("/metrics")
    async def prometheus() -> PlainTextResponse:
        return PlainTextResponse(metrics.text(index), media_type="text/plain; version=0.0.4")

    return app


_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "queries": {"type": "array", "items": {"type": "string"}},
                        "query": {"type": "string"},
                        "topk": {"type": "integer", "minimum": 1},
                        "return_scores": {"type": "boolean", "default": False},
                    },
                },
                "example": {"queries": ["who wrote the origin of species"], "topk": 3, "return_scores": True},
            }
        },
    }
}


def describe(index: Index) -> dict[str, Any]:
    """What /health says."""
    manifest = index.manifest
    return {
        "status": "ok",
        "index_digest": index.digest,
        "corpus_digest": manifest.corpus_digest,
        "retriever": manifest.retriever,
        "options": dict(manifest.options),
        "passages": len(index),
        "version": __version__,
    }


async def _body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise RequestError(f"the body is larger than {limit:,} bytes", 413)
    return bytes(body)


def _error(message: str, status: int) -> Response:
    return JSONResponse({"detail": message}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 say what there is."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    there = "POST /retrieve, GET /health, /healthz and /metrics"
    return _error(f"no {request.method} {request.url.path} here; there are {there}", status)


def bind(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """A socket bound to `host` and `port` (0: any free one), not yet listening. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except socket.gaierror as error:
        raise UserError(f"no host {host!r} to listen on ({error.strerror}); try --host 127.0.0.1") from error
    except (OSError, OverflowError) as error:
        raise _taken(host, port, error) from error
    return listener


def _taken(host: str, port: int, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or str(error)
    return UserError(f"cannot listen on {host}:{port}: {why}; choose another --port (0 takes any free one)")


def url_of(listener: socket.socket) -> str:
    """The URL that a bound socket answers searches at."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/retrieve"


def run_server(app: FastAPI, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; requests that are being answered get up to ten seconds to finish.

    `ready` is given the URL as soon as requests are taken. At the end KeyboardInterrupt is raised, or
    what the caller's handler of SIGTERM does happens.
    """
    import uvicorn

    try:
        listener.listen(2048)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _taken(host, port, error) from error
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=10, server_header=False
    )
    ready(url_of(listener))
    uvicorn.Server(config).run(sockets=[listener])
