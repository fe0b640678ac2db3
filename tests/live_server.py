"""A search server on a free port of this machine, as `srl serve retriever` runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from srl.serve.server.connections import BoundedConnection, bind, url_of, uvicorn_config


@contextmanager
def running(app: Any, http: type[BoundedConnection] | None = None, port: int = 0) -> Iterator[str]:
    """The URL of /retrieve, while the server runs in a thread."""
    with bind(port=port) as listener:
        server = uvicorn.Server(uvicorn_config(app, http))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        listener.listen(2048)
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(15)
