"""Whatever an API does, each query comes to hits or to one clear status."""

from __future__ import annotations

import json
from threading import Event, Semaphore

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from web_answers import GOOD, fault_of, good, in_turn

from srl.index.retriever import Fault
from srl_web.api import read_answers, read_results
from srl_web.caller import MAX_BYTES
from srl_web.hits import cleaned, hits_of
from srl_web.providers import PROVIDERS

NAMES = [
    *("organic_results", "search_information", "items", "queries", "organic", "searchParameters", "web"),
    *("results", "query", "title", "snippet", "link", "url", "description", "content", "answer", "answerBox"),
]


@pytest.mark.parametrize(
    ("response", "status", "said"),
    [
        (httpx.Response(400, json={"message": "Not enough credits"}), "refused", "Not enough credits"),
        (httpx.Response(401, json={"error": "Invalid API key."}), "refused", "SERPER_API_KEY"),
        (httpx.Response(403, json={"message": "Unauthorized."}), "refused", "Unauthorized."),
        (httpx.Response(402, text="pay"), "refused", "HTTP 402"),
        (httpx.Response(432, json={"detail": {"error": "Over your plan."}}), "refused", "Over your plan."),
        (httpx.Response(404, html="<h1>gone</h1>"), "refused", "HTTP 404"),
        (httpx.Response(414), "rejected", "too long"),
        (httpx.Response(301, headers={"Location": "https://b.test/"}), "failed", "final URL"),
        (httpx.Response(204), "failed", "HTTP 204"),
        (httpx.Response(200, html="<!doctype html><h1>Are you a robot?</h1>"), "failed", "text/html"),
        (httpx.Response(200, text=""), "failed", "not JSON"),
        (httpx.Response(200, text='{"organic": [{"title": "On'), "failed", "not JSON"),
        (httpx.Response(200, text="[" * 100_000), "failed", "nested too deeply"),
        (httpx.Response(200, content=b"\xff\xfe\x00broken"), "failed", "not JSON"),
        (httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=b""), "failed", "not JSON"),
        (httpx.Response(200, content=b" " * (MAX_BYTES + 1)), "failed", "more than 5,000,000 bytes"),
    ],
)
def test_an_answer_that_will_not_change_is_a_fault_at_once(web, response, status, said):
    retriever = web(in_turn(response))
    fault = fault_of(retriever)
    assert fault.status == status
    assert said in str(fault)
    assert len(retriever.asked) == 1


@pytest.mark.parametrize(
    ("response", "status", "said"),
    [
        (httpx.Response(429, json={"message": "slow down"}), "refused", "HTTP 429: slow down"),
        (httpx.Response(500), "failed", "HTTP 500"),
        (httpx.Response(503, json={"error": {"message": "try later"}}), "failed", "try later"),
        (httpx.ConnectError("connection refused"), "refused", "no connection"),
        (httpx.ReadTimeout("late"), "timed_out", "did not answer in 60 s"),
        (httpx.RemoteProtocolError("peer closed connection"), "failed", "connection failed"),
    ],
)
def test_what_may_pass_is_tried_again_and_then_a_fault(web, response, status, said):
    retriever = web(in_turn(response), attempts=3)
    fault = fault_of(retriever)
    assert fault.status == status
    assert said in str(fault)
    assert len(retriever.asked) == 3

    recovering = web(in_turn(response, response, good()), attempts=3)
    assert len(recovering.search(["x"], 3)[0]) == 1


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "empty"),
        (" \n\t", "empty"),
        ("\x00", "empty"),
        ("a" * 401, "401 characters, at most 400"),
        ("a " * 51, "50 words"),
    ],
)
def test_a_query_that_cannot_be_asked_is_rejected_and_costs_nothing(web, query, said):
    retriever = web(in_turn(good()), provider="brave")
    fault = fault_of(retriever, query)
    assert fault.status == "rejected"
    assert said in str(fault)
    assert not retriever.asked


@pytest.mark.parametrize(
    "query",
    ["lone \ud800 surrogate", "null\x00byte", "東京タワー 👩‍🚀", "a&b=c#d?e", "{key}", "</search><answer>x"],
)
def test_any_text_is_a_query(web, query):
    for provider in ("serpapi", "serper"):
        retriever = web(in_turn(httpx.Response(200, json={**GOOD, "organic_results": []})), provider=provider)
        assert isinstance(retriever.outcomes([query], 3)[0], list)
        (request,) = retriever.asked
        sent = json.loads(request.content)["q"] if request.content else request.url.params["q"]
        assert sent == query.replace("\ud800", "?").replace("\x00", " ")


