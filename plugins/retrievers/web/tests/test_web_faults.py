"""Whatever an API does, each query comes to hits or to one status; and how often an API is asked."""

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from web_answers import fault_of, good, in_turn

from srl.index.retriever import Fault
from srl_web import caller
from srl_web.caller import MAX_BYTES, Caller
from srl_web.options import Options


@pytest.mark.parametrize(
    ("response", "status", "quoted"),
    [
        (httpx.Response(400, json={"message": "Not enough credits"}), "refused", "Not enough credits"),
        (httpx.Response(401, json={"error": "Invalid API key."}), "refused", "SERPER_API_KEY"),
        (httpx.Response(404, html="<h1>gone</h1>"), "refused", "404"),
        (httpx.Response(414), "rejected", "414"),
        (httpx.Response(301, headers={"Location": "https://b.test/"}), "failed", "301"),
        (httpx.Response(200, html="<!doctype html><h1>Are you a robot?</h1>"), "failed", "robot"),
        (httpx.Response(200, text='{"organic": [{"title": "On'), "failed", ""),
        (httpx.Response(200, text="[" * 100_000), "failed", ""),
        (httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=b""), "failed", ""),
        (httpx.Response(200, content=b" " * (MAX_BYTES + 1)), "failed", ""),
    ],
)
def test_an_answer_that_will_not_change_is_a_fault_at_once(web, response, status, quoted):
    retriever = web(in_turn(response))
    fault = fault_of(retriever)
    assert fault.status == status
    assert quoted in str(fault)
    assert len(str(fault)) < 400
    assert len(retriever.asked) == 1


@pytest.mark.parametrize(
    ("response", "status"),
    [
        (httpx.Response(429, json={"message": "slow down"}), "refused"),
        (httpx.Response(500), "failed"),
        (httpx.Response(503, json={"error": {"message": "try later"}}), "failed"),
        (httpx.ConnectError("connection refused"), "refused"),
        (httpx.ReadTimeout("late"), "timed_out"),
        (httpx.RemoteProtocolError("peer closed connection"), "failed"),
    ],
)
def test_what_may_pass_is_tried_again_and_then_a_fault(web, response, status):
    retriever = web(in_turn(response), attempts=3)
    assert fault_of(retriever).status == status
    assert len(retriever.asked) == 3
    recovering = web(in_turn(response, response, good()), attempts=3)
    assert len(recovering.search(["x"], 3)[0]) == 1


def test_one_query_that_fails_does_not_spoil_the_others(web, key, caplog):
    def answer(request):
        query = json.loads(request.content)["q"]
        if query == "bug":
            raise TypeError(f"unexpected {request.headers['X-API-KEY']}")
        return httpx.Response(200, html="oops") if query == "bad" else good()

    outcomes = web(answer).outcomes(["one", "bad", "", "bug", "two"], 3)
    assert [type(outcome) for outcome in outcomes] == [list, Fault, Fault, Fault, list]
    assert key not in str(outcomes[3]) + caplog.text
    with pytest.raises(Fault):
        web(answer).search(["one", "bad"], 3)


def asked(answer, monkeypatch, backoff_s=1.0, retry_s=100.0, **options):
    """What a caller gets from an API, and how long it waits between its attempts; nothing really waits."""
    waits: list[float] = []
    monkeypatch.setattr(caller, "BACKOFF_S", backoff_s)
    monkeypatch.setattr(caller, "RETRY_S", retry_s)
    ask = Caller(
        Options(provider="serper", **{"rate": None, "attempts": 20, **options}),
        {"SERPER_API_KEY": "k"},
        httpx.MockTransport(answer),
        clock=lambda: 100.0 + sum(waits),
        sleep=waits.append,
        jitter=lambda: 1.0,
    ).ask
    try:
        return ask("x", 3), [wait for wait in waits if wait]
    except Fault as fault:
        return fault, [wait for wait in waits if wait]


def test_retry_after_is_honoured_in_seconds_and_as_a_date_unless_it_makes_no_sense(monkeypatch):
    def waits(value):
        response = httpx.Response(429, headers=[(b"Retry-After", value.encode("latin-1"))])
        return asked(in_turn(response, good()), monkeypatch)[1]

    assert waits("7") == [7]
    (wait,) = waits(format_datetime(datetime.now(UTC) + timedelta(seconds=15), usegmt=True))
    assert 5 < wait <= 15
    assert waits("soon") == waits("-5") == waits("") == waits("²") == waits("1.5") == [1]


def test_the_spending_cap_counts_retries_refuses_and_sends_nothing_more(web):
    retriever = web(in_turn(good()), max_requests=3)
    outcomes = retriever.outcomes([f"query {number}" for number in range(5)], 3)
    assert [o.status for o in outcomes if isinstance(o, Fault)] == ["refused"] * 2
    assert len(retriever.asked) == 3 == retriever.requests
    retrying = web(in_turn(httpx.Response(500)), attempts=5, max_requests=2)
    assert fault_of(retrying).status == "refused"
    assert len(retrying.asked) == 2
