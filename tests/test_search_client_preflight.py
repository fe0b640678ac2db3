"""Search servers are looked at before a run starts: those at fault are named, each with what to do."""

from __future__ import annotations

import asyncio
import re
import socket

import httpx
import pytest
from tests.live_server import running
from tests.search_handlers import status
from tests.search_sites import ONE, TWO, Site, client, run

from srl.errors import UserError
from srl.index import Index, build_index, open_index
from srl.serve.client import check_servers
from srl.serve.server import bind, create_app, url_of
from srl.trajectory import Passage

THREE = "http://three/retrieve"


def refused(site: object, *urls: str, **options: object) -> str:
    """The one line that connecting to the servers of `site` ends with."""
    with pytest.raises(UserError) as caught:
        run(client(site, *urls, **options).connect)
    (line,) = str(caught.value).splitlines()
    return line


def test_all_servers_of_a_list_are_asked():
    site = Site(one=200, two=200, three=200)
    assert run(client(site, ONE, TWO, THREE).connect) == ["d1"]
    assert (sorted(site.probed), sorted(site.asked)) == (["one", "three", "two"],) * 2


def test_the_one_of_a_list_that_does_not_answer_is_named():
    line = refused(Site(one=200, two=httpx.ConnectError, three=200), ONE, TWO, THREE)
    assert line == (
        "no search server answers at http://two/retrieve (ConnectError: no luck); "
        "type: srl serve retriever --index DIR, or remove it from the list"
    )


def test_several_that_do_not_answer_are_all_named():
    line = refused(Site(one=httpx.ConnectError, two=httpx.ReadTimeout, three=200), ONE, TWO, THREE)
    assert line.startswith("2 search servers cannot be used: no search server answers at http://one/retrieve")
    assert "http://two/retrieve (ReadTimeout" in line
    assert "http://three" not in line


def test_what_is_no_search_server_is_named():
    def web(request: httpx.Request) -> httpx.Response:
        return status(200, "<html>")(request) if request.url.host == "two" else Site(one=200)(request)

    line = refused(web)
    assert line.startswith("http://two/retrieve responds, but not to searches: the answer is not JSON")
    assert line.endswith("; give the URL of a search server's /retrieve, or remove it from the list")


@pytest.mark.parametrize("code", [200, 500])
def test_of_a_health_page_the_beginning_alone_is_read(code):
    async def endless():
        for _ in range(100):
            yield bytes(1 << 10)
        raise AssertionError("all was read")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(code, content=endless()) if request.method == "GET" else Site(one=200)(request)

    assert run(client(answer, ONE).connect) == ["d1"]


def test_a_token_that_is_missing_is_noticed_before_the_first_search():
    def guarded(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401) if request.method == "POST" else Site(one=200)(request)

    line = refused(guarded, ONE)
    assert line.startswith("http://one/retrieve responds, but not to searches: HTTP 401")
    assert line.endswith("; type: export SRL_SEARCH_TOKEN=…")


def test_a_server_that_is_busy_is_one():
    def busy(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503) if request.method == "POST" else Site(one=200)(request)

    assert run(client(busy, ONE).connect) == ["d1"]


def test_servers_with_different_indexes_are_refused():
    site = Site(one=200, two=200, three=200)
    site.digests["two"] = "d2"
    assert refused(site, ONE, TWO, THREE) == (
        "the search servers have different indexes: http://two/retrieve d2, the others d1; "
        "serve one index from all"
    )
    assert refused(site, ONE, TWO) == (
        "the search servers have different indexes: http://one/retrieve d1, http://two/retrieve d2; "
        "serve one index from all"
    )
    assert refused(site, digest="d1") == (
        "http://two/retrieve has another index: expected digest d1, found d2; serve the expected index"
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory = tmp_path_factory.mktemp("index") / "i"
    build_index([Passage("p", '"T"\nred fox')], directory)
    return open_index(directory)


def test_a_machine_checks_the_servers_that_it_would_ask(index):
    with running(create_app(index)) as url, bind(port=0) as unused:
        assert check_servers(url) == check_servers([url], index.digest[:12]) == []
        silent = url_of(unused)
        (line,) = check_servers([url, silent])
        (other,) = check_servers(url, "f" * 12)
    assert line.startswith(f"{socket.gethostname()}: no search server answers at {silent}")
    assert re.fullmatch(
        rf".*: {url} has another index: expected digest f+, found {index.digest[:12]}; .*", other
    )


def test_a_machine_checks_also_where_an_event_loop_runs(index):
    async def within() -> list[str]:
        return check_servers(url)

    with running(create_app(index)) as url:
        assert asyncio.run(within()) == []


def test_a_token_is_not_repeated(index, monkeypatch):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", "s3cret")

    def repeats(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, text=f"no {request.headers['Authorization']}")

    assert "no Bearer [hidden]" in refused(repeats, ONE)
