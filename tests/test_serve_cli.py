"""`srl serve` as it is typed: it says where it listens, in one process or several, and stops when told."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from srl.cli import main
from srl.index import build_index
from srl.serve import server
from srl.serve.server import bind, url_of
from srl.trajectory import Passage


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("index") / "i"
    build_index([Passage(str(row), f'"T"\nred fox {row}') for row in range(5)], directory)
    return directory


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, once it takes requests; killed at the end if it still runs."""
    command = [sys.executable, "-c", "import sys; from srl.cli import main; sys.exit(main())"]
    command += ["serve", "retriever", "--index", str(directory), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_serves_until_a_signal_and_ends_with_its_code(directory, sent, code, workers):
    with serving(directory, "--workers", workers) as (process, url):
        assert main(["serve", "check", url, "--query", "red fox", "--query", "fox"]) == 0
        process.send_signal(sent)
        _, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert "5 passages" in err
    assert "Traceback" not in err
    with bind(port=urlsplit(url).port):
        pass  # no worker holds the port


def served(
    monkeypatch: pytest.MonkeyPatch, *arguments: object, quiet: Sequence[str] = ()
) -> tuple[int, list[Any]]:
    """The exit code, and the arguments of `create_app` with which servers would run."""
    apps: list[Any] = []
    monkeypatch.setattr(server.run, "create_app", lambda index, **settings: (index, settings))

    def run_server(app: Any, listener: Any, ready: Any) -> None:
        apps.append(app)
        ready(url_of(listener))

    monkeypatch.setattr(server, "run_server", run_server)
    return main([*quiet, "serve", "retriever", "--port", "0", *map(str, arguments)]), apps


@pytest.mark.parametrize(
    ("options", "token", "hosts"),
    [
        ([], "", []),
        (["--host", "localhost"], "", []),
        (["--allow-host", "A.test"], "", ["A.test"]),
        ([], "s3cret", None),
        (["--allow-host", "a.test"], "s3cret", ["a.test"]),
        (["--host", "0.0.0.0"], "", None),
        (["--host", "0.0.0.0", "--allow-host", "a.test"], "", ["a.test", "0.0.0.0"]),
    ],
)
def test_a_loopback_server_without_a_token_is_guarded(directory, monkeypatch, options, token, hosts):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", token)
    code, ((_, settings),) = served(monkeypatch, "--index", directory, *options)
    assert (code, settings["hosts"]) == (0, hosts)


def test_a_setting_is_the_retriever_s(directory, monkeypatch):
    _, ((index, _),) = served(monkeypatch, "--index", directory, "--set", "n_threads=3")
    assert index._retriever.options.n_threads == 3
