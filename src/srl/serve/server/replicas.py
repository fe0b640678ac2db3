"""Several server processes (replicas) at one port: the supervisor, and the replica itself.

The supervisor accepts connections and passes each one to the replica with the fewest, so that long
connections are spread as evenly as short ones. It restarts replicas that end. A replica that dies loses its
own connections; new ones go to the others, or wait at the port until one is ready.
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

import srl.process
from srl.errors import SrlError, UserError
from srl.safe import log_to_stderr
from srl.serve.server.app import ServerSettings, facts_of
from srl.serve.server.connections import (
    SWITCH_S,
    BoundedConnection,
    allow_connections,
    listen,
    url_of,
    uvicorn_config,
)
from srl.serve.server.replica_messages import MessageChannel, Peers

log = logging.getLogger(__name__)

COMMAND = "from srl.serve.server.replicas import main; main()"
FIRST_REST_S, LONGEST_REST_S = 0.5, 10.0
STEADY_S = 60.0
"""A replica that ran this long has not failed at its start."""
STRIKES = 5
"""Consecutive early ends, each before `STEADY_S`, after which the server gives up."""
GRACE_S = 12.0
"""Time for a replica to finish its requests (at most ten seconds) and exit."""
PAUSE_S = 0.1
"""Pause of accepting after a connection could not be accepted or passed on."""

Facts = dict[str, dict[str, Any]]


@dataclass(eq=False)
class Replica:
    """One replica: a process that is replaced when it ends."""

    number: int
    process: Process | None = None
    channel: MessageChannel | None = None
    ready: bool = False
    starts: int = 0
    given: int = 0
    """Connections passed to the current process; `ended` of them are closed."""
    ended: int = 0
    last: int = 0
    error: str = ""
    """Its own message why it could not serve."""

    @property
    def open(self) -> int:
        return self.given - self.ended

    @property
    def state(self) -> dict[str, Any]:
        """The state, as its peers are told."""
        pid = self.process.pid if self.process else 0
        return {"replica": self.number, "pid": pid, "ready": self.ready, "starts": self.starts}


def run_replicas(
    settings: ServerSettings,
    replicas: int,
    listener: socket.socket,
    ready: Callable[[str, Facts], None],
    note: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM from `replicas` processes, which share the port of `listener`.

    Calls `ready` with the URL and the facts of the indexes once all accept requests, and `note` when one
    has ended and is restarted. Ends like `run_server`, with no process left. Raises UserError if a replica
    cannot start at first, or keeps ending.
    """
    listen(listener)
    allow_connections()
    srl.process.run_async(_Supervisor(settings, replicas, listener, ready, note).run())


class _Supervisor:
    """Distributes connections and keeps the replicas running."""

    def __init__(
        self,
        settings: ServerSettings,
        replicas: int,
        listener: socket.socket,
        ready: Callable[[str, Facts], None],
        note: Callable[[str], None],
    ) -> None:
        self._settings, self._listener = settings, listener
        self._ready, self._note = ready, note
        self._replicas = [Replica(number + 1) for number in range(replicas)]
        self._facts: Facts | None = None
        self._started = self._paused = self._stopping = self._accepting = False
        self._turns = count(1)

    async def run(self) -> None:
        self._listener.setblocking(False)
        tasks = [asyncio.create_task(self._keep(replica)) for replica in self._replicas]
        try:
            await asyncio.gather(*tasks)
        finally:
            self._stopping = True
            self._update_accepting()
            self._listener.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _end(replica.process for replica in self._replicas)
            for replica in self._replicas:
                self._disconnect(replica)

    async def _keep(self, replica: Replica) -> None:
        """Run a replica and restart it when it ends. Raises UserError if it keeps ending."""
        strikes, clock = 0, asyncio.get_running_loop().time
        while True:
            began = clock()
            why = await self._run_once(replica)
            if not self._started:
                raise UserError(why)
            strikes = 1 if clock() - began > STEADY_S else strikes + 1
            if strikes == STRIKES:
                raise UserError(
                    f"{why}, {STRIKES} times in a row; see its output above, or try "
                    "`srl serve retriever` without --replicas"
                )
            rest = min(FIRST_REST_S * 2 ** (strikes - 1), LONGEST_REST_S)
            self._note(f"{why}; restarting it in {rest:g} s")
            await asyncio.sleep(rest)

    async def _run_once(self, replica: Replica) -> str:
        """Start a replica and wait for its end. Returns why it ended."""
        await self._start(replica)
        assert replica.process is not None
        code = await replica.process.wait()
        if replica.channel is not None:
            self._receive(replica)
        self._disconnect(replica)
        if replica.error:
            return (
                f"replica {replica.number} could not serve: {replica.error}"
                if self._started
                else replica.error
            )
        return f"replica {replica.number} of {len(self._replicas)} {_ended(code)}"

    async def _start(self, replica: Replica) -> None:
        replica.channel, theirs = MessageChannel.pair()
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
        replica.channel.send(
            {
                "settings": self._settings.as_json(),
                "replica": replica.number,
                "replicas": len(self._replicas),
                "log_levels": [logger.getEffectiveLevel() for logger in loggers],
            }
        )
        asyncio.get_running_loop().add_reader(replica.channel.fileno(), self._receive, replica)

    def _receive(self, replica: Replica) -> None:
        """Handle the messages of a replica."""
        assert replica.channel is not None
        try:
            messages = replica.channel.receive()
        except EOFError:
            self._disconnect(replica)
            return
        for message, _ in messages:
            if "ready" in message:
                self._mark_ready(replica, message["ready"])
            elif "ended" in message:
                replica.ended = message["ended"]
            elif "doors" in message:
                self._open_doors(replica)
            elif "leaving" in message:
                replica.ready = False
            replica.error = message.get("error", replica.error)
        self._update_accepting()

    def _mark_ready(self, replica: Replica, facts: Facts) -> None:
        """Mark a replica as ready if it has the same indexes as the others."""
        self._facts = self._facts or facts
        for name, index in facts.items():
            first = self._facts[name]["digest"]
            if index["digest"] != first:
                replica.error = (
                    f"the index at {self._settings.indexes[name].directory} has changed: expected digest "
                    f"{first[:12]}, found {index['digest'][:12]}; restart the server to serve it"
                )
                assert replica.process is not None
                replica.process.terminate()
                return
        replica.ready = True
        if not self._started and all(one.ready for one in self._replicas):
            self._started = True
            self._ready(url_of(self._listener), self._facts)

    def _open_doors(self, asker: Replica) -> None:
        """Send a replica one socket per other replica that is ready, connected to it."""
        doors: dict[int, socket.socket] = {}
        for replica in self._replicas:
            if replica is not asker and replica.ready:
                here, there = socket.socketpair()
                with there:
                    self._give(replica, there)
                doors[replica.number] = here
        states = [replica.state for replica in self._replicas]
        assert asker.channel is not None
        asker.channel.send({"doors": list(doors), "replicas": states}, list(doors.values()))
        for door in doors.values():
            door.close()

    def _update_accepting(self) -> None:
        """Accept connections while a replica is ready; else they wait at the port."""
        some = any(replica.ready for replica in self._replicas)
        wanted = some and not (self._stopping or self._paused)
        if wanted and not self._accepting:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
        elif self._accepting and not wanted:
            asyncio.get_running_loop().remove_reader(self._listener)
        self._accepting = wanted

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
        """Pass a connection on. Returns whether the replica got it."""
        if replica.channel is None or not replica.channel.send({"connection": True}, [connection]):
            return False
        replica.given += 1
        replica.last = next(self._turns)
        return True

    def _pause(self) -> None:
        def go_on() -> None:
            self._paused = False
            self._update_accepting()

        self._paused = True
        self._update_accepting()
        asyncio.get_running_loop().call_later(PAUSE_S, go_on)

    def _disconnect(self, replica: Replica) -> None:
        """Close the channel to a replica."""
        replica.ready = False
        if replica.channel is not None:
            asyncio.get_running_loop().remove_reader(replica.channel.fileno())
            replica.channel.close()
            replica.channel = None
        self._update_accepting()


