"""The retriever among threads, processes, caches, and the rest of srl."""

from __future__ import annotations

import json
import re

import httpx
import pytest
from web_answers import replies

from srl.errors import UserError
from srl.index import build_index, open_index
from srl.index.open import live_index
from srl.index.retriever import Fault
from srl.testing.retrievers import CHECKS, CORPUS, Trial


def echo(request):
    """One result, whose text is the query."""
    query = json.loads(request.content)["q"]
    result = {"title": "Q", "snippet": query, "link": f"https://a.test/{len(query)}"}
    return httpx.Response(200, json={"organic": [result]})


def texts(retriever, queries, k=3):
    return [[hit.passage.text for hit in hits] for hits in retriever.search(queries, k)]


def test_an_answer_is_paid_for_once(web, tmp_path):
    first = web(echo, cache=tmp_path / "cache.sqlite")
    assert texts(first, ["a  b"]) == texts(first, ["a b"]) == [["a b"]]
    second = web(echo, cache=tmp_path / "cache.sqlite", key_env="MY_KEY")
    assert texts(second, ["a b"]) == [["a b"]]
    assert (len(first.asked), len(second.asked)) == (1, 0)


def test_what_results_depend_on_is_another_answer_and_the_key_is_not(web, tmp_path, monkeypatch):
    def requests(k=3, **options):
        retriever = web(replies({"queries": {}, "organic": []}), cache=tmp_path / "cache.sqlite", **options)
        retriever.search(["x"], k)
        return len(retriever.asked)

    assert [requests(), requests(), requests(k=4), requests(country="us"), requests(answers=True)] == [
        1,
        0,
        1,
        1,
        1,
    ]
    assert requests(provider="google") == 1
    monkeypatch.setenv("GOOGLE_API_KEY", "a newer key")
    assert requests(provider="google") == 0
    monkeypatch.setenv("GOOGLE_CSE_ID", "another engine")
    assert requests(provider="google") == 1


def test_an_empty_answer_is_kept_and_a_fault_is_not(web, tmp_path):
    cache = tmp_path / "cache.sqlite"
    empty = web(replies({"organic": []}), cache=cache)
    assert empty.search(["nothing"], 3) == empty.search(["nothing"], 3) == [[]]
    assert len(empty.asked) == 1
    broken = web(lambda request: httpx.Response(500), cache=cache, attempts=1)
    assert all(isinstance(broken.outcomes(["broken"], 3)[0], Fault) for _ in range(2))
    assert len(broken.asked) == 2
    assert texts(web(echo, cache=cache), ["broken"]) == [["broken"]]


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
    assert index.outcomes(["y"], 3)[0].status == "refused"
    live = live_index("web", {"api": api, "cache": None})
    assert live.digest == manifest.digest
    assert live.search(["x"], 1)[0][0].passage.id == "https://a.test/"
    with pytest.raises(UserError):
        build_index(iter([]), tmp_path / "other", "web", {"provider": "serper"})


class Live(Trial):
    """The kit's retriever under test, searching an API; a rejected query counts as one without hits."""

    def open(self):
        return self.retriever

    def search(self, queries, k=5):
        outcomes = self.retriever.outcomes(list(queries), k)
        assert all(isinstance(outcome, list) or outcome.status == "rejected" for outcome in outcomes)
        return [outcome if isinstance(outcome, list) else [] for outcome in outcomes]


def kit_corpus(request):
    """An API that searches the conformance kit's passages for words in common."""
    asked = json.loads(request.content)
    words = set(re.findall(r"\w+", asked["q"].casefold()))
    shared = {one: len(words & set(re.findall(r"\w+", one.contents.casefold()))) for one in CORPUS}
    best = sorted((one for one in CORPUS if shared[one]), key=lambda one: -shared[one])[: asked["num"]]
    results = [{"title": one.title, "snippet": one.text, "link": one.id} for one in best]
    return httpx.Response(200, json={"organic": results})


NOT_LIVE = {
    "_returns_passages_of_the_corpus_unchanged",  # texts are made plain
    "_orders_hits_by_score_and_then_by_corpus",  # the order is the API's
}


@pytest.mark.parametrize("check", [check for check in CHECKS if check.__name__ not in NOT_LIVE])
def test_conforms_to_the_retriever_seam_as_far_as_a_live_one_can(web, tmp_path, check):
    retriever = web(kit_corpus)
    check(Live(lambda: retriever, tmp_path, retriever))
