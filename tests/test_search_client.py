"""The search client: whatever a server does, a search has a typed outcome, and healthy servers are used."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.live_server import running
from tests.search_sites import ONE, THREE, TWO, Clock, Site, answers, ask, ask_in_turn, client, raises, status

from srl.errors import UserError
from srl.index import Index, build_index, open_index
from srl.serve import HttpSearch, LocalSearch, http
from srl.serve.client import COOL_DOWN_S, FAILURES, MAX_WAIT_S
from srl.serve.request import page_url, retrieve_url
from srl.serve.server import create_app
from srl.trajectory import Passage, Search

GOOD = b'{"result": [[{"document": {"id": "1", "contents": "c"}, "score": 1.0}]]}'
TOKEN = "a-secret-that-nobody-may-read"


def outcomes(searches: list[Search]) -> list[tuple[str, int]]:
    return [(search.status, search.attempts) for search in searches]


def test_queries_of_one_tick_are_one_request_in_search_r1s_form():
    site, sent = Site(one=200), []

    def keep(request: httpx.Request) -> httpx.Response:
        sent.append((str(request.url), json.loads(request.content)))
        return site(request)

    found = ask(client(keep, ONE, topk=7), "a", "b", "a")
    assert sent == [(ONE, {"queries": ["a", "b"], "topk": 7, "return_scores": True})]
    assert [search.hits[0].passage.id for search in found] == ["a", "b", "a"]
    assert {(search.status, search.attempts, search.index_digest) for search in found} == {("ok", 1, "d1")}
    assert all(search.latency_s > 0 for search in found)


@pytest.mark.parametrize(
    ("hit", "passage", "score"),
    [
        ({"document": {"id": "1", "contents": "c"}, "score": 2}, Passage("1", "c"), 2.0),
        ({"document": {"id": 7, "contents": "c", "title": "t"}}, Passage("7", "c"), 0.0),
        ({"id": "1", "contents": "c", "url": "http://x"}, Passage("1", "c", "http://x"), 0.0),
        ({"_id": "1", "title": "T", "text": "x"}, Passage("1", '"T"\nx'), 0.0),
        ({"document": {"url": "http://x", "text": "x"}, "score": 1.0}, Passage("http://x", '""\nx'), 1.0),
        ({"document": "a rerank server's text", "score": 1}, Passage("", "a rerank server's text"), 1.0),
    ],
)
def test_every_form_of_a_hit_is_understood(hit, passage, score):
    (found,) = ask(client(status(200, json.dumps({"result": [[hit, hit, hit]]})), ONE, topk=2), "a")
    first, second = found.hits
    assert first == second
    assert (first.passage.contents, first.passage.url, first.score) == (passage.contents, passage.url, score)
    assert first.passage.id == passage.id or not passage.id


HIT = {"document": {"id": "1", "contents": "c"}, "score": 1.0}


@pytest.mark.parametrize(
    ("answer", "outcome", "retried"),
    [
        *((status(code, b"<h1>no\nway</h1>"), outcome, retried) for code, outcome, retried in (
            (400, "failed", False), (401, "failed", False), (404, "failed", False), (413, "rejected", False),
            (422, "rejected", False), (429, "failed", True), (500, "failed", True), (503, "refused", True),
            (504, "timed_out", True),
        )),
        *((raises(error), outcome, True) for error, outcome in (
            (httpx.ConnectError("no"), "refused"), (httpx.ReadTimeout("no"), "timed_out"),
            (httpx.RemoteProtocolError("no"), "failed"), (UnicodeError("label too long"), "failed"),
            (RecursionError("too deep"), "failed"), (OSError(24, "Too many open files"), "failed"),
        )),
        *((status(200, text), "failed", True) for text in (
            "<html>Bad gateway", "[" * 10_000, "[]", '{"result": [{}]}', '{"result": []}',
            '{"result": [[], []]}', '{"result": [[{"id": "1"}]]}', " " * 20_000,
            *(json.dumps({"result": [[HIT]]}).replace("1.0", score) for score in ('"x"', "NaN", "1e400")),
        )),
    ],
)  # fmt: skip
def test_whatever_goes_wrong_is_an_outcome_and_what_may_pass_is_tried_again(
    answer, outcome, retried, monkeypatch
):
    """Whatever a server answers, or a library raises on the way."""
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 15_000)
    (fault,) = ask(client(answer, ONE, retries=2), "a")
    assert outcomes([fault]) == [(outcome, 3 if retried else 1)]
    assert fault.error.isprintable()
    (fault,) = ask(client(answers(answer, answer, Site(one=200)), ONE), "a")
    assert outcomes([fault]) == [("ok", 3) if retried else (outcome, 1)]


@pytest.mark.parametrize(
    "broken",
    [status(500), status(400), status(422), status(503), raises(httpx.ReadTimeout("no")), status(200, "<")],
)
def test_one_poisonous_query_does_not_spoil_the_batch(broken):
    def poisoned(request: httpx.Request) -> httpx.Response:
        return (broken if b"boom" in request.content else Site(one=200))(request)

    found = ask(client(poisoned, ONE, retries=1), "a", "boom", "b")
    assert [search.status == "ok" for search in found] == [True, False, True]


def test_requests_go_to_the_server_with_the_fewest_in_turn():
    site = Site(one=200, two=200)
    ask_in_turn(client(site), *"abcdef")
    assert site.asked == ["one", "two"] * 3

    async def one_hangs() -> list[str]:
        hosts, arrived, gate = [], asyncio.Event(), asyncio.Event()

        async def serve(request: httpx.Request) -> httpx.Response:
            hosts.append(request.url.host)
            if request.url.host == "one":
                arrived.set()
                await gate.wait()
            return site(request)

        search = HttpSearch([ONE, TWO], transport=httpx.MockTransport(serve))
        stuck = asyncio.create_task(search.search("stuck"))
        await arrived.wait()
        for query in "abc":
            await search.search(query)
        gate.set()
        await stuck
        return hosts

    assert asyncio.run(one_hangs()) == ["one", "two", "two", "two"]


@pytest.mark.parametrize("broken", [httpx.ConnectError, httpx.ReadError, 500, 502, 429, 503, 401, 404])
def test_another_server_answers_at_once_for_one_that_does_not(broken):
    clock, site = Clock(), Site(one=broken, two=200)
    assert outcomes(ask(client(site, clock=clock), "a")) == [("ok", 2)]
    assert (site.asked, clock.slept) == (["one", "two"], [])


@pytest.mark.parametrize(("broken", "asked"), [(httpx.ConnectError, 1), (401, 1), (500, FAILURES)])
def test_a_server_that_keeps_failing_is_left_alone_and_tried_now_and_then_until_it_is_back(broken, asked):
    site = Site(one=broken, two=200)
    search = client(site)
    searches = ask_in_turn(search, *map(str, range(20)))
    assert {found.status for found in searches} == {"ok"}
    assert site.asked.count("one") == asked
    for _ in range(3):
        site.asked.clear()
        search.clock.now += COOL_DOWN_S
        ask_in_turn(search, *"abcd")
        assert site.asked.count("one") == 1
    site.statuses["one"] = 200
    search.clock.now += COOL_DOWN_S
    site.asked.clear()
    ask_in_turn(search, *"abcdef")
    assert site.asked.count("one") == 3


@pytest.mark.parametrize(
    ("wait", "low", "high"),
    [("3", 3, 3), ("0", 1, 2), ("86400", MAX_WAIT_S, MAX_WAIT_S), ("soon", 1, 2), ("-3", 1, 2)],
)
@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says_within_limits(code, wait, low, high):
    clock, site = Clock(), Site(one=code)
    site.headers["Retry-After"] = wait
    ask(client(site, ONE, clock=clock, retries=1), "a")
    (slept,) = clock.slept
    assert low <= slept <= high


conditions = st.sampled_from([200, 401, 422, 429, 500, 503, httpx.ConnectError, httpx.ReadError])


@given(st.lists(st.tuples(conditions, conditions, st.floats(0, 40)), max_size=12))
def test_after_whatever_happened_healthy_servers_are_used_again(history):
    site = Site(one=200, two=200)
    site.headers["Retry-After"] = "60"
    search = client(site, retries=1)
    for number, (one, two, pause) in enumerate(history):
        site.statuses.update(one=one, two=two)
        search.clock.now += pause
        before = len(site.asked)
        (found,) = ask(search, str(number))
        assert found.attempts == len(site.asked) - before <= 4
        assert found.status == "ok" or found.error
    site.statuses.update(one=200, two=200)
    assert {found.status for found in ask_in_turn(search, *"abcdef")} == {"ok"}
    search.clock.now += MAX_WAIT_S
    site.asked.clear()
    ask_in_turn(search, *"abcdef")
    assert set(site.asked) == {"one", "two"}


def test_an_answer_from_another_index_is_a_fault_and_its_server_is_left_alone():
    site = Site(one=200, two=200)
    search = client(site, ONE)
    assert search.index_digest == ""
    assert ask(search, "a")[0].index_digest == search.index_digest == "d1"
    site.digests["one"] = "d2"
    assert outcomes(ask(search, "b")) == [("failed", 1)]
    site.digests.update(one="d1", two="d2")
    found = ask_in_turn(client(site, digest="d1"), *map(str, range(12)))
    assert {(each.status, each.index_digest) for each in found} == {("ok", "d1")}
    assert site.asked.count("two") == 1
    assert outcomes(ask(client(site, ONE, digest="0123456789abcdef"), "a")) == [("failed", 1)]


def connect(site: Any, *urls: str, **options: Any) -> str:
    async def once() -> str:
        search = client(site, *urls, **options)
        try:
            return await search.connect()
        finally:
            await search.aclose()

    return asyncio.run(once())


def test_connecting_asks_every_server_for_its_index_and_an_empty_answer():
    site = Site(one=200, two=200, three=200)
    assert connect(site, ONE, TWO, THREE) == "d1"
    assert (sorted(site.asked), site.queries) == (["one", "three", "two"], [[]] * 3)
    assert connect(site, digest="d1") == "d1"


@pytest.mark.parametrize(
    "health",
    [status(404), status(200, "<html>"), status(200, "[]"), status(200, "{}"), status(200, b" " * 70_000)],
)
def test_a_server_without_health_is_asked_a_query_and_may_have_no_digest(health):
    def server(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return health(request)
        assert len(json.loads(request.content)["queries"]) == 1
        return httpx.Response(200, json={"result": [[]]})

    assert connect(server, ONE) == ""


def but(site: Site, host: str, method: str, answer: Callable[[httpx.Request], httpx.Response]) -> Any:
    """`site`, with another answer to requests of a method to a host."""
    return lambda request: (answer if (request.url.host, request.method) == (host, method) else site)(request)


@pytest.mark.parametrize(
    ("answer", "method"),
    [
        (raises(httpx.ConnectError("no luck")), "GET"),
        (raises(httpx.ReadTimeout("no luck")), "GET"),
        (status(401), "POST"),
        (status(200, "<html>"), "POST"),
        (status(500), "POST"),
        (raises(UnicodeError("label too long")), "POST"),
    ],
)
def test_the_servers_that_answer_no_searches_are_named_in_one_line(answer, method):
    site = Site(one=200, two=200, three=200)
    with pytest.raises(UserError) as caught:
        connect(but(site, "two", method, answer), ONE, TWO, THREE)
    line = str(caught.value)
    assert (TWO in line, ONE in line, "\n" in line) == (True, False, False)


@pytest.mark.parametrize(
    ("typed", "used", "health"),
    [
        ("http://h:1", "http://h:1/retrieve", "http://h:1/health"),
        ("http://h:1/", "http://h:1/retrieve", "http://h:1/health"),
        ("https://h/v2/search", "https://h/v2/search", "https://h/v2/health"),
        ("http://h/v1/retrieve/a%20b", "http://h/v1/retrieve/a%20b", "http://h/v1/health"),
        ("http://retrieve/retrieve", "http://retrieve/retrieve", "http://retrieve/health"),
    ],
)
def test_the_addresses_of_a_server(typed, used, health):
    assert (retrieve_url(typed), page_url(used, "health")) == (used, health)


def test_a_proxy_is_for_the_servers_elsewhere_alone(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    def pool(found: httpx.AsyncClient, host: str) -> str:
        return type(found._transport_for_url(httpx.URL(f"http://{host}:8000/"))._pool).__name__

    hosts = ["127.0.0.1", "[::1]", "node2"]
    both, here = (
        http.new_client([f"http://{host}:8000" for host in some], "") for some in (hosts, hosts[:2])
    )
    assert [pool(both, host) for host in hosts] == [*["AsyncConnectionPool"] * 2, "AsyncHTTPProxy"]
    assert {pool(here, host) for host in hosts[:2]} == {"AsyncConnectionPool"}


@pytest.mark.parametrize(
    ("target", "arrives"),
    [("http://one/elsewhere", True), ("http://two/retrieve", False), ("http://one:81/retrieve", False)],
)
def test_the_token_goes_to_the_server_alone(monkeypatch, target, arrives):
    monkeypatch.setenv("SRL_SEARCH_TOKEN", f" {TOKEN}\n")
    seen: dict[str, str | None] = {}

    def redirect(request: httpx.Request) -> httpx.Response:
        seen[str(request.url)] = request.headers.get("Authorization")
        if str(request.url) == target:
            return httpx.Response(200, content=GOOD)
        return httpx.Response(307, headers={"Location": target})

    assert ask(client(redirect, ONE), "a")[0].status == "ok"
    assert seen == {ONE: f"Bearer {TOKEN}", target: f"Bearer {TOKEN}" if arrives else None}
    monkeypatch.delenv("SRL_SEARCH_TOKEN")
    ask(client(redirect, ONE), "a")
    assert set(seen.values()) == {None}


# The search client against a real server: what it finds is what is found in this process.


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
