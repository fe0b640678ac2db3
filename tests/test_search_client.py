"""The search client against servers that answer well, badly, late, half or not at all."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from tests.search_handlers import URL, Recorder, ask, client, echo, raises, status

from srl.serve import HttpSearch
from srl.trajectory import Passage


def test_queries_of_one_tick_are_one_request():
    server = Recorder(echo)
    found = ask(client(server), "a", "b", "a")
    assert server.asked == [["a", "b"]]
    assert [search.hits[0].passage.id for search in found] == ["a", "b", "a"]
    assert {(search.status, search.attempts, search.index_digest) for search in found} == {("ok", 1, "d1")}
    assert all(search.latency_s > 0 for search in found)


def test_the_request_is_search_r1s():
    def check(request: httpx.Request) -> httpx.Response:
        assert request.url == URL
        assert json.loads(request.content) == {"queries": ["a"], "topk": 7, "return_scores": True}
        return echo(request)

    assert ask(client(check, topk=7), "a")[0].status == "ok"


@pytest.mark.parametrize(
    ("item", "passage", "score"),
    [
        ({"document": {"id": "1", "contents": "c"}, "score": 2}, Passage("1", "c"), 2.0),
        ({"document": {"id": 7, "contents": "c", "title": "t"}}, Passage("7", "c"), 0.0),
        ({"id": "1", "contents": "c"}, Passage("1", "c"), 0.0),
        ({"_id": "1", "title": "T", "text": "x"}, Passage("1", '"T"\nx'), 0.0),
        ({"document": {"url": "http://x", "text": "x"}, "score": 1.0}, Passage("http://x", '""\nx'), 1.0),
    ],
)
def test_both_forms_of_an_answer_are_understood(item, passage, score):
    (found,) = ask(client(lambda request: httpx.Response(200, json={"result": [[item]]})), "a")
    assert [(hit.passage, hit.score) for hit in found.hits] == [(passage, score)]


def test_a_rerank_servers_text_gets_an_id_of_its_own():
    def rerank(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, json={"result": [[{"document": "one", "score": 1}, {"document": "two", "score": 0}]]}
        )

    hits = ask(client(rerank), "a")[0].hits
    assert [hit.passage.contents for hit in hits] == ["one", "two"]
    assert len({hit.passage.id for hit in hits}) == 2


def test_more_hits_than_asked_for_are_cut():
    result = [[{"id": str(number), "contents": "c"} for number in range(9)]]
    (found,) = ask(client(lambda request: httpx.Response(200, json={"result": result}), topk=2), "a")
    assert [hit.passage.id for hit in found.hits] == ["0", "1"]


def test_no_hits_are_empty():
    (found,) = ask(client(lambda request: httpx.Response(200, json={"result": [[]]})), "a")
    assert (found.status, found.is_fault) == ("empty", False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<html><body>Bad gateway", "not JSON; it begins '<html><body>Bad gateway'"),
        ("", "not JSON"),
        ('{"result": [[{"docu', "not JSON"),
        ("[]", 'not {"result": [[…], …]}'),
        ('{"result": null}', 'not {"result": [[…], …]}'),
        ('{"result": [{}]}', 'not {"result": [[…], …]}'),
        ('{"result": []}', "0 lists for 1 queries"),
        ('{"result": [[], []]}', "2 lists for 1 queries"),
        ('{"result": [[3]]}', "a document is 3"),
        ('{"result": [[{"id": "1"}]]}', "neither contents nor text, only id"),
        ('{"result": [[{"document": {"id": "1", "contents": "c"}, "score": "high"}]]}', "a score is 'high'"),
        ('{"result": [[{"document": {"id": "1", "contents": "c"}, "score": NaN}]]}', "a score is nan"),
        (
            f'{{"result": [[{{"document": {{"id": "1", "contents": "c"}}, "score": 1{"0" * 400}}}]]}}',
            "a score is 1000",
        ),
    ],
)
def test_an_answer_that_is_none_is_a_fault_with_its_reason(text, reason):
    (found,) = ask(client(status(200, text), retries=1), "a")
    assert (found.status, found.is_fault, found.attempts, found.hits) == ("failed", True, 2, ())
    assert reason in found.error
    assert URL in found.error


@pytest.mark.parametrize("code", [500, 502, 503, 429, 408])
def test_what_may_pass_is_tried_again(code):
    server = Recorder(status(code), status(code), echo)
    (found,) = ask(client(server), "a")
    assert (found.status, found.attempts) == ("ok", 3)


@pytest.mark.parametrize("code", [400, 401, 404, 501])
def test_attempts_end(code):
    server = Recorder(status(code, "<h1>no\nway</h1>"))
    (found,) = ask(client(server, retries=2), "a")
    assert found.status == "failed"
    assert found.attempts == len(server.asked) == (3 if code >= 500 else 1)
    assert f"HTTP {code}: <h1>no way</h1>" in found.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (httpx.ConnectError, "refused"),
        (httpx.ReadTimeout, "timed_out"),
        (httpx.ConnectTimeout, "timed_out"),
        (httpx.ReadError, "failed"),
        (httpx.RemoteProtocolError, "failed"),
    ],
)
def test_broken_connections_are_faults_after_the_last_attempt(error, expected):
    server = Recorder(raises(error))
    (found,) = ask(client(server, retries=2), "a")
    assert (found.status, found.is_fault, found.attempts, len(server.asked)) == (expected, True, 3, 3)
    assert ask(client(Recorder(raises(error), echo)), "a")[0].status == "ok"


def test_an_empty_or_overlong_query_is_rejected_and_not_sent():
    server = Recorder(echo)
    found = ask(client(server, max_query_chars=5), "", "  ", "abcdef", "abcde")
    assert [search.status for search in found] == ["rejected", "rejected", "rejected", "ok"]
    assert server.asked == [["abcde"]]
    assert found[2].error == "the query has 6 characters; at most 5 are allowed"
    assert found[2].attempts == 0


def test_a_query_that_the_server_finds_too_long_is_rejected_alone():
    def strict(request: httpx.Request) -> httpx.Response:
        long = any(len(query) > 3 for query in json.loads(request.content)["queries"])
        return httpx.Response(413, text="too long") if long else echo(request)

    found = ask(client(strict), "abc", "abcd", "ab")
    assert [search.status for search in found] == ["ok", "rejected", "ok"]


@pytest.mark.parametrize(
    "broken", [status(500), status(400), status(503), raises(httpx.ReadTimeout), status(200, "<html>")]
)
def test_one_poisonous_query_does_not_spoil_the_batch(broken):
    def poisoned(request: httpx.Request) -> httpx.Response:
        return (broken if "boom" in json.loads(request.content)["queries"] else echo)(request)

    found = ask(client(poisoned, retries=1), "a", "boom", "b")
    assert [search.is_fault for search in found] == [False, True, False]


def test_a_dead_server_is_not_asked_query_by_query():
    server = Recorder(raises(httpx.ConnectError))
    found = ask(client(server, retries=1), *"abc")
    assert {search.status for search in found} == {"refused"}
    assert server.asked == [["a", "b", "c"]] * 2


def test_a_server_that_counts_requests_is_not_asked_query_by_query():
    server = Recorder(status(429))
    assert {search.status for search in ask(client(server, retries=1), *"abc")} == {"failed"}
    assert server.asked == [["a", "b", "c"]] * 2


def test_a_server_without_room_for_a_batch_is_asked_query_by_query():
    def small(request: httpx.Request) -> httpx.Response:
        return status(503)(request) if len(json.loads(request.content)["queries"]) > 1 else echo(request)

    assert [search.status for search in ask(client(small), *"abc")] == ["ok"] * 3


def test_large_ticks_are_cut_into_requests():
    server = Recorder(echo)
    found = ask(client(server, max_batch=2), *"abcde")
    assert server.asked == [["a", "b"], ["c", "d"], ["e"]]
    assert [search.hits[0].passage.id for search in found] == list("abcde")


def test_a_slow_request_does_not_hold_up_the_next():
    async def overtake() -> list[str]:
        order: list[str] = []
        arrived, gate = asyncio.Event(), asyncio.Event()

        async def slow(request: httpx.Request) -> httpx.Response:
            if json.loads(request.content)["queries"] == ["slow"]:
                arrived.set()
                await gate.wait()
            return echo(request)

        search = HttpSearch(URL, transport=httpx.MockTransport(slow))

        async def one(query: str) -> None:
            await search.search(query)
            order.append(query)

        first = asyncio.create_task(one("slow"))
        await arrived.wait()
        await one("fast")
        gate.set()
        await first
        return order

    assert asyncio.run(overtake()) == ["fast", "slow"]


def test_several_servers_take_turns_and_stand_in_for_each_other():
    hosts: list[str] = []

    def one_is_dead(request: httpx.Request) -> httpx.Response:
        hosts.append(request.url.host)
        return (raises(httpx.ConnectError) if request.url.host == "one" else echo)(request)

    transport = httpx.MockTransport(one_is_dead)
    search = HttpSearch(["http://one", "http://two"], transport=transport, backoff_s=0)
    (found,) = ask(search, "a")
    assert (found.status, found.attempts, hosts) == ("ok", 2, ["one", "two"])
