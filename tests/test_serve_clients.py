"""Other projects' clients, unchanged: what they send is written out here, and so is what they read."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import requests
from tests.live_server import running

from srl.index import build_index, open_index
from srl.serve.server import create_app
from srl.trajectory import Passage

PASSAGES = [
    Passage("11", '"Charles Darwin"\nDarwin wrote On the Origin of Species.\nIt came out in 1859.'),
    Passage("12", '"Origin"\nThe origin of coordinates.'),
    Passage("http://wiki/Fox", '"Fox"\nA fox is no species of dog.'),
]
SPECIES = "who wrote the origin of species"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory: Path = tmp_path_factory.mktemp("clients") / "i"
    build_index(PASSAGES, directory)
    with running(create_app(open_index(directory))) as url:
        yield url


def titled(documents: list[dict], form: str) -> str:
    """Documents as Search-R1 and verl put them before the model: the title is the first line."""
    parts = [document["document"]["contents"].split("\n", 1) for document in documents]
    return "".join(form.format(rank, *part) for rank, part in enumerate(parts, start=1))


def test_search_r1_reads_its_batch(url):
    """Its generation loop: one list of all queries of a turn, scores, and no look at the status."""
    sent = {"queries": [SPECIES, "fox"], "topk": 3, "return_scores": True}
    result = requests.post(url, json=sent).json()["result"]
    assert len(result) == 2
    assert titled(result[0], "Doc {}(Title: {}) {}\n").startswith(
        'Doc 1(Title: "Charles Darwin") Darwin wrote On the Origin of Species.\nIt came out in 1859.\n'
    )


@pytest.mark.parametrize(
    ("queries", "counts"), [([], []), ([""], [0]), (["", SPECIES, "  "], [0, 3, 0]), (["no such words"], [0])]
)
def test_search_r1_survives_what_its_models_write(url, queries, counts):
    """It sends empty lists and empty queries, and one answer without `result` would end its run."""
    answer = requests.post(url, json={"queries": queries, "topk": 3, "return_scores": True}).json()
    assert [len(hits) for hits in answer["result"]] == counts
    empty = [place for place, query in enumerate(queries) if not query.strip()]
    assert [error["query"] for error in answer.get("errors", [])] == empty


def test_skyrl_reads_its_single_query(url):
    """A pooled session, one query in the list; a 4xx is tried ten times, so there must be none."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    with requests.Session() as session:
        for query in (SPECIES, ""):
            sent = {"queries": [query], "topk": 3, "return_scores": True}
            response = session.post(url, headers=headers, json=sent, timeout=30)
            response.raise_for_status()
            read = [
                f"Doc {rank}: {item['document']['contents'].strip()}"
                for hits in response.json().get("result", [])
                for rank, item in enumerate(hits, start=1)
            ]
            assert len(read) == (3 if query else 0)


def test_verl_reads_its_query_list(url):
    """Its search tool retries 500, 502, 503 and 504 only, and reads nested contents."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    sent = {"queries": [SPECIES, "fox"], "topk": 2, "return_scores": True}
    response = requests.post(url, headers=headers, json=sent, timeout=30)
    response.raise_for_status()
    results = response.json().get("result", [])
    assert [len(hits) for hits in results] == [2, 1]
    assert titled(results[1], "Doc {} (Title: {})\n{}\n\n").strip() == (
        'Doc 1 (Title: "Fox")\nA fox is no species of dog.'
    )


def test_slime_reads_bare_documents(url):
    """It asks without scores and reads `contents` of the items of the first list."""
    sent = {"queries": [SPECIES], "topk": 5, "return_scores": False}
    response = requests.post(url, json=sent, timeout=60)
    response.raise_for_status()
    contents = [item.get("contents", "") for item in response.json().get("result", [[]])[0]]
    assert contents[0] == PASSAGES[0].contents
    assert len(contents) == 3


@pytest.mark.parametrize("more", [{}, {"description": "", "args": [], "kwargs": {}}])
def test_rllm_reads_flat_results(url, more):
    """Its tool asks /health first, sends one `query` with `top_k`, and reads scored `results`: flat ones
    now, and nested ones in earlier releases."""
    base = url.removesuffix("/retrieve")
    with httpx.Client(timeout=30, trust_env=False) as client:
        assert client.get(f"{base}/health").status_code == 200
        response = client.post(f"{base}/retrieve", json={"query": SPECIES, "top_k": 2, **more})
    assert response.is_success
    results = response.json().get("results", [])
    shown = [(item.get("id", ""), item.get("content", ""), item.get("score", 0.0)) for item in results]
    assert [(name, text) for name, text, _ in shown] == [(hit.id, hit.contents) for hit in PASSAGES[:2]]
    assert all(score > 0 for _, _, score in shown)
    earlier = [(item["document"]["id"], item["document"]["contents"], item["score"]) for item in results]
    assert earlier == shown


def test_asearcher_reads_documents_with_urls_and_pages(url):
    """It reads `contents` and `url` of bare documents, then asks /access for such a url."""
    base = url.removesuffix("/retrieve")
    sent = {"queries": ["fox"], "topk": 3, "return_scores": False}
    (found,) = requests.post(f"{base}/retrieve", json=sent, timeout=120).json()["result"]
    urls = [item["url"] for item in found]
    assert urls == ["http://wiki/Fox"]
    pages = requests.post(f"{base}/access", json={"urls": [*urls, "http://wiki/None"]}, timeout=120).json()
    assert pages["result"][0]["contents"] == PASSAGES[2].contents
    assert pages["result"][1] is None
