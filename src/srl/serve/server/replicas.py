"""Several processes that answer at one port: one takes the connections, and sees to it that the others run.

It gives each connection to the replica that has the fewest, so connections that last are spread as evenly
as those that do not, and the port belongs to one process, as ever. A replica that dies takes its own
connections with it; new ones go to the others, or wait at the port until one is there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from threading import Thread
from typing import Any

import uvicorn

from srl import interrupts
from srl.errors import SrlError, UserError
from srl.safe_log import log_to_stderr
from srl.serve.server.connections import (
    SWITCH_S,
    BoundedConnection,
    allow_connections,
    config_of,
    listen,
    url_of,
)
from srl.serve.server.peers import MessageChannel, Peers
from srl.serve.server.settings import ServerSettings, facts_of

log = logging.getLogger(__name__)

COMMAND = "from srl.serve.server.replicas import main; main()"
FIRST_REST_S, LONGEST_REST_S = 0.5, 10.0
STEADY_S = 60.0
"""A replica that ran for so long has not failed at its start."""
STRIKES = 5
"""Ends one after the other, none after `STEADY_S` seconds of work, that are no accidents any more."""
GRACE_S = 12.0
"""For a replica to finish the requests that it is answering, at most ten seconds, and to end."""
PAUSE_S = 0.1
"""Until connections are taken again where there was no room for one."""

Facts = dict[str, dict[str, Any]]


@dataclass(eq=False)
class Replica:
    """One process, which may be the third of its number."""

    number: int
    process: Process | None = None
    link: MessageChannel | None = None
    ready: bool = False
    starts: int = 0
    given: int = 0
    """Connections, since it was started; of these `ended` are over."""
    ended: int = 0
    last: int = 0
    error: str = ""
    """Why it could not serve, in its own words."""

    @property
    def open(self) -> int:
        return self.given - self.ended

    @property
    def state(self) -> dict[str, Any]:
        """For the others."""
        pid = self.process.pid if self.process else 0
        return {"replica": self.number, "pid": pid, "ready": self.ready, "starts": self.starts}


def run_replicas(
    serving: ServerSettings,
    replicas: int,
    listener: socket.socket,
    ready: Callable[[str, Facts], None],
    note: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM from `replicas` processes, which share the port of `listener`.

    `ready` is given the URL and the facts of the indexes once all of them take requests; `note` is told
    when one has ended and is started again. At the end, as that of `run_server`, no process is left.
    Raises UserError where the first of them cannot serve, and where one ends again and again.
    """
    listen(listener)
    allow_connections()
    interrupts.run(_Supervisor(serving, replicas, listener, ready, note).run())


