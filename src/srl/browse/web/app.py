"""The web application: who may ask, what is sent with every answer, and the routes."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable
from threading import BoundedSemaphore
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srl import __version__
from srl.browse.web.pages import MissingError, Page, Pages
from srl.browse.web.rendering import HERE
from srl.errors import UserError
from srl.serve.server.auth import Guard
from srl.workspace import Workspace

_logger = logging.getLogger(__name__)

ASSETS = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
AT_ONCE = 2
"""Pages that are made at the same time: each reads the log with all cores."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guarded:
    """Lets in what a person on this machine asked for, and adds `HEADERS` to every answer.

    Another site can neither frame the page nor load parts of it: a browser says in `Sec-Fetch-Site` that
    another site asks, and only a link that is followed may come from there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._guard = Guard(hosts=())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        app = self._app if refusal is None else refusal

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        return await app(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        if (error := self._guard.refusal(scope)) is not None:
            why = "this page answers on this machine only: open it as http://127.0.0.1 or http://localhost\n"
            return PlainTextResponse(why, error.status)
        sent = dict(scope["headers"])
        from_elsewhere = sent.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
        if from_elsewhere and sent.get(b"sec-fetch-dest") != b"document":
            return PlainTextResponse("this page is not part of other sites\n", 403)
        return None


def create_app(workspace: Workspace) -> Guarded:
    """The pages over the runs of `workspace`; nothing is ever written there."""
    pages = Pages(workspace)
    slots = BoundedSemaphore(AT_ONCE)

    def route(path: str, view: Callable[[Request], Page]) -> Route:
        def endpoint(request: Request) -> Response:
            return _answer(pages, view, request, slots)

        return Route(path, endpoint, methods=["GET"])

    routes = [
        route("/", pages.runs),
        route("/run/{run}", pages.run),
        route("/run/{run}/trajectories", pages.trajectories),
        route("/run/{run}/trajectory/{id}", pages.trajectory),
        route("/run/{run}/siblings/{id}", pages.siblings),
        route("/question", pages.question),
        route("/compare", pages.compare),
        route("/sql", pages.sql),
        Route("/assets/{name}", _asset, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {404: _no_page(pages), 405: _no_method}
    return Guarded(Starlette(routes=routes, exception_handlers=handlers))


def _answer(
    pages: Pages, view: Callable[[Request], Page], request: Request, slots: BoundedSemaphore
) -> Response:
    """The page as HTML; 304 if the log is as it was when the browser got the page."""
    tag = _tag(pages, request)
    headers = {"cache-control": "no-cache", "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    try:
        with slots:
            return HTMLResponse(pages.html(view(request), request), headers=headers)
    except (UserError, OSError) as error:
        status = 404 if isinstance(error, MissingError | FileNotFoundError) else 400
        why = str(error).removeprefix("--")
    except Exception:
        _logger.exception("the page %s failed", request.url.path)
        status, why = 500, "this page failed; the terminal of `srl inspect web` has the error"
    return HTMLResponse(pages.html(pages.problem(why), request), status)


def _tag(pages: Pages, request: Request) -> str:
    """What identifies a page: its address and the state of the logs that it may read."""
    address = f"{__version__} {request.url.path}?{request.url.query}"
    state = pages.state(request.path_params.get("run"))
    return f'W/"{hashlib.blake2b(f"{address} {state}".encode(), digest_size=12).hexdigest()}"'


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        return PlainTextResponse("no such file\n", 404)
    return FileResponse(
        HERE / "static" / name, media_type=ASSETS[name], headers={"cache-control": "no-cache"}
    )


def _no_page(pages: Pages) -> Callable[[Request, Exception], Response]:
    def answer(request: Request, error: Exception) -> Response:
        return HTMLResponse(pages.html(pages.problem(f"no page {request.url.path}"), request), 404)

    return answer


def _no_method(request: Request, error: Exception) -> Response:
    return PlainTextResponse("these pages can only be read\n", 405, {"allow": "GET, HEAD"})


def serve_pages(workspace: Workspace, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT; calls `ready` with the address once requests are accepted."""
    import uvicorn

    from srl.serve.server.connections import listen, uvicorn_config

    app = create_app(workspace)
    listen(listener)
    host, port = listener.getsockname()[:2]
    ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/")
    uvicorn.Server(uvicorn_config(app)).run(sockets=[listener])
