"""`srl serve check`: which dialects a server speaks, and whether episodes can be answered by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from srl.errors import UserError
from srl.index import build_index, open_index
from srl.serve.check import Finding, ServerCheck, check_server
from srl.serve.server import create_app
from srl.trajectory import Passage

URL = "http://127.0.0.1:8000"
ANSWER = "answers with documents and scores"


class InProcess(httpx.BaseTransport):
    """An app behind a synchronous client, without a socket."""

    def __init__(self, app: object) -> None:
        self.app = app

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def once() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app)) as client:  # type: ignore[arg-type]
                body, headers = request.read(), request.headers
                sent = await client.request(request.method, request.url, content=body, headers=headers)
                return httpx.Response(sent.status_code, headers=sent.headers, content=sent.content)

        return asyncio.run(once())


def check(handler: Callable[[httpx.Request], httpx.Response]) -> ServerCheck:
    return check_server(URL, ["red fox", "fox"], calls=2, transport=httpx.MockTransport(handler))


def found(report: ServerCheck, name: str) -> Finding:
    return next(finding for finding in report.findings if finding.name == name)


def documents(count: int) -> list[dict]:
    return [{"id": str(number), "contents": f'"t"\n{number}'} for number in range(count)]


def scored(count: int) -> list[dict]:
    return [{"document": document, "score": 9.0 - rank} for rank, document in enumerate(documents(count))]


def search_r1(request: httpx.Request) -> httpx.Response:
    """Search-R1's own server: `queries`, `topk` and scores, a crash without them, no health."""
    if request.method != "POST":
        return httpx.Response(404)
    body = json.loads(request.content)
    if not isinstance(body.get("queries"), list):
        return httpx.Response(422)
    if not body.get("return_scores"):
        return httpx.Response(500, text="too many values to unpack")
    return httpx.Response(200, json={"result": [scored(body.get("topk") or 3) for _ in body["queries"]]})


def test_our_own_server_speaks_every_dialect(tmp_path: Path):
    build_index([Passage(str(row), f"red fox {row}") for row in range(5)], tmp_path / "i")
    index = open_index(tmp_path / "i")
    report = check_server(URL, ["red fox", "fox"], transport=InProcess(create_app(index)))
    assert [finding.name for finding in report.findings if not finding.passed] == []
    assert len(report.findings) == 13
    assert report.conforms
    assert report.index_digest == index.digest
    assert len(report.latency_s) == 10


def test_a_server_that_asks_for_a_token_gets_it_or_is_said_to_ask(tmp_path: Path):
    build_index([Passage(str(row), f"red fox {row}") for row in range(5)], tmp_path / "i")
    served = InProcess(create_app(open_index(tmp_path / "i"), token="s3cret"))
    assert check_server(URL, ["red fox", "fox"], calls=1, transport=served, token="s3cret").conforms
    report = check_server(URL, ["red fox"], calls=1, transport=served)
    assert not report.conforms
    assert "export SRL_SEARCH_TOKEN" in found(report, ANSWER).detail


@pytest.mark.parametrize("path", ["/retrieve/i", "/behind/a/proxy/retrieve", "/search"])
def test_the_pages_beside_retrieve_are_found(path):
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return search_r1(request)

    check_server(URL + path, ["red fox", "fox"], calls=1, transport=httpx.MockTransport(answer))
    before = {"/retrieve/i": "", "/search": ""}.get(path, "/behind/a/proxy")
    assert {f"{before}/{page}" for page in ("health", "metrics", "access")} < set(asked)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/access", "/retrieve"])
def test_an_answer_without_an_end_is_a_fault_of_its_page(path):
    def endless():
        for _ in range(200):
            yield bytes(1 << 20)
        raise AssertionError("all was read")

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=endless()) if request.url.path == path else search_r1(request)

    report = check(answer)
    name = ANSWER if path == "/retrieve" else path
    assert found(report, name).passed is False
    assert report.conforms == (path != "/retrieve")


def test_search_r1s_server_conforms_and_its_gaps_are_named():
    report = check(search_r1)
    assert report.conforms
    assert report.index_digest == ""
    gaps = {finding.name for finding in report.findings if finding.passed is False}
    assert gaps == {
        "return_scores: false gives bare documents",
        "query: one text",
        "top_k",
        "k",
        "topk_retrieval, topk_rerank",
        "/health",
        "/metrics",
        "/access",
    }
    assert found(report, "k").detail == "3 hits, expected 1"
    assert "HTTP 500" in found(report, "return_scores: false gives bare documents").detail


@pytest.mark.parametrize(
    ("result", "name", "detail"),
    [
        ("<html>", ANSWER, "not JSON"),
        ([scored(2)], ANSWER, "1 lists for 2 queries"),
        ([documents(2), documents(2)], ANSWER, 'not {"document": …, "score": …}'),
        ([scored(2)[::-1], scored(2)], "orders hits by score", "scores out of order: [8.0, 9.0]"),
        ([scored(4), scored(2)], "orders hits by score", "4 hits, expected at most 3"),
        ([scored(2), scored(1)], "answers a query alone as in a batch", "in the batch"),
    ],
)
def test_a_server_that_answers_wrongly_does_not_conform(result, name, detail):
    def wrong(request: httpx.Request) -> httpx.Response:
        if result == "<html>":
            return httpx.Response(200, text=result)
        asked = json.loads(request.content or b"{}").get("queries")
        alone = asked == ["red fox"] or asked == ["fox"]
        return httpx.Response(200, json={"result": result[-1:] if alone else result})

    report = check(wrong)
    assert not report.conforms
    assert found(report, name).passed is False
    assert detail in found(report, name).detail


def test_texts_with_the_word_document_are_not_wrapped_documents():
    def texts(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.method == "POST" else {}
        if not isinstance(queries := body.get("queries"), list):
            return httpx.Response(422)
        if not body.get("return_scores"):
            found = ["a document", "another document"]
        else:
            found = [{"document": text, "score": 1.0} for text in ("a document", "another document")]
        return httpx.Response(200, json={"result": [found for _ in queries]})

    assert found(check(texts), "return_scores: false gives bare documents").passed


def test_a_server_that_finds_nothing_leaves_it_open():
    report = check(lambda request: httpx.Response(200, json={"result": [[], []]}))
    assert not report.conforms
    assert found(report, ANSWER).passed is None
    assert "--query" in found(report, ANSWER).detail


def test_one_hit_is_too_few_to_tell_whose_k_counts():
    def one_hit(request: httpx.Request) -> httpx.Response:
        queries = json.loads(request.content or b"{}").get("queries", [""])
        return httpx.Response(
            200, json={"result": [scored(1) for _ in queries]} if isinstance(queries, list) else 7
        )

    assert found(check(one_hit), "top_k").passed is None


def test_an_error_of_the_server_is_quoted():
    report = check(lambda request: httpx.Response(503, text="warming\nup"))
    assert "HTTP 503: warming up" in found(report, ANSWER).detail
    assert report.latency_s == []


def test_nobody_there_is_the_users_to_mend():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    with pytest.raises(UserError, match=r"no search server answers at .*: srl serve retriever"):
        check(refuse)