def test_one_bad_query_does_not_spoil_the_others(web):
    def answer(request):
        query = json.loads(request.content)["q"]
        return httpx.Response(200, html="oops") if query == "bad" else good()

    first, second, third, fourth = web(answer).outcomes(["one", "bad", "", "two"], 3)
    assert [type(outcome) for outcome in (first, second, third, fourth)] == [list, Fault, Fault, list]


def test_a_bug_is_a_fault_of_its_query_alone_and_logged_without_the_key(web, key, caplog):
    def answer(request):
        if json.loads(request.content)["q"] == "bug":
            raise TypeError(f"unexpected {request.headers['X-API-KEY']}")
        return good()

    outcomes = web(answer).outcomes(["one", "bug"], 3)
    assert [type(outcome) for outcome in outcomes] == [list, Fault]
    assert str(outcomes[1]) == "TypeError: unexpected [hidden]"
    assert "Traceback" in caplog.text
    assert key not in caplog.text


def test_search_raises_the_first_fault(web):
    retriever = web(in_turn(httpx.Response(500)), attempts=1)
    with pytest.raises(Fault, match="HTTP 500"):
        retriever.search(["x"], 3)
    assert retriever.search([], 3) == []
    assert retriever.outcomes([], 3) == []


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(payload=values, provider=st.sampled_from(sorted(PROVIDERS)), answers=st.booleans())
def test_whatever_json_comes_each_query_has_hits_that_can_be_written_or_a_fault(payload, provider, answers):
    api = PROVIDERS[provider]
    try:
        results = cleaned(read_results(api, payload) + (read_answers(api, payload) if answers else []))
    except ValueError:
        return
    hits = hits_of(results, 3, {})
    assert len(hits) <= 3
    assert len({hit.passage.id for hit in hits}) == len(hits)
    for hit in hits:
        assert hit.passage.id.strip()
        assert hit.passage.contents.startswith('"')
        (hit.passage.id + hit.passage.contents).encode()


def wire(answer: bytes):
    """A server that reads a request, answers these bytes and hangs up."""

    def handle(connection):
        connection.recv(65536)
        connection.sendall(answer)
        connection.close()

    return handle


def local(server, **more):
    return {"api": {"url": server.url + "/search", "params": {"q": "{query}"}, "results": "organic"}, **more}


HALF = (
    b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{"organic": [{"title'
)


@pytest.mark.parametrize(
    ("bytes_", "said"),
    [
        (HALF, "connection failed"),
        (b"", "connection failed"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "connection failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nbrok", "connection failed"),
        (b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"org', "connection failed"),
    ],
)
def test_half_an_answer_over_a_real_socket_is_tried_again_and_then_failed(web, loopback, bytes_, said):
    server = loopback(wire(bytes_))
    fault = fault_of(web(**local(server), attempts=2))
    assert fault.status == "failed"
    assert said in str(fault)
    assert server.connections == 2


def test_an_api_that_never_answers_is_timed_out(web, loopback):
    hold, arrived = Event(), Semaphore(0)

    def never(connection):
        arrived.release()
        hold.wait()

    fault = fault_of(web(**local(loopback(never)), attempts=2, timeout_s=0.2))
    assert arrived.acquire(timeout=60)
    assert arrived.acquire(timeout=60), "it is asked again"
    hold.set()
    assert fault.status == "timed_out"


def test_an_api_that_drips_is_timed_out_though_every_byte_is_in_time(web, loopback):
    stop = Event()

    def drip(connection):
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(200):
            if stop.wait(0.01):
                break
            connection.sendall(b" ")
        connection.close()

    fault = fault_of(web(**local(loopback(drip)), attempts=1, timeout_s=0.1))
    stop.set()
    assert fault.status == "timed_out"


def test_a_port_where_nobody_listens_is_refused(web, loopback):
    server = loopback(wire(b""))
    server.close()
    assert fault_of(web(**local(server), attempts=2)).status == "refused"
