"""The search client among several servers: who is asked, and who is left alone."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from tests.search_sites import ONE, TWO, Clock, Later, Site, ask, client, run

from srl.errors import UserError
from srl.serve import HttpSearch
from srl.serve.client.failover import FIRST_REST_S, THRESHOLD
from srl.serve.client.request import health_url, page_url, without_secrets
from srl.trajectory import Search


def test_requests_are_spread_over_the_healthy_servers():
    site = Site(one=200, two=200)
    ask(client(site), *"abcdef")
    assert site.asked == ["one", "two"] * 3


def test_the_server_with_fewer_requests_on_their_way_is_asked():
    hosts: list[str] = []

    async def one_hangs() -> None:
        arrived, gate = asyncio.Event(), asyncio.Event()

        async def serve(request: httpx.Request) -> httpx.Response:
            hosts.append(request.url.host)
            if request.url.host == "one":
                arrived.set()
                await gate.wait()
            return Site(one=200, two=200)(request)

        search = client(serve)
        stuck = asyncio.create_task(search.search("stuck"))
        await arrived.wait()
        for query in "abc":
            await search.search(query)
        gate.set()
        await stuck

    asyncio.run(one_hangs())
    assert hosts == ["one", "two", "two", "two"]


@pytest.mark.parametrize("broken", [httpx.ConnectError, httpx.ReadError, 500, 502, 429, 503, 401, 404])
def test_another_server_answers_at_once_for_one_that_does_not(broken):
    clock, site = Clock(), Site(one=broken, two=200)
    (found,) = ask(client(site, clock=clock), "a")
    assert (found.status, found.attempts, site.asked, clock.slept) == ("ok", 2, ["one", "two"], [])


def test_a_server_that_cannot_be_reached_is_skipped_at_once():
    site = Site(one=httpx.ConnectError, two=200)
    found = ask(client(site), *map(str, range(20)))
    assert {search.status for search in found} == {"ok"}
    assert site.asked == ["one"] + ["two"] * 20


def test_a_server_whose_answers_fail_is_skipped_after_some_of_them():
    site = Site(one=500, two=200)
    found = ask(client(site), *map(str, range(20)))
    assert {search.status for search in found} == {"ok"}
    assert site.asked.count("one") == THRESHOLD
    assert site.asked[-10:] == ["two"] * 10


def test_a_server_that_failed_is_asked_in_the_background_and_then_used_again():
    clock, site = Clock(), Site(one=httpx.ConnectError, two=200)
    search = client(site, clock=clock)
    ask(search, *map(str, range(20)))
    assert site.probed == []

    clock.now += FIRST_REST_S
    ask(search, "still down", "resting twice as long")
    assert site.probed == ["one"]

    site.statuses["one"], site.asked = 200, []
    clock.now += 2 * FIRST_REST_S
    ask(search, "asks the page", "tries", "in turn", "again")
    assert site.probed == ["one", "one"]
    assert site.asked == ["two", "one", "two", "one"]


def test_a_server_whose_page_answers_but_whose_search_does_not_costs_no_query():
    def search_is_broken(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500) if (request.url.host, request.method) == ("one", "POST") else site(request)

    clock, site = Clock(), Site(one=200, two=200)
    search = client(search_is_broken, clock=clock)
    found = ask(search, *map(str, range(12)))
    clock.now += FIRST_REST_S
    found += ask(search, "asks the page", "tries", "goes on")
    assert {one.status for one in found} == {"ok"}
    assert [one.attempts for one in found[-3:]] == [1, 2, 1]


def test_with_no_healthy_server_a_query_waits_for_the_end_of_the_rest_as_often_as_it_may():
    clock, site = Clock(stands=True), Site(one=httpx.ConnectError)
    search = client(site, ONE, clock=clock, retries=2, backoff_s=0)
    ask(search, "a")
    assert (site.asked, clock.slept) == (["one"], [FIRST_REST_S] * 2)
    (found,) = ask(search, "b")
    assert (found.status, found.attempts, len(site.asked), len(clock.slept)) == ("refused", 0, 1, 4)
    assert found.error.startswith(
        "requests kept failing, so no search server is asked for another 1.0 s; last error: "
    )
    assert "http://one/retrieve: no connection" in found.error


def test_a_rest_that_will_not_help_is_not_waited_for():
    clock, site = Clock(), Site(one=401)
    search = client(site, ONE, clock=clock, retries=3)
    ask(search, *"abcde")
    (found,) = ask(search, "f")
    assert (found.status, found.attempts, clock.slept) == ("refused", 0, [])
    assert "HTTP 401" in found.error


@pytest.mark.parametrize(("retries", "away_s"), [(3, 7), (5, 15), (8, 30)])
def test_no_search_is_lost_while_the_only_server_is_started_again(retries, away_s):
    clock = Later()
    back = clock.now + away_s

    def serve(request: httpx.Request) -> httpx.Response:
        return Site(one=200 if clock.now >= back else httpx.ConnectError)(request)

    search = client(serve, ONE, clock=clock, retries=retries, max_batch=1)

    async def later(number: int) -> Search:
        await clock.sleep(number * away_s / 40)
        return await search.search(str(number))

    found = asyncio.run(clock.gather(*map(later, range(40))))
    assert {one.status for one in found} == {"ok"}


def test_a_rest_over_one_query_tries_and_the_others_of_its_time_wait_for_it():
    async def try_again() -> list[Search]:
        clock, gate, arrived, asked = Clock(), asyncio.Event(), asyncio.Event(), []

        async def serve(request: httpx.Request) -> httpx.Response:
            asked.append(json.loads(request.content)["queries"])
            if asked[-1] == ["tries"]:
                arrived.set()
                await gate.wait()
            return Site(one=200 if len(asked) > 1 else httpx.ConnectError)(request)

        async def sleep(seconds: float) -> None:
            gate.set()
            await first

        transport = httpx.MockTransport(serve)
        search = HttpSearch(ONE, transport=transport, clock=clock, sleep=sleep, retries=0)
        await search.search("fails")
        clock.now += FIRST_REST_S
        search._retries = 1
        first = asyncio.create_task(search.search("tries"))
        await arrived.wait()
        second = await search.search("waits")
        assert asked[1:] == [["tries"], ["waits"]]
        return [await first, second]

    assert [(found.status, found.attempts) for found in asyncio.run(try_again())] == [("ok", 1)] * 2


def test_a_dead_server_is_tried_less_and_less_often():
    clock, site = Clock(), Site(one=httpx.ConnectError)
    search = client(site, ONE, clock=clock, retries=0)
    ask(search, "a")
    tries = []
    for _ in range(20):
        clock.now += 1.0
        site.asked.clear()
        ask(search, "f")
        tries.append(len(site.asked))
    assert [second for second, tried in enumerate(tries, start=1) if tried] == [1, 3, 7, 12, 17]


def test_one_query_that_breaks_the_server_again_and_again_does_not_take_it_from_the_others():
    def poisoned(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500) if b"boom" in request.content else site(request)

    site = Site(one=200)
    found = ask(client(poisoned, ONE), "boom", "boom", "boom", "a")
    assert [search.status for search in found] == ["failed"] * 3 + ["ok"]


@pytest.mark.parametrize("retries", [0, 2])
def test_every_healthy_server_is_asked_before_a_pause_however_few_the_retries(retries):
    clock, site = Clock(), Site(one=500, two=500, three=500)
    (found,) = ask(client(site, ONE, TWO, "http://three", clock=clock, retries=retries), "a")
    assert (found.status, found.attempts, len(clock.slept)) == ("failed", 3 * (retries + 1), retries)
    assert sorted(site.asked) == sorted(["one", "two", "three"] * (retries + 1))


@pytest.mark.parametrize("misconfigured", ["one", "two"])
def test_a_server_set_up_for_something_else_does_not_end_the_patience_with_another(misconfigured):
    clock, site = Clock(), Site(one=500, two=500)
    site.statuses[misconfigured] = 401
    (found,) = ask(client(site, clock=clock, retries=2), "a")
    assert (found.attempts, len(clock.slept)) == (6, 2)


def test_a_server_with_another_index_is_left_to_itself():
    site = Site(one=200, two=200)
    site.digests["two"] = "d2"
    found = ask(client(site, digest="d1"), *map(str, range(12)))
    assert {(search.status, search.index_digest) for search in found} == {("ok", "d1")}
    assert site.asked.count("two") == THRESHOLD


def connect(site: Site, **options: object) -> str:
    return run(client(site, **options).connect)[0]


def test_connecting_to_another_index_than_the_runs_names_both():
    assert connect(Site(one=200, two=200), digest="d1") == "d1"
    with pytest.raises(
        UserError, match="http://one/retrieve has another index: expected digest ffffffffffff, found d1"
    ):
        connect(Site(one=200, two=200), digest="f" * 32)


@pytest.mark.parametrize(
    ("url", "page"),
    [
        ("http://h:1/retrieve", "http://h:1/health"),
        ("http://h/retrieve/wiki", "http://h/health/wiki"),
        ("http://h/v1/retrieve", "http://h/v1/health"),
        ("http://h/v1/retrieve/a%20b", "http://h/v1/health/a%20b"),
        ("http://h/search?key=1", "http://h/health"),
    ],
)
def test_each_index_of_a_server_has_a_health_page(url, page):
    assert health_url(url) == page


@pytest.mark.parametrize(
    ("url", "page"),
    [
        ("http://h:1/retrieve/wiki", "http://h:1/metrics"),
        ("http://h/v1/retrieve", "http://h/v1/metrics"),
        ("http://retriever:8000/search", "http://retriever:8000/metrics"),
        ("http://retrieve/retrieve?key=1", "http://retrieve/metrics"),
    ],
)
def test_a_page_beside_retrieve_is_on_the_same_host(url, page):
    assert page_url(url, "metrics") == page


def test_messages_show_no_password_and_no_key_of_a_url():
    assert without_secrets("http://user:secret@h:1/retrieve?key=secret#secret") == "http://h:1/retrieve"
    search = client(Site(h=500), "http://user:secret@h/retrieve?key=secret", retries=0)
    assert "secret" not in ask(search, "a")[0].error
