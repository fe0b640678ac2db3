"""The search client against a real server: what it finds is what is found in this process."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from tests.live_server import running as live
from tests.search_handlers import ask
from tests.search_sites import Clock

from srl.index import Index, build_index, open_index
from srl.serve import HttpSearch, LocalSearch
from srl.serve.client.failover import FIRST_REST_S
from srl.serve.server import bind, create_app, url_of
from srl.trajectory import Passage, Search


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory: Path = tmp_path_factory.mktemp("index") / "i"
    texts = ["the red fox", "a red dog", "fox and fox", "Žluťoučký kůň </answer>", "red red wine"]
    build_index([Passage(f"p{row}", f'"T{row}"\n{text}') for row, text in enumerate(texts)], directory)
    return open_index(directory)


@contextmanager
def running(index: Index | Mapping[str, Index], token: str = "") -> Iterator[str]:
    """A real server of `index` on a free port of this machine."""
    with bind(port=0) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(index, token=token), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        listener.listen()
        thread.start()
        yield url_of(listener)
        server.should_exit = True
        thread.join(60)


def test_in_process_and_over_http_find_the_same(index):
    queries = [
        "red",
        "fox",
        "red fox",
        "unicorn",
        "",
        "x" * 2000,
        "kun",
        "a \ud800 fox",
        *(f"dog {n}" for n in range(99)),
    ]
    here = ask(LocalSearch(index, 3), *queries)
    with running(index) as url:
        there = ask(HttpSearch(url, 3), *queries)

    outcomes = [[(one.query, one.status, one.hits) for one in found] for found in (here, there)]
    assert outcomes[0] == outcomes[1]
    assert [one.status for one in here[:8]] == ["ok"] * 3 + ["empty"] + ["rejected"] * 2 + ["ok"] * 2
    assert there[0].index_digest == here[0].index_digest == index.digest


def test_one_of_several_indexes_is_asked_by_its_address_with_the_token(index, tmp_path, monkeypatch):
    build_index([Passage("other", '"Other"\nanother red thing')], tmp_path / "other")
    other = open_index(tmp_path / "other")
    with running({"first": index, "other": other}, token="letmein") as url:
        assert ask(HttpSearch(f"{url}/other"), "red")[0].error.startswith(f"{url}/other: HTTP 401")
        monkeypatch.setenv("SRL_SEARCH_TOKEN", "letmein")
        search = HttpSearch(f"{url}/other", digest=other.digest[:12])
        assert asyncio.run(connected(search)) == other.digest
        assert [hit.passage.id for hit in ask(search, "red")[0].hits] == ["other"]
        wrong = ask(HttpSearch(url, digest=other.digest), "red")[0]
    assert wrong.status == "failed"
    assert f"has another index: expected digest {other.digest[:12]}, found {index.digest[:12]}" in wrong.error


async def connected(search: HttpSearch) -> str:
    try:
        return await search.connect()
    finally:
        await search.aclose()


class Counted(httpx.AsyncHTTPTransport):
    """The network, and how many searches went to each server."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.asked[str(request.url)] += 1
        return await super().handle_async_request(request)


def test_a_server_that_stops_costs_no_search_and_is_used_again_when_it_is_back(index):
    clock, network = Clock(), Counted()

    async def asked_for(search: HttpSearch, queries: int) -> dict[str, int]:
        network.asked.clear()
        assert {(await search.search("red")).status for _ in range(queries)} == {"ok"}
        return dict(network.asked)

    async def lives() -> None:
        with live(create_app(index)) as first:
            with live(create_app(index)) as second:
                search = HttpSearch([first, second], transport=network, clock=clock)
                assert await asked_for(search, 6) == {first: 3, second: 3}
            await asked_for(search, 2)
            assert await asked_for(search, 6) == {first: 6}
            with live(create_app(index), port=httpx.URL(second).port or 0):
                clock.now += FIRST_REST_S
                while second not in await asked_for(search, 1):
                    pass
                assert await asked_for(search, 6) == {first: 3, second: 3}
            await search.aclose()

    asyncio.run(lives())


def test_a_search_outlasts_a_restart_of_its_only_server(index):
    clock = Clock()

    async def lives(again: ExitStack) -> list[Search]:
        async def start_again(seconds: float) -> None:
            clock.now += seconds
            if len(clock.slept) == 2:
                again.enter_context(live(create_app(index), port=httpx.URL(url).port or 0))
            clock.slept.append(seconds)

        with live(create_app(index)) as url:
            search = HttpSearch(url, clock=clock, sleep=start_again)
            found = [await search.search("red")]
        found.append(await search.search("fox"))
        await search.aclose()
        return found

    with ExitStack() as again:
        before, during = asyncio.run(lives(again))
    assert (before.status, before.attempts) == ("ok", 1)
    assert (during.status, len(clock.slept)) == ("ok", 3)


def test_nobody_listening_is_a_refusal():
    with bind(port=0) as unused:
        (found,) = ask(HttpSearch(url_of(unused), retries=1, backoff_s=0), "a")
    assert (found.status, found.attempts) == ("refused", 2)
