"""The retriever among threads, processes, caches, and the rest of srl."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import multiprocessing
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import httpx
import pytest

from srl.errors import CheckFailed, UserError
from srl.index import build_index, open_index
from srl.index.open import live_index
from srl.index.retriever import Fault
from srl.index.timing import collect_timings
from srl.testing import check_retriever
from srl.testing.retrievers import CHECKS, CORPUS, Trial
from srl_web.api import Result
from srl_web.cache import Cache, open_file
from srl_web.options import Options
from srl_web.retriever import WebRetriever


def echo(request):
    """One result, whose text is the query."""
    query = json.loads(request.content)["q"]
    item = {"title": "Q", "snippet": query, "link": f"https://a.test/{len(query)}"}
    return httpx.Response(200, json={"organic": [item]})


def texts(retriever, queries, k=3):
    return [[hit.passage.text for hit in hits] for hits in retriever.search(queries, k)]


def web_threads():
    return [thread for thread in threading.enumerate() if thread.name == "srl-web"]


def test_a_batch_answers_like_its_queries_alone(web):
    retriever = web(echo)
    queries = [f"query {number}" for number in range(30)]
    assert texts(retriever, queries) == [[query] for query in queries]
    assert [texts(retriever, [query])[0] for query in queries] == [[query] for query in queries]


def test_answers_from_many_threads_at_once(web):
    retriever = web(echo)
    queries = [f"query {number % 7}" for number in range(60)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: texts(retriever, [query])[0], queries))
    assert found == [[query] for query in queries]


def test_equal_queries_on_their_way_are_one_request(web):
    retriever = web(echo)
    assert texts(retriever, ["same", " same ", "other", "same"]) == [["same"], ["same"], ["other"], ["same"]]
    assert len(retriever.asked) == 2


def test_an_answer_is_paid_for_once(web, tmp_path):
    first = web(echo, cache=tmp_path / "cache.sqlite")
    assert texts(first, ["a  b"]) == texts(first, ["a b"]) == [["a b"]]
    first.close()
    second = web(echo, cache=tmp_path / "cache.sqlite", key_env="MY_KEY")
    assert texts(second, ["a b"]) == [["a b"]]
    assert (len(first.asked), len(second.asked)) == (1, 0)


def test_another_k_provider_or_country_is_another_answer(web, tmp_path):
    cache = tmp_path / "cache.sqlite"
    web(echo, cache=cache).search(["x"], 3)
    for options, k in (({}, 4), ({"country": "us"}, 3), ({"answers": True}, 3)):
        retriever = web(echo, cache=cache, **options)
        retriever.search(["x"], k)
        assert len(retriever.asked) == 1


def test_another_google_engine_is_another_answer_and_another_key_is_not(web, tmp_path, monkeypatch):
    def search():
        retriever = web(
            lambda request: httpx.Response(200, json={"queries": {}}),
            provider="google",
            cache=tmp_path / "cache.sqlite",
        )
        retriever.search(["x"], 3)
        return len(retriever.asked)

    assert search() == 1
    monkeypatch.setenv("GOOGLE_API_KEY", "a newer key")
    assert search() == 0
    monkeypatch.setenv("GOOGLE_CSE_ID", "another engine")
    assert search() == 1


def test_an_empty_answer_is_kept_and_a_fault_is_not(web, tmp_path):
    cache = tmp_path / "cache.sqlite"
    empty = web(lambda request: httpx.Response(200, json={"organic": []}), cache=cache)
    assert empty.search(["nothing"], 3) == empty.search(["nothing"], 3) == [[]]
    assert len(empty.asked) == 1
    broken = web(lambda request: httpx.Response(500), cache=cache, attempts=1)
    for _ in range(2):
        assert isinstance(broken.outcomes(["broken"], 3)[0], Fault)
    assert len(broken.asked) == 2
    assert texts(web(echo, cache=cache), ["broken"]) == [["broken"]]


def test_an_old_answer_is_asked_for_again(tmp_path):
    now = [1000.0]
    cache = Cache(open_file(tmp_path / "cache.sqlite", "cache"), days=1, clock=lambda: now[0])
    cache.keep_results("k", [Result("t", "x", "u")])
    now[0] += 86400
    assert cache.results("k") == [Result("t", "x", "u")]
    now[0] += 1
    assert cache.results("k") is None
    for_ever = Cache(open_file(tmp_path / "cache.sqlite", "cache"), days=None)
    assert for_ever.results("k") == [Result("t", "x", "u")]


def test_the_cache_is_in_the_users_cache_directory_unless_told_otherwise(web, tmp_path):
    options = Options(provider="serper")
    retriever = WebRetriever(options, httpx.MockTransport(echo)).open(None)
    retriever.search(["x"], 1)
    retriever.close()
    assert (tmp_path / "home" / "srl" / "web.sqlite").is_file()


def test_without_a_place_for_the_users_cache_the_search_goes_on(web, tmp_path, caplog):
    (tmp_path / "home").write_text("a file where a directory should be")
    retriever = WebRetriever(Options(provider="serper", rate=None), httpx.MockTransport(echo)).open(None)
    assert texts(retriever, ["x"]) == [["x"]]
    retriever.close()
    assert "web search runs without a cache" in caplog.text
    with pytest.raises(UserError, match="cache=PATH"):
        web(echo, cache=tmp_path / "home" / "mine.sqlite")


def test_a_cache_that_breaks_costs_money_and_no_answer(web, tmp_path, caplog):
    retriever = web(echo, cache=tmp_path / "cache.sqlite")
    retriever._running()._cache._connection.execute("DROP TABLE kept")
    assert texts(retriever, ["x"]) == texts(retriever, ["x"]) == [["x"]]
    assert len(retriever.asked) == 2
    assert caplog.text.count("the cache of web search failed") == 1


def test_a_newer_cache_is_refused(web, tmp_path):
    open_file(tmp_path / "cache.sqlite", "cache").execute("PRAGMA user_version=2")
    with pytest.raises(UserError, match="has format 2"):
        web(echo, cache=tmp_path / "cache.sqlite")


def _write(path, name):
    cache = Cache(open_file(Path(path), "cache"), None)
    for number in range(50):
        cache.keep_results(f"{name}-{number}", [Result(name, str(number), "")])


def test_many_processes_share_a_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    path = str(tmp_path / "cache.sqlite")
    writers = [context.Process(target=_write, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    cache = Cache(open_file(Path(path), "cache"), None)
    assert all(cache.results(f"{name}-{number}") for name in "abc" for number in range(50))


def _search_here(retriever, queue):
    queue.put(texts(retriever, ["in the child"]))


def test_a_forked_process_searches_on_its_own(web):
    retriever = web(echo)
    assert texts(retriever, ["before"]) == [["before"]]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_search_here, args=(retriever, queue))
    child.start()
    assert queue.get(timeout=60) == [["in the child"]]
    child.join()
    assert texts(retriever, ["after"]) == [["after"]]


def test_closing_ends_the_thread_and_searching_starts_it_again(web):
    before = len(web_threads())
    retriever = web(echo)
    retriever.search(["x"], 1)
    assert len(web_threads()) == before + 1
    retriever.close()
    retriever.close()
    assert len(web_threads()) == before
    assert texts(retriever, ["x"]) == [["x"]]


def test_a_retriever_that_is_dropped_takes_its_thread_along():
    before = len(web_threads())
    retriever = WebRetriever(Options(provider="serper", cache=None), httpx.MockTransport(echo)).open(None)
    retriever.search(["x"], 1)
    del retriever
    gc.collect()
    assert len(web_threads()) == before


def test_closing_ends_requests_that_are_on_their_way():
    started = Event()

    async def never(request):
        started.set()
        await asyncio.Event().wait()

    retriever = WebRetriever(Options(provider="serper", cache=None), httpx.MockTransport(never)).open(None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(retriever.outcomes, ["x"], 3)
        started.wait(60)
        retriever.close()
        (fault,) = waiting.result(timeout=60)
    assert (fault.status, str(fault)) == ("failed", "web search was closed before the answer arrived")


def test_a_search_before_opening_is_a_bug_of_the_caller():
    with pytest.raises(RuntimeError, match="not open"):
        WebRetriever(Options(provider="serper")).search(["x"], 1)


def test_the_time_counts_as_web(web):
    retriever = web(echo)
    with collect_timings() as seconds:
        retriever.search(["x"], 1)
    assert list(seconds) == ["web"]


def test_an_index_of_the_web_is_built_opened_and_searched(loopback, tmp_path):
    body = json.dumps({"results": [{"title": "T", "snippet": "S", "link": "https://a.test/"}]}).encode()

    def handle(connection):
        connection.recv(65536)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
        connection.sendall(head + body)
        connection.close()

    api = {"url": loopback(handle).url, "params": {"q": "{query}"}}
    manifest = build_index(None, tmp_path / "index", "web", {"api": api})
    assert manifest.passages == 0
    index = open_index(tmp_path / "index", {"cache": None, "max_requests": 1})
    assert index.live
    assert index.outcomes(["x"], 3)[0][0].passage.contents == '"T"\nS'
    (refused,) = index.outcomes(["y"], 3)
    assert refused.status == "refused"
    live = live_index("web", {"api": api, "cache": None})
    assert live.digest == manifest.digest
    assert live.search(["x"], 1)[0][0].passage.id == "https://a.test/"


def test_a_proxy_that_cannot_be_is_said_when_opening(web, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "gopher://proxy.test:70")
    monkeypatch.setenv("NO_PROXY", "")
    with pytest.raises(UserError, match=r"no connection to google\.serper\.dev .*HTTPS_PROXY"):
        web(provider="serper")


def test_passages_are_not_taken(tmp_path):
    with pytest.raises(UserError, match="takes no corpus"):
        build_index(iter([]), tmp_path / "index", "web", {"provider": "serper"})
    with pytest.raises(UserError, match="takes no corpus"):
        WebRetriever(Options(provider="serper")).build([], tmp_path, lambda done: None)


def test_httpcore_shows_no_headers_in_debug_logs():
    assert not logging.getLogger("httpcore.http11").isEnabledFor(logging.DEBUG)


class Live(Trial):
    """The kit's retriever under test, searching an API; a rejected query counts as one without hits."""

    def open(self):
        return self.retriever

    def search(self, queries, k=5):
        found = self.retriever.outcomes(list(queries), k)
        assert len(found) == len(queries)
        assert all(isinstance(one, list) or one.status == "rejected" for one in found)
        return [one if isinstance(one, list) else [] for one in found]


