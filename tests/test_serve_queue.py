"""The queue of an index: what is searched together, once, not at all, and in whose turn."""

import asyncio
import threading

from srl.index import Fault
from srl.serve.server.answers import AnswerCache
from srl.serve.server.queue import Answered, SearchQueue
from srl.trajectory import Hit, Passage


class Index:
    """Remembers its batches; `boom` fails, `nan` has no score, and a search waits while `gate` is shut."""

    digest = "d"

    def __init__(self, is_open: bool = True) -> None:
        self.batches: list[tuple[list[str], int]] = []
        self.gate, self.busy = threading.Event(), threading.Event()
        if is_open:
            self.gate.set()

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        self.batches.append((queries, k))
        self.busy.set()
        assert self.gate.wait(60)
        return [self._outcome(query) for query in queries]

    def _outcome(self, query: str) -> list[Hit] | Fault:
        if query == "boom":
            return Fault("failed", "it broke")
        return [Hit(Passage(query, query), float("nan") if query == "nan" else 1.0)]


def in_line(index: Index, *asked: tuple[list[str], int], **options: object) -> list:
    """What each of the requests gets that stand in line at once."""

    async def all_at_once() -> list:
        queue = SearchQueue(index, **options)  # type: ignore[arg-type]
        try:
            return await asyncio.gather(*(queue.search(*one) for one in asked), return_exceptions=True)
        finally:
            queue.close()

    return asyncio.run(all_at_once())


def ids(answered: Answered) -> list[str]:
    return [b"".join(found.documents).decode()[8:9] for found in answered.outcomes]


def test_waiting_requests_are_searched_together_and_answered_apart():
    index = Index()
    found = in_line(index, (["a", "b"], 3), ([], 3), (["c"], 3))
    assert index.batches == [(["a", "b", "c"], 3)]
    assert [ids(one) for one in found] == [["a", "b"], [], ["c"]]


def test_the_ks_take_turns_so_a_long_line_starves_nobody():
    index = Index()
    in_line(index, (list("abcdef"), 3), (["x"], 1), max_batch=2)
    assert [k for _, k in index.batches] == [3, 1, 3, 3]
    assert [query for queries, _ in index.batches for query in queries] == list("abxcdef")


def test_the_same_query_is_searched_once_whoever_asks():
    index = Index()
    found = in_line(index, (["a", "b", "a"], 3), (["a"], 3), (["a"], 1))
    assert index.batches == [(["a", "b"], 3), (["a"], 1)]
    assert [ids(one) for one in found] == [["a", "b", "a"], ["a"], ["a"]]


def test_a_fault_is_its_query_s_alone_and_is_asked_again():
    index, cache = Index(), AnswerCache(1 << 20)
    (found,) = in_line(index, (["a", "boom", "nan"], 3), cache=cache)
    assert ids(Answered(found.outcomes[:1])) == ["a"]
    assert [fault.status for fault in found.outcomes[1:]] == ["failed", "failed"]
    in_line(index, (["a", "boom"], 3), cache=cache)
    assert index.batches[1:] == [(["boom"], 3)]


def test_a_full_line_refuses_at_once_and_says_when_to_come_back():
    index = Index()
    found = in_line(index, (list("abc"), 3), (["d"], 3), (["a"], 3), max_waiting=2)
    assert ids(found[0]) == ["a", "b", "c"], "an empty line takes any request"
    assert isinstance(found[1], Fault)
    assert (found[1].status, found[1].retry_after_s) == ("refused", 1.0)
    assert ids(found[2]) == ["a"], "what is in line already needs no room"
    assert index.batches == [(["a", "b", "c"], 3)]


def test_who_waits_too_long_is_told_and_leaves_the_line():
    index = Index(is_open=False)

    async def impatient() -> tuple[Answered, BaseException, int]:
        queue = SearchQueue(index, timeout_s=0.01)
        searched = asyncio.create_task(queue.search(["a"], 3))
        await asyncio.to_thread(index.busy.wait, 60)
        (late,) = await asyncio.gather(queue.search(["b", "a"], 3), return_exceptions=True)
        index.gate.set()
        (gone,) = await asyncio.gather(searched, return_exceptions=True)
        found = late
        while isinstance(found, Fault):  # a slow machine may take longer than the time-out
            (found,) = await asyncio.gather(queue.search(["c"], 3), return_exceptions=True)
        assert ids(found) == ["c"]
        return gone, late, queue.waiting

    gone, late, waiting = asyncio.run(impatient())
    assert isinstance(late, Fault)
    assert late.status == "timed_out"
    assert isinstance(gone, Fault)
    assert waiting == 0
    searched = {query for queries, _ in index.batches for query in queries}
    assert searched == {"a", "c"}, "nobody waited for b any more"
