"""`srl serve check`: which dialects a server speaks, and whether episodes can be answered by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from srl.index import build_index, open_index
from srl.serve.check import ServerCheck, check_server
from srl.serve.server import create_app
from srl.trajectory import Passage

URL = "http://127.0.0.1:8000"
REQUIRED = {
    "answers with documents and scores",
    "orders hits by score",
    "answers a query alone as in a batch",
}
Handler = Callable[[httpx.Request], httpx.Response]


def check(handler: Handler, url: str = URL, topk: int = 3) -> ServerCheck:
    return check_server(url, ["red fox", "fox"], topk, transport=httpx.MockTransport(handler))


def passed(report: ServerCheck) -> dict[str, bool | None]:
    return {finding.name: finding.passed for finding in report.findings}


def scored(count: int) -> list[dict[str, Any]]:
    documents = [{"id": str(number), "contents": f'"t"\n{number}'} for number in range(count)]
    return [{"document": document, "score": 9.0 - rank} for rank, document in enumerate(documents)]


def search_r1(request: httpx.Request) -> httpx.Response:
    """Search-R1's own server: `queries`, `topk` and scores, a crash without them, no health."""
    if request.method != "POST" or not request.url.path.endswith("/retrieve"):
        return httpx.Response(404)
    body = json.loads(request.content)
    if not isinstance(body.get("queries"), list):
        return httpx.Response(422)
    if not body.get("return_scores"):
        return httpx.Response(500, text="too many values to unpack")
    return httpx.Response(200, json={"result": [scored(body.get("topk") or 3) for _ in body["queries"]]})


def changed(change: Callable[[dict[str, Any], list[list[dict]]], Any]) -> Handler:
    """Search-R1's server, but for a change of the results, from the body of the request."""

    def answer(request: httpx.Request) -> httpx.Response:
        response = search_r1(request)
        if response.status_code != 200:
            return response
        result = response.json()["result"]
        return httpx.Response(200, json={"result": change(json.loads(request.content), result)})

    return answer


@pytest.fixture
def app(tmp_path: Path) -> Callable[..., httpx.ASGITransport]:
    build_index([Passage(str(row), f"red fox {row}") for row in range(5)], tmp_path / "i")
    return lambda **options: httpx.ASGITransport(create_app(open_index(tmp_path / "i"), **options))


def test_our_own_server_speaks_every_dialect(app, tmp_path):
    report = check_server(URL, ["red fox", "fox"], transport=app())
    assert set(passed(report).values()) == {True}
    assert len(report.findings) == 11
    assert (report.conforms, report.index_digest) == (True, open_index(tmp_path / "i").digest)


def test_the_token_is_sent(app, monkeypatch):
    report = check_server(URL, ["red fox"], transport=app(token="s3cret"))
    assert (report.conforms, "SRL_SEARCH_TOKEN" in report.findings[0].detail) == (False, True)
    monkeypatch.setenv("SRL_SEARCH_TOKEN", "s3cret")
    assert check_server(URL, ["red fox"], transport=app(token="s3cret")).conforms


def test_search_r1s_server_conforms_and_what_it_lacks_is_named():
    report = check(search_r1)
    assert report.conforms
    held = {name for name, holds in passed(report).items() if holds}
    assert held == REQUIRED | {"a bad request gets a 4xx"}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda body, result: [hits[::-1] for hits in result],
        lambda body, result: [[*hits, *hits] for hits in result],
        lambda body, result: [hits[: len(result)] for hits in result],
        lambda body, result: [
            [hit | {"score": hit["score"] + len(result)} for hit in hits] for hits in result
        ],
        lambda body, result: [[hit["document"] for hit in hits] for hits in result],
        lambda body, result: result[:1],
        lambda body, result: [[hit | {"score": "high"} for hit in hits] for hits in result],
        lambda body, result: None,
    ],
    ids=["disorder", "too-many", "few-in-a-batch", "other-scores", "bare", "too-few-lists", "text", "null"],
)
def test_what_episodes_would_trip_over_does_not_conform(wrong):
    report = check(changed(wrong))
    assert not report.conforms
    assert all("\n" not in finding.detail for finding in report.findings)


def test_a_tiny_corpus_fails_nothing_that_its_few_hits_leave_open(app, tmp_path):
    build_index([Passage("only", "a red thing")], tmp_path / "i", overwrite=True)
    report = check_server(URL, ["blue", "red"], transport=app())
    assert report.conforms
    undecided = {"orders hits by score", "top_k", "k", "topk_retrieval, topk_rerank"}
    assert {name for name, holds in passed(report).items() if holds is None} == undecided
    assert not [name for name, holds in passed(report).items() if holds is False]
    assert check_server(URL, ["blue"], transport=app()).conforms is None