def kit_corpus(request):
    """An API that searches the conformance kit's passages for words in common."""
    asked = json.loads(request.content)
    words = set(re.findall(r"\w+", asked["q"].casefold()))
    shared = {
        passage: len(words & set(re.findall(r"\w+", passage.contents.casefold()))) for passage in CORPUS
    }
    best = sorted((passage for passage in CORPUS if shared[passage]), key=lambda passage: -shared[passage])
    items = [{"title": one.title, "snippet": one.text, "link": one.id} for one in best[: asked["num"]]]
    return httpx.Response(200, json={"organic": items})


WITH_CORPUS = {
    "_returns_passages_of_the_corpus_unchanged",  # texts are made plain
    "_orders_hits_by_score_and_then_by_corpus",  # the order is the API's
}
LIVE_CHECKS = [check for check in CHECKS if check.__name__ not in WITH_CORPUS]


@pytest.mark.parametrize("check", LIVE_CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_conforms_to_the_retriever_seam_as_far_as_a_live_one_can(web, tmp_path, check):
    assert len(LIVE_CHECKS) == len(CHECKS) - len(WITH_CORPUS)
    retriever = web(kit_corpus)
    check(Live(lambda: retriever, tmp_path, retriever))


def test_the_kit_checks_a_live_retriever_and_asks_nobody(monkeypatch):
    assert len(check_retriever("web", {"provider": "serper"})) == 6

    class Asks(WebRetriever):
        def outcomes(self, queries, k):
            return [[] for _ in queries]

    with pytest.raises(CheckFailed, match=r"an empty query gave \[\], expected a Fault"):
        check_retriever(Asks(Options(provider="serper", cache=None)))
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(CheckFailed, match=r"fails 1 of 1 checks: opens without a directory .*SERPER_API_KEY"):
        check_retriever("web", {"provider": "serper"})
