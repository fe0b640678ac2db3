"""The web application: who may ask, what is sent with every answer, and the routes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from threading import BoundedSemaphore
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from srl import __version__
from srl.browse.transcript import NoTrajectoryError
from srl.browse.web.pages import MissingError, Page, Pages
from srl.browse.web.rendering import HERE
from srl.errors import UserError
from srl.serve.server.auth import Guard
from srl.serve.server.run import bind, run_server
from srl.workspace import Workspace

_logger = logging.getLogger(__name__)

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

    `Host` must name this machine, so that a name made to resolve to it (DNS rebinding) gets nothing. Another
    site can neither frame the page nor load parts of it: a browser says in `Origin` and `Sec-Fetch-Site` who
    asks, and only a link that is followed may come from elsewhere.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self._app if _is_from_here(scope) else _REFUSAL
        return await app(scope, receive, with_headers)


_GUARD = Guard(hosts=())
_REFUSAL = PlainTextResponse("this page answers on this machine only: open it as http://127.0.0.1\n", 403)


def _is_from_here(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    from_elsewhere = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    is_followed = headers.get("sec-fetch-dest") == "document"
    return _GUARD.refusal(scope) is None and (is_followed or not from_elsewhere)


def create_app(workspace: Workspace) -> Guarded:
    """The pages over the runs of `workspace`; nothing is ever written there."""
    pages, slots = Pages(workspace), BoundedSemaphore(AT_ONCE)

    def route(path: str, view: Callable[[Request], Page]) -> Route:
        def endpoint(request: Request) -> Response:
            return _answer(pages, view, request, slots)

        return Route(path, endpoint, methods=["GET"])

    def missing(request: Request, error: Exception) -> Response:
        return HTMLResponse(pages.html(pages.problem(f"no page {request.url.path}"), request), 404)

    def refused(request: Request, error: Exception) -> Response:
        return PlainTextResponse("these pages can only be read\n", 405, {"allow": "GET, HEAD"})

    routes = [
        route("/", pages.runs),
        route("/run/{run}", pages.run),
        route("/run/{run}/trajectories", pages.trajectories),
        route("/run/{run}/trajectory/{id}", pages.trajectory),
        route("/run/{run}/group/{id}", pages.group),
        route("/question", pages.question),
        route("/compare", pages.compare),
        route("/sql", pages.sql),
        Mount("/assets", StaticFiles(directory=HERE / "static")),
    ]
    handlers: dict[Any, Any] = {404: missing, 405: refused}
    return Guarded(Starlette(routes=routes, exception_handlers=handlers))


def _answer(
    pages: Pages, view: Callable[[Request], Page], request: Request, slots: BoundedSemaphore
) -> Response:
    """The page as HTML; 304 if the log is as it was when the browser got the page."""
    address = f"{__version__} {request.url.path}?{request.url.query} {pages.state(request)}"
    tag = f'W/"{hashlib.blake2b(address.encode(), digest_size=12).hexdigest()}"'
    headers = {"cache-control": "no-cache", "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    try:
        with slots:
            return HTMLResponse(pages.html(view(request), request), headers=headers)
    except (UserError, OSError) as error:
        status = 404 if isinstance(error, MissingError | NoTrajectoryError | FileNotFoundError) else 400
        why = str(error).removeprefix("--")
    except Exception:
        _logger.exception("the page %s failed", request.url.path)
        status, why = 500, "this page failed; the terminal of `srl inspect web` has the error"
    return HTMLResponse(pages.html(pages.problem(why), request), status)


def serve_pages(workspace: Workspace, port: int, ready: Callable[[str], None]) -> None:
    """Serve on this machine until SIGINT; calls `ready` with the address once requests are accepted.

    `port` 0 is any free one. Raises UserError for one that is taken.
    """
    with bind(port=port) as listener:
        run_server(create_app(workspace), listener, lambda url: ready(url.removesuffix("retrieve")))
