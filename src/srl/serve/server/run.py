"""Listening and serving, in this process or in several workers."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors.multiprocess import SIGNALS, Multiprocess

from srl.errors import SrlError, UserError
from srl.index import open_index
from srl.safe import safe_message
from srl.serve.server.app import create_app
from srl.serve.server.metrics import PROCESSES

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than an episode pauses between two searches, so that the client's connection stays open."""
SWITCH_S = 0.001
"""How long a search thread may hold the GIL while requests wait; the default 5 ms costs a sixth."""


def bind(host: str = "127.0.0.1", port: int = 8000) -> socket.socket:
    """A socket bound to `host` and `port` (0 for any free port), not listening yet. Raises UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        raise _cannot_listen(host, port, error) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Start to accept connections. Raises UserError if another process took the port."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or error
    option = "--host" if isinstance(error, socket.gaierror) else "--port (0: any free one)"
    return UserError(f"cannot listen on {host}:{port}: {why}", hint=f"choose another {option}")


def url_of(listener: socket.socket) -> str:
    """The URL for searches at a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/retrieve"


def uvicorn_config(app: Any, workers: int = 1) -> uvicorn.Config:
    """uvicorn's settings for an app, or for what makes one in each of several `workers`."""
    return uvicorn.Config(
        app,
        factory=workers > 1,
        workers=workers,
        ws="none",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=10,
    )


def run_server(app: Any, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; requests in progress get up to ten seconds to finish.

    Calls `ready` with the URL once requests are accepted. After SIGINT raises KeyboardInterrupt; after
    SIGTERM the caller's handler runs.
    """
    listen(listener)
    _prepare_process()
    ready(url_of(listener))
    uvicorn.Server(uvicorn_config(app)).run(sockets=[listener])


def _prepare_process() -> None:
    """Raise the limit of open files, whose common default of 1,024 is too low, and share the GIL fairly."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    sys.setswitchinterval(SWITCH_S)


@dataclass(frozen=True, slots=True)
class AppFactory:
    """Opens the index at `directory`, with `options` of its retriever, and makes its server.

    Calling it is what a worker does. `settings` are further arguments of `create_app`.
    """

    directory: str
    options: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict, repr=False)

    def __call__(self) -> Starlette:
        _prepare_process()
        try:
            return self.app()
        except SrlError as error:
            print(f"srl: {safe_message(str(error))}", file=sys.stderr)
            sys.exit(STARTUP_FAILURE)

    def app(self) -> Starlette:
        """Raises UserError where the index cannot be opened."""
        return create_app(open_index(self.directory, self.options), **self.settings)


class Workers(Multiprocess):
    """uvicorn's supervisor of several processes at one port; it starts one that dies again."""

    ended_by: signal.Signals | None = None

    def handle_int(self) -> None:
        self.ended_by = signal.SIGINT
        super().handle_int()

    def handle_term(self) -> None:
        self.ended_by = signal.SIGTERM
        super().handle_term()


def run_workers(
    factory: AppFactory, workers: int, listener: socket.socket, ready: Callable[[str], None]
) -> None:
    """Serve from several processes, as `run_server` does from one.

    Raises UserError if a worker cannot start; the reason is on stderr.
    """
    listen(listener)
    url = url_of(listener)

    def announce() -> None:
        """The first worker that has opened the index answers."""
        try:
            httpx.get(url.replace("/retrieve", "/health"), timeout=None, trust_env=False)
        except httpx.HTTPError:
            return
        ready(url)

    with ExitStack() as stack:
        os.environ[PROCESSES] = stack.enter_context(tempfile.TemporaryDirectory(prefix="srl-metrics-"))
        stack.callback(os.environ.pop, PROCESSES)
        handlers = {each: signal.getsignal(each) for each in SIGNALS}
        supervisor = Workers(uvicorn_config(factory, workers), [listener])
        threading.Thread(target=announce, daemon=True).start()
        supervisor.run()
    for each, handler in handlers.items():
        signal.signal(each, handler)
    if supervisor.ended_by is None:
        raise UserError("a worker could not start")
    signal.raise_signal(supervisor.ended_by)
