"""`srl serve` as it is typed: it says where it listens, and stops when told to."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from srl.cli import main, output
from srl.errors import UserError
from srl.index import build_index
from srl.serve import check, server
from srl.serve.server import bind
from srl.serve.server.connections import allow_connections
from srl.trajectory import Passage


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("index") / "i"
    build_index([Passage(str(row), f'"T"\nred fox {row}') for row in range(5)], directory)
    return directory


@contextmanager
def serving(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, once it takes requests; killed at the end if it still runs."""
    command = [sys.executable, "-c", "import sys; from srl.cli import main; sys.exit(main())"]
    command += ["serve", "retriever", "--index", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_serves_until_a_signal_and_ends_with_its_code(directory, sent, code):
    with serving(directory) as (process, url):
        with urlopen(url.replace("/retrieve", "/healthz")) as answer:
            assert json.load(answer)["passages"] == 5
        assert main(["serve", "check", url, "--query", "red fox", "--query", "fox"]) == 0
        process.send_signal(sent)
        _, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert "serving 5 passages by bm25" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_signal_is_obeyed_while_a_request_is_odd(directory):
    body = json.dumps({"queries": ["red fox"], "topk": "a." * 300_000 + "://"}).encode()
    with serving(directory) as (process, url):
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=60) as raw:
            head = (
                f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            raw.sendall(head.encode() + body)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert process.returncode == 143


def test_listening_to_the_network_is_said_aloud(directory, capsys, monkeypatch):
    monkeypatch.setattr(server, "run_server", lambda app, listener, ready: ready(server.url_of(listener)))
    assert main(["serve", "retriever", "--index", str(directory), "--port", "0"]) == 0
    assert "without a token" not in capsys.readouterr().err
    assert main(["serve", "retriever", "--index", str(directory), "--port", "0", "--host", "0.0.0.0"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("http://0.0.0.0:")
    assert "listening on 0.0.0.0: anyone who can reach this machine can search without a token" in err


def served(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, list]:
    """The exit code and the apps that would run."""
    apps: list = []
    monkeypatch.setattr(server, "run_server", lambda app, listener, ready: apps.append(app))
    return main(["serve", "retriever", "--port", "0", *map(str, arguments)]), apps


def names(app: object) -> list[str]:
    return list(app.handler.served)  # type: ignore[attr-defined]


def test_an_open_door_is_said_whatever_q_says_and_a_token_closes_it(directory, capsys, monkeypatch):
    wide = ("--index", directory, "--host", "0.0.0.0")
    served(monkeypatch, *wide)
    assert "without a token; to require one, type: export SRL_SEARCH_TOKEN=" in capsys.readouterr().err
    monkeypatch.setattr(server, "run_server", lambda app, listener, ready: None)
    assert main(["-q", "serve", "retriever", "--port", "0", *map(str, wide)]) == 0
    assert "without a token" in capsys.readouterr().err
    monkeypatch.setenv("SRL_SEARCH_TOKEN", "s3cret")
    _, (app,) = served(monkeypatch, *wide)
    err = capsys.readouterr().err
    assert "without a token" not in err
    assert "s3cret" not in err
    assert app.guard.token == b"s3cret"


def test_a_token_in_another_variable_is_kept_secret_too(directory, capsys, monkeypatch):
    monkeypatch.setenv("MINE", "s3cret-of-mine")
    _, (app,) = served(monkeypatch, "--index", directory, "--token-env", "MINE")
    assert app.guard.token == b"s3cret-of-mine"
    output.warn("it is s3cret-of-mine")
    said = capsys.readouterr()
    assert "s3cret-of-mine" not in said.out + said.err


@pytest.mark.parametrize(
    ("token", "message"),
    [("", "$MINE has no token"), ("två ord", "contains characters that a header cannot carry")],
)
def test_a_token_that_cannot_be_is_one_line(directory, capsys, monkeypatch, token, message):
    monkeypatch.setenv("MINE", token)
    assert served(monkeypatch, "--index", directory, "--token-env", "MINE")[0] == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_indexes_have_their_directory_s_name_or_the_one_given(directory, tmp_path, capsys, monkeypatch):
    odd = tmp_path / "my index=1"
    odd.symlink_to(directory)
    code, (app,) = served(monkeypatch, "--index", f"wiki={directory}", "--index", directory, "--index", odd)
    assert code == 0
    assert names(app) == ["wiki", "i", "my-index-1"]
    assert "serving 5 passages by bm25 as wiki" in capsys.readouterr().err
    assert served(monkeypatch, "--index", directory, "--index", directory)[0] == 2
    assert "duplicate name 'i'; give another: --index NAME=" in capsys.readouterr().err
    assert served(monkeypatch, "--index", f"a/b={directory}")[0] == 2
    assert "is not a valid index name" in capsys.readouterr().err


def test_indexes_whose_directories_give_no_name_do_not_replace_each_other(
    directory, tmp_path, capsys, monkeypatch
):
    here, there = tmp_path / "索引", tmp_path / "индекс"
    for link in (here, there):
        link.symlink_to(directory)
    _, (app,) = served(monkeypatch, "--index", here, "--index", f"other={there}")
    assert names(app) == ["index", "other"]
    assert served(monkeypatch, "--index", here, "--index", there)[0] == 2
    assert "duplicate name 'index'; give another: --index NAME=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 4096, [(4096, 4096)]),
        (1024, resource.RLIM_INFINITY, [(65536, resource.RLIM_INFINITY)]),
        (100_000, 200_000, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_as_many_connections_are_allowed_as_the_system_gives(monkeypatch, soft, hard, expected):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: asked.append(limits))
    allow_connections()
    assert asked == expected


def test_a_setting_is_for_all_or_for_the_index_it_names(directory, monkeypatch):
    both = ("--index", f"a={directory}", "--index", f"b={directory}")
    _, (app,) = served(monkeypatch, *both, "--set", "n_threads=2", "--set", "b.n_threads=3")
    threads = [one.index._retriever.options.n_threads for one in app.handler.served.values()]
    assert threads == [2, 3]


def test_a_setting_is_for_the_longest_name_that_it_begins_with(directory, monkeypatch):
    both = ("--index", f"wiki={directory}", "--index", f"wiki.v2={directory}")
    given = ("--set", "wiki.v2.n_threads=4", "--set", "wiki.n_threads=2")
    for indexes in (both, both[2:] + both[:2]):
        _, (app,) = served(monkeypatch, *indexes, *given)
        threads = {name: one.index._retriever.options.n_threads for name, one in app.handler.served.items()}
        assert threads == {"wiki": 2, "wiki.v2": 4}


def test_a_busy_port_is_one_line_and_exit_code_2(directory, capsys):
    with bind(port=0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "retriever", "--index", str(directory), "--port", port]) == 2
    err = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert len(err.splitlines()) == 1


def test_serving_what_is_no_index_is_exit_code_2(tmp_path, capsys):
    assert main(["serve", "retriever", "--index", str(tmp_path / "nowhere"), "--port", "0"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_checking_sends_the_token_that_training_sends(capsys, monkeypatch):
    sent: list[str] = []

    def check_server(*_: object, token: str) -> None:
        sent.append(token)
        raise UserError("no search server answers")

    monkeypatch.setattr(check, "check_server", check_server)
    monkeypatch.setenv("SRL_SEARCH_TOKEN", " s3cret\n")
    main(["serve", "check", "http://127.0.0.1:1"])
    assert sent == ["s3cret"]
    capsys.readouterr()
    monkeypatch.setenv("SRL_SEARCH_TOKEN", "två ord")
    assert main(["serve", "check", "http://127.0.0.1:1"]) == 2
    err = capsys.readouterr().err
    assert "SRL_SEARCH_TOKEN is not a valid token" in err
    assert len(err.splitlines()) == len(sent) == 1


def test_checking_nobody_is_exit_code_2_and_a_wrong_server_1(capsys):
    with bind(port=0) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["serve", "check", url]) == 2
        assert "no search server answers" in capsys.readouterr().err
        silent.listen()
        hanging_up = threading.Thread(target=_hang_up, args=(silent,), daemon=True)
        hanging_up.start()
        assert main(["serve", "check", url, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["conforms"] is False
    assert report["findings"][0]["required"] is True


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "check", "http://h.test/retrieve?api_key=s3cret"],
        ["serve", "check", "http://s3cret@h.test/"],
        ["index", "eval", "http://h.test/retrieve?api_key=s3cret", "--questions", "q.jsonl"],
    ],
)
def test_a_key_in_a_url_is_refused_wherever_one_is_typed(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    question = {"id": "1", "question": "red?", "golden_answers": ["fox"]}
    Path("q.jsonl").write_text(json.dumps(question), encoding="utf-8")
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "for h.test has a" in err
    assert "export SRL_SEARCH_TOKEN=…" in err
    assert "s3cret" not in err
    assert len(err.splitlines()) == 1


def _hang_up(listener) -> None:
    """Take connections and close them without a word, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.close()
