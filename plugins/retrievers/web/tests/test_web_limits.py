"""How often an API is asked: waits, rate, concurrency, and the cap on what is spent."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from web_answers import fault_of, good, in_turn

from srl.errors import UserError
from srl.index.retriever import Fault
from srl_web.caller import Caller
from srl_web.limits import Budget, Rate
from srl_web.options import Options
from srl_web.retriever import WebRetriever
from srl_web.secrets import Secrets


def caller_with(answer, **options):
    """`ask(query)` of a caller whose sleeps are noted down and take no time."""
    waits: list[float] = []

    async def sleep(seconds):
        waits.append(seconds)

    def clock():
        return 100.0 + sum(waits)

    async def ask():
        chosen = Options(provider="serper", **{"rate": None, **options})
        caller = Caller(
            chosen,
            Secrets({"SERPER_API_KEY": "k"}),
            Budget(chosen.cap),
            transport=httpx.MockTransport(answer),
            clock=clock,
            sleep=sleep,
            jitter=lambda: 1.0,
        )
        try:
            return await caller.ask("x", 3)
        except Fault as fault:
            return fault
        finally:
            await caller.aclose()

    return asyncio.run(ask()), waits


def test_waits_double_as_long_as_there_are_attempts_and_time():
    def waits(**options):
        fault, waited = caller_with(in_turn(httpx.Response(500)), backoff_s=1, **options)
        assert fault.status == "failed"
        return waited

    assert waits(attempts=4, retry_s=100) == [1, 2, 4]
    assert waits(attempts=20, retry_s=10) == [1, 2, 4]
    assert waits(attempts=20, retry_s=15) == [1, 2, 4, 8]
    assert waits(attempts=1, retry_s=15) == waits(attempts=5, retry_s=0) == []


def test_retry_after_is_honoured_in_seconds_and_as_a_date():
    found, waits = caller_with(in_turn(httpx.Response(429, headers={"Retry-After": "7"}), good()))
    assert len(found) == 1
    assert waits == [7]
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=15), usegmt=True)
    found, waits = caller_with(in_turn(httpx.Response(503, headers={"Retry-After": soon}), good()))
    assert len(found) == 1
    assert 5 < waits[0] <= 15


@pytest.mark.parametrize("value", ["soon", "-5", "", "²", "1.5"])
def test_a_retry_after_that_makes_no_sense_is_ignored(value):
    answer = in_turn(httpx.Response(429, headers=[(b"Retry-After", value.encode("latin-1"))]), good())
    found, waits = caller_with(answer, backoff_s=1)
    assert len(found) == 1
    assert waits == [1]


def test_an_api_that_wants_to_be_left_alone_is_left_alone_and_the_fault_says_how_long():
    fault, waits = caller_with(in_turn(httpx.Response(429, headers={"Retry-After": "3600"})))
    assert (fault.status, fault.retry_after_s, waits) == ("refused", 3600, [])


def test_requests_begin_as_far_apart_as_the_rate_says():
    now, begun = [100.0], []

    async def sleep(seconds):
        now[0] += seconds

    async def run():
        rate = Rate(4, lambda: now[0], sleep)
        for _ in range(4):
            await rate.turn()
            begun.append(now[0])
        now[0] += 10
        await rate.turn()
        begun.append(now[0])

    asyncio.run(run())
    assert begun == [100.0, 100.25, 100.5, 100.75, 110.75]


def test_no_more_requests_are_on_their_way_than_allowed(web):
    under_way, most = 0, 0

    async def answer(request):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return good()

    options = Options(provider="serper", cache=None, rate=None, concurrency=3)
    retriever = WebRetriever(options, httpx.MockTransport(answer)).open(None)
    found = retriever.search([f"query {number}" for number in range(20)], 1)
    retriever.close()
    assert len(found) == 20
    assert most == 3


def test_the_spending_cap_refuses_and_sends_nothing_more(web):
    retriever = web(in_turn(good()), max_requests=3)
    outcomes = retriever.outcomes([f"query {number}" for number in range(5)], 3)
    faults = [outcome for outcome in outcomes if isinstance(outcome, Fault)]
    assert len(faults) == 2
    assert {fault.status for fault in faults} == {"refused"}
    assert "spending cap of 3 requests" in str(faults[0])
    assert len(retriever.asked) == 3 == retriever.requests


def test_retries_count_against_the_cap(web):
    retriever = web(in_turn(httpx.Response(500)), attempts=5, max_requests=2)
    assert "spending cap" in str(fault_of(retriever))
    assert len(retriever.asked) == 2


def test_a_ledger_counts_across_retrievers_and_restarts(web, tmp_path):
    options = {"ledger": tmp_path / "spent.sqlite", "max_requests": 3}
    first = web(in_turn(good()), **options)
    first.search(["one"], 1)
    second = web(in_turn(good()), **options)
    second.search(["two"], 1)
    first.close()
    third = web(in_turn(good()), **options)
    outcomes = third.outcomes(["three", "four"], 1)
    assert [isinstance(outcome, Fault) for outcome in outcomes] == [False, True]
    assert third.requests == 3


def test_many_threads_never_exceed_the_cap(web, tmp_path):
    retrievers = [web(in_turn(good()), ledger=tmp_path / "spent.sqlite", max_requests=10) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(retrievers[number % 2].outcomes, [f"query {number}"], 1) for number in range(24)]
        outcomes = [job.result()[0] for job in work]
    assert sum(not isinstance(outcome, Fault) for outcome in outcomes) == 10
    assert sum(len(retriever.asked) for retriever in retrievers) == 10


def test_a_ledger_that_cannot_be_written_sends_nothing(web, tmp_path):
    retriever = web(in_turn(good()), ledger=tmp_path / "spent.sqlite")
    retriever._running().budget._ledger.execute("DROP TABLE spent")
    fault = fault_of(retriever)
    assert fault.status == "failed"
    assert "ledger" in str(fault)
    assert not retriever.asked


def test_a_ledger_that_is_no_ledger_is_said_when_opening(web, tmp_path):
    (tmp_path / "notes.txt").write_text("these are my notes, and no database at all " * 20)
    with pytest.raises(UserError, match=r"notes\.txt cannot be used .*ledger=PATH"):
        web(in_turn(good()), ledger=tmp_path / "notes.txt")
    with pytest.raises(UserError, match="ledger=PATH"):
        web(in_turn(good()), ledger=tmp_path / "notes.txt" / "below")
