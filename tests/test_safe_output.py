"""What commands print acts on no terminal, whoever wrote it, and no error or log line has a secret in it."""

import json
import logging
import threading
import unicodedata
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from srl.cli import main, output
from srl.index import build_index
from srl.plugins import manager
from srl.safe import SafeFormatter
from srl.trajectory import Passage

TOKEN = "s3cr3t-token-of-tests"
ATTACK = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\u2066"


def is_still(text: str) -> bool:
    return not [
        c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"
    ]


def is_safe(text: str) -> bool:
    return is_still(text) and TOKEN not in text


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SRL_SEARCH_TOKEN", TOKEN)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A corpus, questions and two indexes, with an attack wherever there is text."""
    for name, more in (("a", ""), ("b", "more ")):
        passages = [Passage(f"p{row}{ATTACK}", f'"T{ATTACK}"\n{more}red fox {ATTACK}') for row in range(3)]
        build_index(passages, tmp_path / name)
    row = {"id": f"q{ATTACK}", "question": f"red fox {ATTACK}", "golden_answers": [f"fox{ATTACK}"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
    row = {"id": f"p{ATTACK}", "contents": f'"T{ATTACK}"\nfox {ATTACK} {TOKEN}'}
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


class Evil(BaseHTTPRequestHandler):
    """Says back what it was sent, and more, with the status and in the place that the path names."""

    def do_GET(self) -> None:
        self._answer(200, b'{"index_digest": "d1"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        said = f"{ATTACK} {self.headers['Authorization']}"
        if self.path == "/echo/retrieve":
            self._answer(500, said.encode())
        elif self.path == "/late/retrieve":
            self._answer(503, b"x" * 85 + said.encode())
        elif self.path == "/html/retrieve":
            self._answer(200, said.encode())
        elif self.path == "/digest/retrieve":
            self._answer(200, b'{"result": [[], []]}', f"{said.strip()} {'d' * 5000}")
        else:
            hit = {"document": {"id": said, "contents": said}, "score": 1.0}
            self._answer(200, json.dumps({"result": [[hit], [hit | {"score": said}]]}).encode())

    def _answer(self, status: int, body: bytes, digest: str = "d1") -> None:
        self.send_response(status)
        self.send_header("X-Index-Digest", digest.encode("ascii", "replace").decode())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def evil() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("page", ["echo", "late", "html", "digest", "ids"])
def test_errors_that_quote_a_server_show_no_token_and_no_escape(evil, place, capsys, page):
    url, questions = f"{evil}/{page}/retrieve", str(place / "q.jsonl")
    for command in (["-vv", "index", "eval", url, "--questions", questions], ["serve", "check", url]):
        assert main(command) in (1, 2)
        said = capsys.readouterr()
        assert is_safe(said.out + said.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["index", "search", "a", "red fox"],
        ["index", "eval", "a", "--against", "b", "--questions", "q.jsonl"],
        ["data", "show", "c.jsonl"],
        ["data", "show", "q.jsonl"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_passages_titles_and_ids_act_on_no_terminal(place, monkeypatch, capsys, arguments):
    monkeypatch.chdir(place)
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert is_still(said.out)
    assert is_safe(said.err)
    assert "\\x1b]0;pwned\\x07" in said.out
    assert "\\u202e" in said.out
    assert main([*arguments, "--json"]) == 0
    said = capsys.readouterr()
    assert is_still(said.out)
    assert ATTACK in _texts(json.loads(said.out))


def _texts(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(_texts(item) for pair in value.items() for item in pair)
    return "".join(map(_texts, value)) if isinstance(value, list) else ""


def test_errors_notes_and_crashes_are_safe(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def fail() -> None:
        output.note(f"note {ATTACK} {TOKEN}")
        raise RuntimeError(f"bug {ATTACK} {TOKEN}")

    monkeypatch.setattr(manager, "installed", fail)
    assert main(["plugins", "list"]) == 70
    err = capsys.readouterr().err
    assert is_safe(err)
    (path,) = tmp_path.glob("srl-traceback-*.txt")
    assert is_safe(path.read_text())
    assert "RuntimeError: bug \\x1b]0;pwned" in path.read_text()


def test_logs_are_safe_tracebacks_too():
    try:
        raise ValueError(f"{ATTACK} {TOKEN}")
    except ValueError as error:
        record = logging.LogRecord(
            "n", 30, "f", 1, "said %s", (f"{ATTACK} {TOKEN}",), (ValueError, error, None)
        )
    line = SafeFormatter("%(levelname)s %(message)s").format(record)
    assert is_safe(line)
    assert line.startswith("WARNING said \\x1b]0;pwned")
