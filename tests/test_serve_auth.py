"""Whom a server without a token answers: no page of another site, and no request to another host."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tests.live_server import running

from srl.cli import main
from srl.errors import UserError
from srl.index import Index, build_index, open_index
from srl.serve import server
from srl.serve.server import create_app
from srl.serve.server.auth import Guard, host_name
from srl.trajectory import Passage

BODY = b'{"query": "red"}'


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory: Path = tmp_path_factory.mktemp("guard") / "i"
    build_index([Passage("a", '"T"\nred fox')], directory)
    return open_index(directory)


@pytest.fixture(scope="module")
def url(index: Index) -> Iterator[str]:
    with running(create_app(index, hosts=["search.example.org", "FD00::1"])) as url:
        yield url


def ask(
    url: str, *headers: str, line: str = "POST /retrieve HTTP/1.1", body: bytes = BODY
) -> tuple[int, dict]:
    """Status and JSON of the answer to a request of these header lines."""
    lines = [line, *headers, f"Content-Length: {len(body)}", "Connection: close", "", ""]
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=60) as raw:
        raw.sendall("\r\n".join(lines).encode("latin-1") + body)
        answer = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "127.0.0.1",
        "127.1.2.3:1",
        "localhost:9000",
        "LocalHost",
        "localhost.:8000",
        "[::1]:8000",
        "[::1]",
        "search.example.org",
        "Search.Example.ORG.:443",
        "[fd00::1]:80",
    ],
)
def test_a_server_answers_to_loopback_and_its_own_names_at_any_port(url, host):
    assert ask(url, f"Host: {host}")[0] == 200
    assert ask(url, f"Host: {host}", f"Origin: http://{host}")[0] == 200
    assert ask(url, f"Host: {host}", f"Origin: HTTPS://{host}")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "rebound.example.com:8000",
        "localhost.example.com",
        "127.0.0.1.example.com:8000",
        "0.0.0.0:8000",
        "10.0.0.7:8000",
        "[::2]:8000",
        "::1",
        "localhost:8000@example.com",
        "localhost, example.com",
        "localhost:http",
        "lo\xe7alhost",
        "x" * 5000,
        "",
    ],
)
@pytest.mark.parametrize("line", ["POST /retrieve HTTP/1.1", "GET /health HTTP/1.1", "GET /x HTTP/1.1"])
def test_a_name_that_points_here_but_is_not_ours_is_refused(url, host, line):
    status, said = ask(url, f"Host: {host}", line=line)
    assert status == 403
    assert "--allow-host" in said["detail"]
    assert "SRL_SEARCH_TOKEN" in said["detail"]
    assert len(said["detail"]) < 300


@pytest.mark.parametrize(
    "origin",
    [
        "http://rebound.example.com",
        "http://localhost:9000",
        "http://127.0.0.1:8000",
        "https://localhost",
        "null",
        "",
        "localhost:8000",
        "file://localhost:8000",
        "http://localhost:8000, http://example.com",
        "http://localhost:8000/",
    ],
)
def test_a_page_of_another_origin_is_refused(url, origin):
    status, said = ask(url, "Host: localhost:8000", f"Origin: {origin}", "Content-Type: text/plain")
    assert status == 403
    assert "this server does not answer pages of" in said["detail"]


def test_one_foreign_origin_among_several_is_enough(url):
    ours, theirs = "Origin: http://localhost:8000", "Origin: http://example.com"
    assert ask(url, "Host: localhost:8000", ours, theirs)[0] == 403
    assert ask(url, "Host: localhost:8000", theirs, ours)[0] == 403


def test_a_page_of_an_allowed_host_may_ask_through_a_proxy_that_changes_the_host(url):
    assert ask(url, "Host: 127.0.0.1:8000", "Origin: https://search.example.org")[0] == 200
    assert ask(url, "Host: 127.0.0.1:8000", "Origin: https://search.example.org.evil.test")[0] == 403


def test_host_headers_are_one_but_for_http_1_0_which_may_have_none(url):
    assert ask(url, line="GET /health HTTP/1.0", body=b"")[0] == 200
    assert ask(url, "Origin: http://example.com", line="GET /health HTTP/1.0", body=b"")[0] == 403
    assert ask(url)[0] == 400
    assert ask(url, "Host: localhost", "Host: localhost")[0] == 400
    assert ask(url, "Host: localhost", "Host: example.com", line="POST /retrieve HTTP/1.0")[0] == 400


def test_a_request_line_with_a_whole_url_is_judged_by_its_host_header_too(url):
    line = "POST http://localhost:8000/retrieve HTTP/1.1"
    assert ask(url, "Host: localhost:8000", line=line)[0] == 200
    assert ask(url, "Host: example.com", line=line)[0] == 403


def test_a_refusal_shows_no_control_characters_and_is_counted(url):
    _, said = ask(url, "Host: ex\x9bample\xad.com")
    assert "'ex\\\\x9bample\\\\xad.com'" in said["detail"]
    metrics = httpx.get(url.replace("/retrieve", "/metrics"), trust_env=False, timeout=60).text
    assert 'srl_search_requests_total{index="",status="403"}' in metrics


def test_a_server_that_was_given_no_names_answers_to_any(index):
    with running(create_app(index)) as url:
        assert ask(url, "Host: example.com", "Origin: http://other.example.com")[0] == 200


@pytest.mark.parametrize("given", ["", "a b", "http://a.test", "a/b", "é.test"])
def test_what_is_no_name_of_a_host_is_one_line(given):
    with pytest.raises(UserError, match="is not a host name; expected one such as"):
        Guard(hosts=[given])


def test_names_are_compared_as_browsers_write_them():
    given = ["A.Test", "a.test.", "a.test:80", "FD00::1", "[fd00::1]:80"]
    assert [host_name(one) for one in given] == ["a.test", "a.test", "a.test", "fd00::1", "fd00::1"]


@pytest.mark.parametrize(
    ("options", "token", "hosts"),
    [
        ([], "", frozenset()),
        (["--host", "localhost"], "", frozenset()),
        (["--allow-host", "A.test"], "", {"a.test"}),
        ([], "s3cret", None),
        (["--allow-host", "a.test"], "s3cret", {"a.test"}),
        (["--host", "0.0.0.0"], "", None),
        (["--host", "0.0.0.0", "--allow-host", "a.test"], "", {"a.test", "0.0.0.0"}),
    ],
)
def test_a_loopback_server_without_a_token_is_guarded(index, monkeypatch, options, token, hosts):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", token)
    apps: list = []
    monkeypatch.setattr(server, "run_server", lambda app, listener, ready: apps.append(app))
    assert main(["serve", "retriever", "--port", "0", "--index", str(index.directory), *options]) == 0
    assert apps[0].guard.hosts == hosts
