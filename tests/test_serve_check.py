"""`srl serve check`: whether episodes can be answered by a server."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from srl.errors import UserError
from srl.index import build_index, open_index
from srl.serve.check import check_server
from srl.serve.server import create_app
from srl.trajectory import Passage

URL = "http://127.0.0.1:8000"


def search_r1(change: Callable[[list[list[dict]]], Any]) -> httpx.MockTransport:
    """Search-R1's own server, which has no health page, but for a change of its results."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method != "POST":
            return httpx.Response(404)
        hits = [{"document": {"id": str(n), "contents": f'"t"\n{n}'}, "score": 9.0 - n} for n in range(3)]
        queries = json.loads(request.content)["queries"]
        return httpx.Response(200, json={"result": change([list(hits) for _ in queries])})

    return httpx.MockTransport(answer)


def test_our_own_server_serves_episodes_with_its_token_and_search_r1s_does(tmp_path, monkeypatch):
    build_index([Passage(str(row), f"red fox {row}") for row in range(5)], tmp_path / "i")

    def app(**options: str) -> httpx.ASGITransport:
        return httpx.ASGITransport(create_app(open_index(tmp_path / "i"), **options))

    report = check_server(URL, ["red fox", "fox"], transport=app())
    assert (report.problems, report.index_digest) == ((), open_index(tmp_path / "i").digest)
    with pytest.raises(UserError, match="SRL_SEARCH_TOKEN"):
        check_server(URL, ["red fox"], transport=app(token="s3cret"))
    monkeypatch.setenv("SRL_SEARCH_TOKEN", "s3cret")
    assert check_server(URL, ["red fox"], transport=app(token="s3cret")).problems == ()
    assert check_server(URL, ["a", "b"], transport=search_r1(lambda result: result)).problems == ()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda result: [hits[::-1] for hits in result],
        lambda result: [hits[: len(result)] for hits in result],
        lambda result: [[hit | {"score": hit["score"] + len(result)} for hit in hits] for hits in result],
    ],
    ids=["disorder", "few alone", "other scores alone"],
)
def test_hits_that_episodes_would_trip_over_are_named(wrong):
    problems = check_server(URL, ["a", "b"], transport=search_r1(wrong)).problems
    assert len(problems) == 2
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize("wrong", [lambda result: None, lambda result: [[] for _ in result]])
def test_a_server_without_searches_and_queries_without_hits_are_user_errors(wrong):
    with pytest.raises(UserError):
        check_server(URL, ["a", "b"], transport=search_r1(wrong))


def test_a_query_that_is_not_sent_is_named():
    assert check_server(URL, ["a", " "], transport=search_r1(lambda result: result)).problems
