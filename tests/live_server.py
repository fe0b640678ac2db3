"""A search server on a free port of this machine, as `srl serve retriever` runs it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import randrange
from typing import Any

import uvicorn

from srl.serve.server.run import bind, listen, url_of, uvicorn_config


def free_port() -> int:
    """A port for a process that listens on it later: not one that the system gives to connections."""
    while True:
        port = randrange(20_000, 29_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    """The URL of /retrieve, while the server runs in a thread."""
    with bind(port=port) as listener:
        server = uvicorn.Server(uvicorn_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        listen(listener)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(60)
