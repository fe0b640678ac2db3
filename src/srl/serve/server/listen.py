"""A socket to listen on, and the server's process: signals, the end, and how many connections it may have."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from srl.errors import UserError

if TYPE_CHECKING:
    import uvicorn

    from srl.serve.server.connection import BoundedConnection

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
    import uvicorn

    return uvicorn.Server(config_of(app, http))


def config_of(app: Any, http: type[BoundedConnection] | None = None) -> uvicorn.Config:
    """How uvicorn serves an app."""
    import uvicorn

    from srl.serve.server.connection import BoundedConnection

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
