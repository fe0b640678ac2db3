"""A socket to listen on, and the server's process: signals, the end, and how many connections it may have."""

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
"""Longer than clients of an episode pause between two searches, so that they find their connection open."""

SWITCH_S = 0.001
"""How long a searching thread may keep Python to itself while requests wait; the usual 5 ms cost a sixth."""


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


def listen(listener: socket.socket) -> None:
    """Let a bound socket take connections. Raises UserError where another one got there first."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _taken(host, port, error) from error


def run_server(app: Any, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; requests that are being answered get up to ten seconds to finish.

    `ready` is given the URL as soon as requests are taken. At the end KeyboardInterrupt is raised, or
    what the caller's handler of SIGTERM does happens.
    """
    listen(listener)
    allow_connections()
    sys.setswitchinterval(SWITCH_S)
    server = server_of(app)
    ready(url_of(listener))
    server.run(sockets=[listener])


def server_of(app: Any, http: type[BoundedConnection] | None = None) -> uvicorn.Server:
    """The server of an app, which runs until `should_exit` is set or a signal comes.

    `http` is what a connection is: one with other time-outs, say.
    """
    return uvicorn.Server(config_of(app, http))


def config_of(app: Any, http: type[BoundedConnection] | None = None) -> uvicorn.Config:
    """How uvicorn serves an app."""
    return uvicorn.Config(
        app,
        http=http or BoundedConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=10,
    )


def allow_connections() -> None:
    """As many open files as the system gives: 1,024, a usual default, is soon reached."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with a time-out (seconds) for every stage, not only between requests."""

    header_bytes = 64 << 10
    header_s = 10.0
    """For a request's line and headers to arrive, and for the first of them after the connection."""
    drain_s = 10.0
    """For the rest of a body that was answered before it ended."""
    write_s = 60.0
    """For a client to take some of an answer that it has stopped reading."""

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
        """Hang up unless something is complete in time."""
        self._arrived()
        self._reading = self.loop.call_later(within_s, self.transport.close)

    def _arrived(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
