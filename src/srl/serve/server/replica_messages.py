"""How the replicas of a server exchange messages and sockets, and report on all of them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CHUNK = 1 << 16
MOST_SOCKETS = 64
"""In one message: one per replica, of which there are at most 64."""


class MessageChannel:
    """Lines of JSON with open sockets, over one end of a pair of Unix sockets. Only `first` blocks."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._text = b""
        self._sockets: deque[socket.socket] = deque()
        self._early: list[tuple[dict[str, Any], list[socket.socket]]] = []
        end.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[MessageChannel, socket.socket]:
        """One end to use here, and the other to pass on."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], sockets: Sequence[socket.socket] = ()) -> bool:
        """Whether the message was sent; False if the other end is closed or does not read."""
        line = json.dumps({**message, "sockets": len(sockets)}).encode() + b"\n"
        try:
            sent = socket.send_fds(self._end, [line], [one.fileno() for one in sockets])
        except OSError:
            return False
        return sent == len(line)

    def receive(self) -> list[tuple[dict[str, Any], list[socket.socket]]]:
        """The messages that have arrived, with their sockets. Raises EOFError if the other end is closed."""
        early, self._early = self._early, []
        if early:
            return early
        try:
            data, numbers, _, _ = socket.recv_fds(self._end, CHUNK, MOST_SOCKETS)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        self._sockets.extend(socket.socket(fileno=number) for number in numbers)
        if not data:
            raise EOFError
        *lines, self._text = (self._text + data).split(b"\n")
        return [self._message(json.loads(line)) for line in lines]

    def first(self) -> dict[str, Any]:
        """Wait for the first message. Raises EOFError."""
        self._end.setblocking(True)
        try:
            while not (found := self.receive()):
                pass
        finally:
            self._end.setblocking(False)
        self._early = found[1:]
        return found[0][0]

    def close(self) -> None:
        for one in (self._end, *self._sockets):
            one.close()

    def _message(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[socket.socket]]:
        return message, [self._sockets.popleft() for _ in range(message.pop("sockets"))]


OWN = "replica=own"
"""The query string of requests between replicas: report on this replica alone."""

WITHIN_S = 2.0
"""A replica that does not answer its peers within this time is `silent`."""


class Peers:
    """Connects a replica (`number`, from 1) to the others through the supervisor.

    The supervisor answers `{"doors": true}` with the states of all replicas and a socket connected to each
    of the others that is ready (a "door").
    """

    def __init__(self, channel: MessageChannel, number: int, count: int, token: str = "") -> None:
        self.number, self.count = number, count
        self._channel, self._token = channel, token
        self._asked: deque[asyncio.Future[tuple[dict[str, Any], list[socket.socket]]]] = deque()

    def answered(self, message: dict[str, Any], doors: list[socket.socket]) -> None:
        """Deliver an answer of the supervisor."""
        waiting = self._asked.popleft() if self._asked else None
        if waiting is not None and not waiting.done():
            waiting.set_result((message, doors))
        else:
            for door in doors:
                door.close()

    async def get(self, page: str) -> tuple[list[dict[str, Any]], dict[int, bytes]]:
        """The states of all replicas as the supervisor sees them, and the page of each of the others."""
        answer: asyncio.Future[tuple[dict[str, Any], list[socket.socket]]]
        answer = asyncio.get_running_loop().create_future()
        if not self._channel.send({"doors": True}):
            return [], {}
        self._asked.append(answer)
        try:
            async with asyncio.timeout(WITHIN_S):
                message, doors = await answer
        except TimeoutError:
            return [], {}
        texts = await asyncio.gather(*(self._read(door, page) for door in doors))
        found = zip(message["doors"], texts, strict=True)
        return message["replicas"], {number: text for number, text in found if text is not None}

    async def _read(self, door: socket.socket, page: str) -> bytes | None:
        """The page of one replica; None if it does not answer in time."""
        ask = f"GET {page}?{OWN} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        ask += f"Authorization: Bearer {self._token}\r\n\r\n" if self._token else "\r\n"
        try:
            async with asyncio.timeout(WITHIN_S):
                reader, writer = await asyncio.open_unix_connection(sock=door)
                writer.write(ask.encode())
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
                writer.close()
        except (OSError, TimeoutError):
            door.close()
            return None
        return body if head.startswith(b"HTTP/1.1 200") else None


def whole_health(
    number: int, own: dict[str, Any], replicas: Sequence[Mapping[str, Any]], others: Mapping[int, bytes]
) -> dict[str, Any]:
    """/health of all replicas: the length of all queues, and the status of each replica."""
    answers = {number: own} | {other: json.loads(text) for other, text in others.items()}
    listed = [
        {
            **one,
            "status": _status(one, answers),
            "waiting": answers[one["replica"]]["waiting"] if one["replica"] in answers else 0,
        }
        for one in replicas
    ]
    indexes = {
        name: {**index, "waiting": sum(each["indexes"][name]["waiting"] for each in answers.values())}
        for name, index in own["indexes"].items()
    }
    return {
        **own,
        "status": "ok" if listed and all(one["status"] == "ok" for one in listed) else "degraded",
        "waiting": sum(each["waiting"] for each in answers.values()),
        "indexes": indexes,
        "replicas": listed,
    }


def _status(one: Mapping[str, Any], answers: Mapping[int, Any]) -> str:
    if one["replica"] in answers:
        return "ok"
    return "silent" if one["ready"] else "starting"


def whole_metrics(
    number: int, own: bytes, replicas: Sequence[Mapping[str, Any]], others: Mapping[int, bytes]
) -> bytes:
    """/metrics of all replicas, with the label `replica`; a restart resets only the series of one."""
    heads: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for replica, text in sorted({number: own, **others}.items()):
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif line:
                series.setdefault(family, []).append(_labelled(line, replica))
    lines = [line for family, head in heads.items() for line in (*head, *series.get(family, ()))]
    return "\n".join([*lines, *_of_replicas(replicas, {number, *others}), ""]).encode()


def _labelled(line: str, replica: int) -> str:
    """`name{index="a"} 1` or `name 1`, with the label `replica` added."""
    end = next(place for place, letter in enumerate(line) if letter in "{ ")
    more = "," if line[end] == "{" else "}"
    return f'{line[:end]}{{replica="{replica}"{more}{line[end + (line[end] == "{") :]}'


def _of_replicas(replicas: Sequence[Mapping[str, Any]], answered: set[int]) -> Iterator[str]:
    yield "# HELP srl_search_replica_up Whether a replica answers."
    yield "# TYPE srl_search_replica_up gauge"
    for one in replicas:
        yield f'srl_search_replica_up{{replica="{one["replica"]}"}} {float(one["replica"] in answered)}'
    yield "# HELP srl_search_replica_starts_total How often a replica was started."
    yield "# TYPE srl_search_replica_starts_total counter"
    for one in replicas:
        yield f'srl_search_replica_starts_total{{replica="{one["replica"]}"}} {float(one["starts"])}'
