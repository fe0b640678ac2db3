"""One of several processes that answer at one port: it is given its connections by the one that has it."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from threading import Thread
from typing import Any

import uvicorn

from srl.errors import SrlError
from srl.safe_log import log_to_stderr
from srl.serve.server.connection import BoundedConnection
from srl.serve.server.link import Link
from srl.serve.server.listen import SWITCH_S, allow_connections, config_of
from srl.serve.server.serving import Serving, facts_of
from srl.serve.server.siblings import Siblings

log = logging.getLogger(__name__)


def main() -> None:
    """Serve what the other end of the link (a file descriptor, the first argument) says, until told to end.

    It tells `{"ready": facts of each index}`, or `{"error": one line}` where it cannot serve.
    """
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    _end_with(link)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = link.first()
    log_to_stderr(*told["log_levels"])
    try:
        server = _server(link, told)
    except Exception as error:  # whatever it is, it is told where somebody reads
        if not isinstance(error, SrlError):
            log.exception("the server cannot start")
        line = str(error) if isinstance(error, SrlError) else f"{type(error).__name__}: {error}"
        link.send({"error": line[:4000]})
        sys.exit(2)
    allow_connections()
    sys.setswitchinterval(SWITCH_S)
    server.run()


def _server(link: Link, told: dict[str, Any]) -> ReplicaServer:
    serving = Serving.read(told["serving"])
    siblings = Siblings(link, told["replica"], told["replicas"], serving.token)
    opened = {name: serving.open(name) for name in serving.indexes}
    facts = {name: facts_of(index) for name, index in opened.items()}
    return ReplicaServer(serving.app(opened, siblings), link, siblings, facts)


def _end_with(link: Link) -> None:
    """End this process when the other end of the link is gone, whatever it is doing."""

    def watch() -> None:
        end = select.poll()
        end.register(link.fileno(), 0)
        end.poll()
        os._exit(0)

    Thread(target=watch, daemon=True).start()


class GivenConnection(BoundedConnection):
    """A connection that was accepted elsewhere; `ended` is called once it is over."""

    ended: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended()


class ReplicaServer(uvicorn.Server):
    """A server whose connections come by the link; it tells how many of them are over."""

    def __init__(self, app: Any, link: Link, siblings: Siblings, facts: dict[str, Any]) -> None:
        super().__init__(config_of(app, GivenConnection))
        self._link, self._siblings, self._facts = link, siblings, facts
        self._ended, self._told = 0, False
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._receive)
        self._link.send({"ready": self._facts})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._link.send({"leaving": True})
        await super().shutdown(sockets=[])

    def _receive(self) -> None:
        try:
            messages = self._link.receive()
        except EOFError:
            self.should_exit = True
            asyncio.get_running_loop().remove_reader(self._link.fileno())
            return
        for message, sockets in messages:
            if "connection" in message:
                task = asyncio.create_task(self._take(sockets[0]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif "doors" in message:
                self._siblings.answered(message, sockets)

    async def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client went away on the way here
            connection.close()
            self._end_one()

    def _protocol(self) -> GivenConnection:
        given = GivenConnection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        given.ended = self._end_one
        return given

    def _end_one(self) -> None:
        """Tell of the connections that are over, once for all of a moment."""
        self._ended += 1
        if not self._told:
            self._told = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._told = False
        self._link.send({"ended": self._ended})
