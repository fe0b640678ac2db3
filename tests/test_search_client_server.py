"""The search client against a real server: what it finds is what is found in this process."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from tests.live_server import running
from tests.search_sites import Clock, ask

from srl.index import Index, build_index, open_index
from srl.serve import HttpSearch, LocalSearch
from srl.serve.client import COOL_DOWN_S
from srl.serve.server import bind, create_app, url_of
from srl.trajectory import Passage, Search


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory: Path = tmp_path_factory.mktemp("index") / "i"
    texts = ["the red fox", "a red dog", "fox and fox", "Žluťoučký kůň </answer>", "red red wine"]
    build_index([Passage(f"p{row}", f'"T{row}"\n{text}') for row, text in enumerate(texts)], directory)
    return open_index(directory)


def test_in_process_and_over_http_find_the_same(index):
    odd = ["red", "fox", "red fox", "unicorn", "", "x" * 2000, "kun", "a \ud800 fox"]
    queries = [*odd, *(f"dog {n}" for n in range(99))]
    here = ask(LocalSearch(index, 3), *queries)
    with running(create_app(index)) as url:
        there = ask(HttpSearch(url, 3), *queries)
    outcomes = [[(each.query, each.status, each.hits) for each in found] for found in (here, there)]
    assert outcomes[0] == outcomes[1]
    assert [each.status for each in here[:8]] == ["ok"] * 3 + ["empty"] + ["rejected"] * 2 + ["ok"] * 2
    assert there[0].index_digest == here[0].index_digest == index.digest


def test_one_of_several_indexes_is_asked_by_its_address_with_the_token(index, tmp_path, monkeypatch):
    build_index([Passage("other", '"Other"\nanother red thing')], tmp_path / "other")
    other = open_index(tmp_path / "other")

    async def connected(search: HttpSearch) -> str:
        try:
            return await search.connect()
        finally:
            await search.aclose()

    with running(create_app({"first": index, "other": other}, token="letmein")) as url:
        assert "HTTP 401" in ask(HttpSearch(f"{url}/other"), "red")[0].error
        monkeypatch.setenv("SRL_SEARCH_TOKEN", "letmein")
        search = HttpSearch(f"{url}/other", digest=other.digest[:12])
        assert asyncio.run(connected(search)) == other.digest
        assert [hit.passage.id for hit in ask(search, "red")[0].hits] == ["other"]
        assert ask(HttpSearch(url, digest=other.digest), "red")[0].status == "failed"


class Counted(httpx.AsyncHTTPTransport):
    """The network, and how many searches went to each server."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked[str(request.url)] += 1
        return await super().handle_async_request(request)


def test_a_server_that_stops_costs_no_search_and_is_used_again_when_it_is_back(index):
    clock, network = Clock(), Counted()

    async def asked_for(search: HttpSearch, queries: int) -> dict[str, int]:
        network.asked.clear()
        assert {(await search.search("red")).status for _ in range(queries)} == {"ok"}
        return dict(network.asked)

    async def lives() -> None:
        with running(create_app(index)) as first:
            with running(create_app(index)) as second:
                search = HttpSearch([first, second], transport=network, clock=clock)
                assert await asked_for(search, 6) == {first: 3, second: 3}
            await asked_for(search, 2)
            assert await asked_for(search, 6) == {first: 6}
            with running(create_app(index), port=httpx.URL(second).port or 0):
                clock.now += COOL_DOWN_S
                await asked_for(search, 2)
                assert await asked_for(search, 6) == {first: 3, second: 3}
            await search.aclose()

    asyncio.run(lives())


def test_a_search_outlasts_a_restart_of_its_only_server(index):
    async def lives(again: ExitStack) -> list[Search]:
        slept: list[float] = []

        async def start_again(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                again.enter_context(running(create_app(index), port=httpx.URL(url).port or 0))

        with running(create_app(index)) as url:
            search = HttpSearch(url, sleep=start_again)
            found = [await search.search("red")]
        found.append(await search.search("fox"))
        await search.aclose()
        return found

    with ExitStack() as again:
        before, during = asyncio.run(lives(again))
    assert (before.status, before.attempts) == ("ok", 1)
    assert (during.status, during.attempts) == ("ok", 4)


def test_nobody_listening_is_a_refusal():
    with bind(port=0) as unused:
        (found,) = ask(HttpSearch(url_of(unused), retries=1, backoff_s=0), "a")
    assert (found.status, found.attempts) == ("refused", 2)