async def _end(processes: Iterable[Process | None]) -> None:
    """Terminate the processes that still run; kill those that do not end within `GRACE_S`."""
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
    memory = ", perhaps out of memory" if name == "SIGKILL" else ""
    return f"was ended by {name}{memory}"


def main() -> None:
    """The main function of a replica; the first argument is the file descriptor of its channel.

    Sends `{"ready": facts of each index}`, or `{"error": one line}` if it cannot serve.
    """
    channel = MessageChannel(socket.socket(fileno=int(sys.argv[1])))
    _exit_with(channel)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = channel.first()
    log_to_stderr(*config["log_levels"])
    try:
        server = _server(channel, config)
    except Exception as error:  # the supervisor reports it
        if not isinstance(error, SrlError):
            log.exception("the server cannot start")
        line = str(error) if isinstance(error, SrlError) else f"{type(error).__name__}: {error}"
        channel.send({"error": line[:4000]})
        sys.exit(2)
    allow_connections()
    sys.setswitchinterval(SWITCH_S)
    server.run()


def _server(channel: MessageChannel, config: dict[str, Any]) -> ReplicaServer:
    settings = ServerSettings.read(config["settings"])
    peers = Peers(channel, config["replica"], config["replicas"], settings.token)
    opened = {name: settings.open(name) for name in settings.indexes}
    facts = {name: facts_of(index) for name, index in opened.items()}
    return ReplicaServer(settings.app(opened, peers), channel, peers, facts)


def _exit_with(channel: MessageChannel) -> None:
    """Exit this process as soon as the supervisor has ended."""

    def watch() -> None:
        end = select.poll()
        end.register(channel.fileno(), 0)
        end.poll()
        os._exit(0)

    Thread(target=watch, daemon=True).start()


class GivenConnection(BoundedConnection):
    """A connection that the supervisor accepted; calls `ended` when it closes."""

    ended: Callable[[], None]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.ended()


class ReplicaServer(uvicorn.Server):
    """A server that gets its connections from the supervisor, and reports how many have closed."""

    def __init__(self, app: Any, channel: MessageChannel, peers: Peers, facts: dict[str, Any]) -> None:
        super().__init__(uvicorn_config(app, GivenConnection))
        self._channel, self._peers, self._facts = channel, peers, facts
        self._ended, self._scheduled = 0, False
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._receive)
        self._channel.send({"ready": self._facts})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._channel.send({"leaving": True})
        await super().shutdown(sockets=[])

    def _receive(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self.should_exit = True
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            return
        for message, sockets in messages:
            if "connection" in message:
                task = asyncio.create_task(self._take(sockets[0]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif "doors" in message:
                self._peers.answered(message, sockets)

    async def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client disconnected meanwhile
            connection.close()
            self._end_one()

    def _protocol(self) -> GivenConnection:
        given = GivenConnection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        given.ended = self._end_one
        return given

    def _end_one(self) -> None:
        """Count a closed connection; the count is sent once per tick."""
        self._ended += 1
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send_ended)

    def _send_ended(self) -> None:
        self._scheduled = False
        self._channel.send({"ended": self._ended})
