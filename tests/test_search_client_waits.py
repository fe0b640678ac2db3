"""How long the search client waits: Retry-After, back-off with jitter, the circuit breaker."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search_sites import ONE, Clock, Site, ask, client

from srl.serve.client.failover import FIRST_REST_S, LONGEST_REST_S, THRESHOLD, Breaker
from srl.serve.client.retry import retry_after


@pytest.mark.parametrize(("asked", "waited"), [("3", 3.0), ("0", 0.0), ("86400", 10.0), ("nonsense", 0.0)])
@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says_within_limits(code, asked, waited):
    clock, site = Clock(), Site(one=code)
    site.headers["Retry-After"] = asked
    (found,) = ask(client(site, ONE, clock=clock, retries=1, backoff_s=0), "a")
    assert (found.status, clock.slept) == ("refused" if code == 503 else "failed", [waited])


def test_a_server_that_is_busy_for_ever_costs_no_more_than_the_retries():
    clock, site = Clock(), Site(one=429)
    found = ask(client(site, ONE, clock=clock, retries=2), *"abcdefgh")
    assert {(search.status, search.attempts) for search in found} == {("failed", 3)}
    assert "HTTP 429" in found[0].error


def test_a_busy_server_is_spared_while_another_has_time():
    site = Site(one=503, two=200)
    site.headers["Retry-After"] = "60"
    ask(client(site), *"abcd")
    assert site.asked == ["one", "two", "two", "two", "two"]


def test_while_all_are_busy_a_search_asks_only_one_of_them():
    site = Site(one=503, two=503)
    site.headers["Retry-After"] = "60"
    ask(client(site, retries=0), "a", "b")
    assert site.asked == ["one", "two", "one"]


def test_a_query_that_one_server_rejects_is_not_taken_to_the_next():
    site = Site(one=422, two=200)
    (found,) = ask(client(site), "a")
    assert (found.status, site.asked) == ("rejected", ["one"])


def test_retry_after_may_be_a_date():
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("Wed, 21 Oct 2199 07:28:00 GMT") > 1e9
    assert [retry_after(value) for value in ("", "soon", "-3", "1.5")] == [None, None, None, None]


def test_waits_grow_have_jitter_and_repeat():
    def waits(query: str) -> list[float]:
        clock = Clock()
        ask(client(Site(one=500), ONE, clock=clock, retries=8, backoff_s=1.0), query)
        return clock.slept

    assert waits("a") == waits("a") != waits("b")
    limits = [1, 2, 4, 8, 10, 10, 10, 10]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits("a"), limits, strict=True))


conditions = st.sampled_from([200, 401, 422, 429, 500, 503, httpx.ConnectError, httpx.ReadError])


@settings(deadline=None)
@given(st.lists(st.tuples(conditions, conditions, st.floats(0, 40)), max_size=12))
def test_after_whatever_happened_healthy_servers_are_used_again(history):
    clock, site = Clock(), Site(one=200, two=200)
    site.headers["Retry-After"] = "60"
    search = client(site, clock=clock, retries=1)
    for number, (one, two, pause) in enumerate(history):
        site.statuses.update(one=one, two=two)
        clock.now += pause
        asked = len(site.asked)
        (found,) = ask(search, str(number))
        assert found.attempts == len(site.asked) - asked <= 4
        assert found.status == "ok" or found.error

    site.statuses.update(one=200, two=200)
    clock.now += LONGEST_REST_S
    assert {found.status for found in ask(search, *"abcdef")} == {"ok"}
    clock.now += 60
    site.asked.clear()
    ask(search, *"abcdef")
    assert set(site.asked) == {"one", "two"}


class TestBreaker:
    def broken(self, clock: Clock, failures: int = THRESHOLD) -> Breaker:
        breaker = Breaker(clock)
        for number in range(failures):
            breaker.failed(number)
        return breaker

    def test_it_opens_at_the_threshold_and_not_before(self):
        assert self.broken(Clock(), THRESHOLD - 1).state == "closed"
        breaker = self.broken(Clock())
        assert (breaker.state, breaker.admits, breaker.wait_s) == ("open", False, FIRST_REST_S)

    def test_a_success_between_failures_starts_the_count_again(self):
        breaker = self.broken(Clock(), THRESHOLD - 1)
        breaker.succeeded()
        breaker.failed("one more")
        assert breaker.state == "closed"

    def test_it_opens_at_once_for_what_no_request_can_cause(self):
        breaker = Breaker(Clock())
        breaker.failed()
        assert breaker.state == "open"

    def test_the_same_request_failing_again_counts_once(self):
        breaker = Breaker(Clock())
        for _ in range(THRESHOLD):
            breaker.failed("the same")
        assert breaker.state == "closed"
        for number in range(THRESHOLD - 1):
            breaker.failed(number)
        assert breaker.state == "open"

    def test_half_open_it_lets_one_request_through(self):
        clock = Clock()
        breaker = self.broken(clock)
        clock.now += FIRST_REST_S
        assert (breaker.state, breaker.admits) == ("half-open", True)
        with breaker.request():
            assert not breaker.admits
        assert breaker.admits

    def test_a_request_from_before_does_not_end_the_trial(self):
        clock = Clock()
        breaker = Breaker(clock)
        with breaker.request():
            for _ in range(THRESHOLD):
                breaker.failed()
            clock.now += FIRST_REST_S
            trial = breaker.request()
            trial.__enter__()
        assert not breaker.admits

    def test_a_success_closes_it_and_a_failure_doubles_the_rest(self):
        clock = Clock()
        breaker = self.broken(clock)
        for rest in (2, 4, LONGEST_REST_S, LONGEST_REST_S):
            clock.now += breaker.wait_s
            breaker.failed()
            assert (breaker.state, breaker.wait_s) == ("open", rest)
        breaker.succeeded()
        assert breaker.state == "closed"
        breaker.failed()
        assert breaker.wait_s == FIRST_REST_S
