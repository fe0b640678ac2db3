"""A stand-in of the Hugging Face hub on loopback: what a repository holds, and its files."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_SMALL = 64
"""Files up to this size are git's own, larger ones LFS's."""


class Hub:
    """Repositories by name. What goes wrong is set from outside; `ranges` are the bytes asked for."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = {name: dict(files) for name, files in repositories.items()}
        self.refuses: dict[str, int] = {}
        """The status of requests for a file."""
        self.ranges: list[tuple[str, str]] = []
        self.tokens: list[tuple[str, str]] = []
        self.asked: list[str] = []
        """The questions about repositories and files of models, in order."""
        self.url = ""
        self.head = COMMIT
        self.gated: set[str] = set()
        """Repositories of models that only a request with a token may read."""
        self.tags: list[str] = []

    def metadata(self, name: str) -> dict[str, Any]:
        siblings = [_sibling(path, data) for path, data in self.repositories[name].items()]
        return {"id": name, "siblings": siblings, "private": False, "downloads": 0, "tags": self.tags}


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    blob = sha1(b"blob %d\0" % len(data) + data).hexdigest()
    row: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
    if len(data) > _SMALL:
        row["lfs"] = {"size": len(data), "sha256": sha256(data).hexdigest(), "pointerSize": 130}
    return row


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub, at `hub.url`; files come from another host name (localhost), as the real one's do."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.tokens.append((path, self.headers.get("Authorization", "")))
            if path.startswith("/api/"):
                self.tell(path.partition("/api/")[2].partition("/")[2])
            elif path.startswith("/datasets/"):
                self.send_response(302)
                where = f"http://localhost:{self.server.server_address[1]}/files{path}"
                self.send_header("Location", where)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self.give(path.removeprefix("/files/datasets/").lstrip("/"))

        def do_HEAD(self) -> None:
            """What huggingface_hub asks of a model's file before it downloads it."""
            name, _, where = self.path.lstrip("/").removeprefix("datasets/").partition("/resolve/")
            hub.asked.append(self.path)
            if name in hub.gated and not self.headers.get("Authorization"):
                self.answer(401, b"", {"X-Error-Code": "GatedRepo"})
                return
            row = _sibling("", hub.repositories[name][where.partition("/")[2]])
            etag = row["lfs"]["sha256"] if "lfs" in row else row["blobId"]
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Content-Length": str(row["size"])}
            self.answer(200, b"", headers)

        def tell(self, rest: str) -> None:
            name, _, revision = rest.partition("/revision/")
            hub.asked.append(self.path)
            if "/tree/" in name:
                self.tell_tree(name.partition("/tree/")[0])
            elif name not in hub.repositories:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("", "main", COMMIT):
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                commit = COMMIT if revision == COMMIT else hub.head
                self.answer(200, json.dumps({**hub.metadata(name), "sha": commit}).encode())

        def tell_tree(self, name: str) -> None:
            rows = []
            for path, data in hub.repositories[name].items():
                row = _sibling(path, data)
                lfs = {"lfs": {**row["lfs"], "oid": row["lfs"]["sha256"]}} if "lfs" in row else {}
                rows.append({"type": "file", "path": path, "size": row["size"], "oid": row["blobId"], **lfs})
            self.answer(200, json.dumps(rows).encode())

        def give(self, rest: str) -> None:
            name, _, where = rest.partition("/resolve/")
            file = where.partition("/")[2]
            asked = self.headers.get("Range", "")
            hub.ranges.append((file, asked))
            if file in hub.refuses:
                self.answer(hub.refuses[file], b"")
            else:
                self.answer(200, hub.repositories[name][file])

        def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler
