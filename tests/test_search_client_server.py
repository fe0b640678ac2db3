"""The search client against a real server: what it finds is what is found in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.live_server import running
from tests.search_sites import ask

from srl.index import Index, build_index, open_index
from srl.serve import HttpSearch, LocalSearch
from srl.serve.server import create_app
from srl.trajectory import Passage


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory: Path = tmp_path_factory.mktemp("index") / "i"
    texts = ["the red fox", "a red dog", "fox and fox", "Žluťoučký kůň </answer>", "red red wine"]
    build_index([Passage(f"p{row}", f'"T{row}"\n{text}') for row, text in enumerate(texts)], directory)
    return open_index(directory)


def test_in_process_and_over_http_find_the_same(index):
    odd = ["red", "fox", "red fox", "unicorn", "", "x" * 2000, "kun", "a \ud800 fox"]
    queries = [*odd, *(f"dog {n}" for n in range(99))]
    here = ask(LocalSearch(index, 3), *queries)
    with running(create_app(index)) as url:
        there = ask(HttpSearch(url, 3), *queries)
    outcomes = [[(each.query, each.status, each.hits) for each in found] for found in (here, there)]
    assert outcomes[0] == outcomes[1]
    assert [each.status for each in here[:8]] == ["ok"] * 3 + ["empty"] + ["rejected"] * 2 + ["ok"] * 2
    assert there[0].index_digest == here[0].index_digest == index.digest