class _Supervisor:
    """Hands connections out, and keeps the replicas running."""

    def __init__(
        self,
        serving: ServerSettings,
        replicas: int,
        listener: socket.socket,
        ready: Callable[[str, Facts], None],
        note: Callable[[str], None],
    ) -> None:
        self._serving, self._listener = serving, listener
        self._ready, self._note = ready, note
        self._replicas = [Replica(number + 1) for number in range(replicas)]
        self._facts: Facts | None = None
        self._begun = self._paused = self._stopping = self._minding = False
        self._turns = count(1)

    async def run(self) -> None:
        self._listener.setblocking(False)
        keepers = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        try:
            await asyncio.gather(*keepers)
        finally:
            self._stopping = True
            self._mind_the_port()
            self._listener.close()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await _end(replica.process for replica in self._replicas)
            for replica in self._replicas:
                self._unlink(replica)

    async def _keep(self, replica: Replica) -> None:
        """Run a replica, and again when it has ended. Raises UserError when that leads to nothing."""
        strikes, clock = 0, asyncio.get_running_loop().time
        while True:
            began = clock()
            why = await self._live(replica)
            if not self._begun:
                raise UserError(why)
            strikes = 1 if clock() - began > STEADY_S else strikes + 1
            if strikes == STRIKES:
                raise UserError(
                    f"{STRIKES} times in a row {why}; what it wrote before that tells more, and so may "
                    "`srl serve retriever` without --replicas"
                )
            rest = min(FIRST_REST_S * 2 ** (strikes - 1), LONGEST_REST_S)
            self._note(f"{why}; it is started again in {rest:g} s")
            await asyncio.sleep(rest)

    async def _live(self, replica: Replica) -> str:
        """One life of a replica: why it ended."""
        await self._start(replica)
        assert replica.process is not None
        code = await replica.process.wait()
        if replica.link is not None:
            self._receive(replica)
        self._unlink(replica)
        if replica.error:
            return (
                f"replica {replica.number} could not serve: {replica.error}" if self._begun else replica.error
            )
        return f"replica {replica.number} of {len(self._replicas)} {_ended(code)}"

    async def _start(self, replica: Replica) -> None:
        replica.link, theirs = MessageChannel.pair()
        replica.given = replica.ended = 0
        replica.error = ""
        replica.starts += 1
        with theirs:
            end = theirs.fileno()
            replica.process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", COMMAND, str(end),
                pass_fds=(end,), stdin=DEVNULL, stdout=2, start_new_session=True,
            )  # fmt: skip
        loggers = logging.getLogger(), logging.getLogger("srl")
        replica.link.send(
            {
                "serving": self._serving.as_json(),
                "replica": replica.number,
                "replicas": len(self._replicas),
                "log_levels": [logger.getEffectiveLevel() for logger in loggers],
            }
        )
        asyncio.get_running_loop().add_reader(replica.link.fileno(), self._receive, replica)

    def _receive(self, replica: Replica) -> None:
        """What a replica says; nothing more once it is gone."""
        assert replica.link is not None
        try:
            messages = replica.link.receive()
        except EOFError:
            self._unlink(replica)
            return
        for message, _ in messages:
            if "ready" in message:
                self._welcome(replica, message["ready"])
            elif "ended" in message:
                replica.ended = message["ended"]
            elif "doors" in message:
                self._open_doors(replica)
            elif "leaving" in message:
                replica.ready = False
            replica.error = message.get("error", replica.error)
        self._mind_the_port()

    def _welcome(self, replica: Replica, facts: Facts) -> None:
        """A replica is ready, if it has the indexes that the others have."""
        self._facts = self._facts or facts
        for name, index in facts.items():
            first = self._facts[name]["digest"]
            if index["digest"] != first:
                replica.error = (
                    f"{self._serving.indexes[name].directory} holds another index ({index['digest'][:12]}) "
                    f"than when this server was started ({first[:12]}); to serve it, start the server again"
                )
                assert replica.process is not None
                replica.process.terminate()
                return
        replica.ready = True
        if not self._begun and all(one.ready for one in self._replicas):
            self._begun = True
            self._ready(url_of(self._listener), self._facts)

    def _open_doors(self, asker: Replica) -> None:
        """Connect a replica with each of the others that is ready."""
        doors: dict[int, socket.socket] = {}
        for replica in self._replicas:
            if replica is not asker and replica.ready:
                here, there = socket.socketpair()
                with there:
                    self._give(replica, there)
                doors[replica.number] = here
        states = [replica.state for replica in self._replicas]
        assert asker.link is not None
        asker.link.send({"doors": list(doors), "replicas": states}, list(doors.values()))
        for door in doors.values():
            door.close()

    def _mind_the_port(self) -> None:
        """Take connections while somebody is there for them; else they wait."""
        some = any(replica.ready for replica in self._replicas)
        wanted = some and not (self._stopping or self._paused)
        if wanted and not self._minding:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
        elif self._minding and not wanted:
            asyncio.get_running_loop().remove_reader(self._listener)
        self._minding = wanted

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError:  # no more files can be opened
            self._pause()
            return
        with connection:
            ready = sorted(
                (replica for replica in self._replicas if replica.ready),
                key=lambda replica: (replica.open, replica.last),
            )
            if not any(self._give(replica, connection) for replica in ready):
                self._pause()

    def _give(self, replica: Replica, connection: socket.socket) -> bool:
        """Whether the replica got the connection."""
        if replica.link is None or not replica.link.send({"connection": True}, [connection]):
            return False
        replica.given += 1
        replica.last = next(self._turns)
        return True

    def _pause(self) -> None:
        def go_on() -> None:
            self._paused = False
            self._mind_the_port()

        self._paused = True
        self._mind_the_port()
        asyncio.get_running_loop().call_later(PAUSE_S, go_on)

    def _unlink(self, replica: Replica) -> None:
        """Give a replica nothing more."""
        replica.ready = False
        if replica.link is not None:
            asyncio.get_running_loop().remove_reader(replica.link.fileno())
            replica.link.close()
            replica.link = None
        self._mind_the_port()


async def _end(processes: Iterable[Process | None]) -> None:
    """End what still runs: kindly, then not."""
    running = [process for process in processes if process is not None and process.returncode is None]
    for process in running:
        process.terminate()
    waits = [asyncio.create_task(process.wait()) for process in running]
    if waits:
        await asyncio.wait(waits, timeout=GRACE_S)
    for process in running:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    memory = ", perhaps for want of memory" if name == "SIGKILL" else ""
    return f"was ended by {name}{memory}"


def main() -> None:
    """Serve what the other end of the link (a file descriptor, the first argument) says, until told to end.

    It tells `{"ready": facts of each index}`, or `{"error": one line}` where it cannot serve.
    """
    link = MessageChannel(socket.socket(fileno=int(sys.argv[1])))
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


def _server(link: MessageChannel, told: dict[str, Any]) -> ReplicaServer:
    serving = ServerSettings.read(told["serving"])
    siblings = Peers(link, told["replica"], told["replicas"], serving.token)
    opened = {name: serving.open(name) for name in serving.indexes}
    facts = {name: facts_of(index) for name, index in opened.items()}
    return ReplicaServer(serving.app(opened, siblings), link, siblings, facts)


def _end_with(link: MessageChannel) -> None:
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

    def __init__(self, app: Any, link: MessageChannel, siblings: Peers, facts: dict[str, Any]) -> None:
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
