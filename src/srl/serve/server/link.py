"""What two processes of one server say to each other: lines of JSON, with open sockets in them."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

CHUNK = 1 << 16
MOST_SOCKETS = 64
"""In one message: one for each other replica, of which there may be 64."""


class Link:
    """One end of a pair of Unix sockets; only `first` waits."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._text = b""
        self._sockets: deque[socket.socket] = deque()
        self._early: list[tuple[dict[str, Any], list[socket.socket]]] = []
        end.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[Link, socket.socket]:
        """One end to use here, and the other to give away."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], sockets: Sequence[socket.socket] = ()) -> bool:
        """Whether the message is on its way: not where the other end is gone, or does not read."""
        line = json.dumps({**message, "sockets": len(sockets)}).encode() + b"\n"
        try:
            sent = socket.send_fds(self._end, [line], [one.fileno() for one in sockets])
        except OSError:
            return False
        return sent == len(line)

    def receive(self) -> list[tuple[dict[str, Any], list[socket.socket]]]:
        """The messages that are here, each with its sockets. Raises EOFError when the other end is gone."""
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
        """The first message, waited for. Raises EOFError."""
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
