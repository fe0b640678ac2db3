"""The search server: every dialect, every bad request, and what it tells about itself."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from srl.errors import UserError
from srl.index import Index, build_index, open_index
from srl.serve.server import bind, create_app, url_of
from srl.serve.wire import Limits
from srl.trajectory import Hit, Passage

PASSAGES = [Passage(f"p{row}", f'"Title {row}"\nfox number {row} "é" </answer>') for row in range(6)]


class Client:
    """Requests to an app, without a socket."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    def request(self, method: str, path: str, **content: object) -> httpx.Response:
        async def once() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **content)

        return asyncio.run(once())

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, **content: object) -> httpx.Response:
        return self.request("POST", path, **content)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory: Path = tmp_path_factory.mktemp("index") / "i"
    build_index(PASSAGES, directory)
    return open_index(directory)


@pytest.fixture
def client(index: Index) -> Client:
    return Client(
        create_app(
            index, topk=2, limits=Limits(queries=3, query_chars=20, topk=5, body_bytes=2000), threads=1
        )
    )


def result(client: Client, **body: object) -> list:
    response = client.post("/retrieve", json=body)
    assert response.status_code == 200, response.text
    return response.json()["result"]


def test_hits_come_with_scores_when_asked_for(client, index):
    (hits, none) = result(client, queries=["fox 3", "unicorn"], topk=2, return_scores=True)
    assert none == []
    expected = index.search(["fox 3"], 2)[0]
    assert hits == [
        {"document": {"id": hit.passage.id, "contents": hit.passage.contents}, "score": hit.score}
        for hit in expected
    ]


@pytest.mark.parametrize("extra", [{}, {"return_scores": False}, {"return_scores": None}])
def test_documents_come_bare_by_default(client, extra):
    (hits,) = result(client, queries=["fox 3"], topk=1, **extra)
    assert hits == [{"id": "p3", "contents": PASSAGES[3].contents}]


def test_one_query_is_answered_nested_too(client):
    assert result(client, query="fox 3", topk=1) == result(client, queries=["fox 3"], topk=1)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"topk": 3}, 3),
        ({"top_k": 3}, 3),
        ({"k": 3}, 3),
        ({"topk_retrieval": 4, "topk_rerank": 3}, 3),
        ({"topk_retrieval": 3}, 3),
        ({}, 2),
        ({"topk": None}, 2),
        ({"topk": 3.0}, 3),
        ({"topk": None, "k": 3}, 3),
    ],
)
def test_k_has_many_names_and_a_default(client, asked, found):
    assert len(result(client, queries=["fox"], **asked)[0]) == found


def test_no_queries_and_empty_queries_are_answered(client):
    assert result(client, queries=[]) == []
    assert result(client, queries=["", "fox 1"], topk=1)[0] == []


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"\xff\xfe", 400, "not JSON"),
        (b"[" * 1500, 400, "not JSON"),
        (b"[]", 422, "must be a JSON object"),
        (b"{}", 422, "give either queries"),
        (b'{"queries": ["a"], "query": "b"}', 422, "give either queries"),
        (b'{"queries": "fox"}', 422, "must be a list of texts"),
        (b'{"queries": [1]}', 422, "must be a list of texts"),
        (b'{"query": ["fox"]}', 422, "query one text"),
        (b'{"query": "fox", "topk": 0}', 422, "from 1 to 5, not 0"),
        (b'{"query": "fox", "k": 6}', 422, "k must be a whole number from 1 to 5, not 6"),
        (b'{"query": "fox", "topk": "3"}', 422, "not '3'"),
        (b'{"query": "fox", "topk": true}', 422, "not True"),
        (b'{"query": "fox", "topk": 2.5}', 422, "not 2.5"),
        (b'{"query": "fox", "topk": -1}', 422, "not -1"),
        (b'{"query": "fox", "topk": 1000000000}', 422, "from 1 to 5, not 1000000000"),
        (b'{"query": "fox", "topk": 1e999}', 422, "not inf"),
        (b'{"query": "fox", "topk": NaN}', 400, "not JSON"),
        (b'{"query": "fox", "topk": 2, "k": "x"}', 422, "k must be a whole number from 1 to 5, not 'x'"),
        (b'{"query": null}', 422, "query one text"),
        (b'{"query": "fox", "index": 3}', 422, "index must be the name of an index, not 3"),
        (b'{"query": "fox", "index": "b"}', 404, "no index 'b'; available: default"),
        ('{"query": "fox"}'.encode("utf-16"), 400, "not JSON"),
        (b'{"query": "fox"} {}', 400, "not JSON"),
        (b'{"query": "fox", "return_scores": "yes"}', 422, "return_scores must be true or false"),
        (b'{"queries": ["a", "b", "c", "d"]}', 413, "4 queries; at most 3"),
        (b'{"query": "%s"}' % (b"x" * 21), 413, "21 characters; at most 20"),
        (b'{"query": "%s"}' % (b"x" * 2000), 413, "larger than 2,000 bytes"),
    ],
)
def test_a_bad_request_gets_one_line(client, body, status, message):
    response = client.post("/retrieve", content=body)
    assert response.status_code == status
    detail = response.json()["detail"]
    assert message in detail
    assert "\n" not in detail


