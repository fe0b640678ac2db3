"""The listening socket, uvicorn's settings, and time-outs for every stage of a connection."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from srl.errors import UserError

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
    except socket.gaierror as error:
        raise UserError(f"no host {host!r} to listen on ({error.strerror}); try --host 127.0.0.1") from error
    except (OSError, OverflowError) as error:
        raise _taken(host, port, error) from error
    return listener


def _taken(host: str, port: int, error: Exception) -> UserError:
    why = getattr(error, "strerror", None) or str(error)
    return UserError(f"cannot listen on {host}:{port}: {why}; choose another --port (0 takes any free one)")


def url_of(listener: socket.socket) -> str:
    """The URL for searches at a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/retrieve"


def listen(listener: socket.socket) -> None:
    """Start to accept connections. Raises UserError if another process took the port."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _taken(host, port, error) from error


def run_server(app: Any, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; requests in progress get up to ten seconds to finish.

    Calls `ready` with the URL once requests are accepted. After SIGINT raises KeyboardInterrupt; after
    SIGTERM the caller's handler runs.
    """
    listen(listener)
    allow_connections()
    sys.setswitchinterval(SWITCH_S)
    server = uvicorn.Server(uvicorn_config(app))
    ready(url_of(listener))
    server.run(sockets=[listener])


def uvicorn_config(app: Any, connection: type[BoundedConnection] | None = None) -> uvicorn.Config:
    """uvicorn's settings for an app; tests pass a `connection` with other time-outs."""
    return uvicorn.Config(
        app,
        http=connection or BoundedConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=10,
    )


def allow_connections() -> None:
    """Raise the limit of open files as far as the system allows: the common default of 1,024 is too low."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with time-outs (seconds) for every stage, against slow and dead clients."""

    header_bytes = 64 << 10
    header_s = 10.0
    """For the request line and headers to arrive, from their first byte or from the connection."""
    drain_s = 10.0
    """For the rest of a body, after the request was answered before its end."""
    write_s = 60.0
    """For a client to continue reading an answer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(self.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_headers:
            if self._reading is None and (self.cycle is None or self.cycle.response_complete):
                self._expect(self.header_s)  # an empty line between requests ends uvicorn's own timer
            return
        self._header_bytes += len(data)
        if self._header_bytes > self.header_bytes:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._reading is None:
            self._expect(self.header_s)

    def on_message_begin(self) -> None:
        self._in_headers, self._header_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._arrived()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._expect(self.drain_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _expect(self, within_s: float) -> None:
        """Close the connection unless `_arrived` is called in time."""
        self._arrived()
        self._reading = self.loop.call_later(within_s, self.transport.close)

    def _arrived(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
