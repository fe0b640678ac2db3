"""Search in process: one call of the index for all that ask together, and never an exception."""

import asyncio
import threading

import pytest

from srl.serve import LocalSearch
from srl.trajectory import Hit, Passage, Search


class Echo:
    """An index that finds the query itself, remembers what it was asked, and fails on `boom`."""

    digest = "d" * 32

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        self.calls.append(queries)
        if "boom" in queries:
            raise RuntimeError("out of order\nsecond line")
        return [[] if query == "nothing" else [Hit(Passage(query, query), 1.0)] * k for query in queries]


def ask(search: LocalSearch, *queries: str) -> list[Search]:
    async def together() -> list[Search]:
        return await asyncio.gather(*map(search.search, queries))

    return asyncio.run(together())


def test_queries_of_one_tick_are_one_call_in_the_order_of_arrival():
    index = Echo()
    found = ask(LocalSearch(index, 2), "c", "a", "b", "a")
    assert index.calls == [["c", "a", "b"]]
    assert [search.query for search in found] == ["c", "a", "b", "a"]
    assert [hit.passage.id for hit in found[3].hits] == ["a", "a"]
    assert {search.status for search in found} == {"ok"}
    assert {search.index_digest for search in found} == {"d" * 32}


def test_odd_queries_are_the_policys_own_fault_and_no_hits_are_none():
    index = Echo()
    found = ask(LocalSearch(index), "", " \n ", "abcdefgh" * 200, " a\ud800b \n", "nothing")
    assert [search.status for search in found] == ["rejected"] * 3 + ["ok", "empty"]
    assert index.calls == [["a?b", "nothing"]]
    assert found[3].query == " a\ud800b \n"
    assert not any(search.is_fault for search in found)


@pytest.mark.parametrize("live", [False, True])
def test_a_query_that_breaks_the_index_fails_alone(live):
    index = Live() if live else Echo()
    found = ask(LocalSearch(index), "a", "boom", "b")
    assert [search.status for search in found] == ["ok", "failed", "ok"]
    assert "\n" not in found[1].error
    assert found[1].is_fault


class Live(Echo):
    """An index outside: `slow` queries hang until the gate opens."""

    live = True

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        assert queries[0] != "slow" or self.gate.wait(60)
        return super().search(queries, k)


def test_a_slow_live_query_stalls_no_other():
    async def overtake() -> list[str]:
        index, order = Live(), []
        search = LocalSearch(index)

        async def one(query: str) -> None:
            await search.search(query)
            order.append(query)

        slow = [asyncio.create_task(one("slow")), asyncio.create_task(one("fast in the same tick"))]
        await slow[1]
        await one("fast later")
        index.gate.set()
        await slow[0]
        return order

    assert asyncio.run(overtake()) == ["fast in the same tick", "fast later", "slow"]