def test_every_answer_names_the_index(client, index):
    for response in (client.post("/retrieve", json={"query": "fox"}), client.post("/retrieve", content=b"{")):
        assert response.headers["X-Index-Digest"] == index.digest


@pytest.mark.parametrize("page", ["/health", "/healthz"])
def test_health_names_index_and_versions(client, index, page):
    response = client.get(page)
    assert response.headers["X-Index-Digest"] == index.digest
    health = response.json()
    assert health["status"] == "ok"
    assert health["index_digest"] == index.digest
    assert (health["retriever"], health["passages"]) == ("bm25", 6)
    assert set(health) >= {"version", "corpus_digest", "options"}


def test_metrics_count_requests_queries_and_errors(client):
    result(client, queries=["fox", "3"])
    client.post("/retrieve", content=b"{")
    text = client.get("/metrics").text
    assert 'srl_search_requests_total{index="default",status="200"} 1.0' in text
    assert 'srl_search_requests_total{index="default",status="400"} 1.0' in text
    assert 'srl_search_queries_total{index="default"} 2.0' in text
    assert 'srl_search_errors_total{index="default"} 1.0' in text
    assert 'srl_search_request_seconds_count{index="default"} 2.0' in text
    for phase in ("queue", "embed", "search"):
        assert f'srl_search_{phase}_seconds_count{{index="default"}} 1.0' in text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(len(line.rsplit(" ", 1)) == 2 and float(line.rsplit(" ", 1)[1]) >= 0 for line in lines)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/", 404), ("GET", "/retrieve", 405)])
def test_a_wrong_address_says_what_there_is(client, method, path, status):
    response = client.request(method, path)
    assert response.status_code == status
    assert "POST /retrieve" in response.json()["detail"]


class Fragile:
    """A retriever that fails when asked for `boom`."""

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        if "boom" in queries:
            raise RuntimeError("no such page\nand more")
        return [[Hit(Passage(query, query), 1.0)] for query in queries]


def test_a_search_that_fails_is_a_502_and_the_server_goes_on(index, caplog):
    client = Client(create_app(Index(index.directory, index.manifest, Fragile())))
    response = client.post("/retrieve", json={"query": "boom"})
    assert response.status_code == 502
    assert response.json()["detail"] == "the search failed: RuntimeError: no such page"
    assert "RuntimeError: no such page" in caplog.text
    response = client.post("/retrieve", json={"queries": ["boom", "fox"]})
    assert response.status_code == 502
    assert response.json()["detail"] == "1 of 2 searches failed: RuntimeError: no such page"
    assert result(client, query="fox")[0][0]["id"] == "fox"


class Malformed:
    """A retriever whose hits for `boom` are none that can be written."""

    def __init__(self, hit: object) -> None:
        self.hit = hit

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        return [[self.hit if query == "boom" else Hit(Passage(query, query), 1.0)] for query in queries]  # type: ignore[list-item]


@pytest.mark.parametrize("hit", [Hit(Passage(7, "x"), 1.0), Hit(Passage("x", "x"), None), None])  # type: ignore[arg-type]
def test_hits_that_cannot_be_written_are_a_502_and_the_server_goes_on(index, caplog, hit):
    client = Client(create_app(Index(index.directory, index.manifest, Malformed(hit)), threads=1))
    for _ in range(2):
        response = client.post("/retrieve", json={"query": "boom"})
        assert response.status_code == 502
        assert "the search failed: the retriever returned no hits that can be written (" in response.text
    assert "the hits of a search cannot be written" in caplog.text
    assert result(client, query="fox")[0][0]["id"] == "fox"


def test_a_busy_port_is_one_line():
    with bind(port=0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert url_of(taken) == f"http://127.0.0.1:{port}/retrieve"
        with pytest.raises(
            UserError, match=rf"cannot listen on 127.0.0.1:{port}: .*in use; choose another --port"
        ):
            bind(port=port)


def test_an_unknown_host_is_one_line(monkeypatch):
    def unknown(*args: object, **options: object) -> list:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"no host 'elsewhere' to listen on"):
        bind("elsewhere", 0)


def test_answers_are_json_whatever_the_text(client):
    body = json.dumps({"query": "fox \ud83d\ude00 ü\u2028"})
    assert client.post("/retrieve", content=body.encode()).status_code == 200
    assert client.post("/retrieve", content=b'{"query": "fox \\ud800"}').status_code == 200
