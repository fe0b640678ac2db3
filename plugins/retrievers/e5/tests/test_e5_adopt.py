"""Foreign index files are looked at before they are taken, and damaged ones of our own are noticed."""

from __future__ import annotations

import os
from pathlib import Path

import faiss
import pytest

from srl.errors import UserError
from srl.index import build_index, import_index, open_index
from srl.trajectory import Passage
from srl_e5.options import Options
from srl_e5.retriever import DenseRetriever


def build(out: Path, corpus: list[Passage], encoder: Path, **options: object) -> None:
    build_index(corpus, out, "e5", {"model": str(encoder), **options})


@pytest.fixture
def published(encoder, corpus, tmp_path) -> Path:
    """A faiss file as another program publishes it."""
    build(tmp_path / "theirs", corpus, encoder)
    return (tmp_path / "theirs" / "e5" / "index.faiss").rename(tmp_path / "e5_Flat.index")


def adopt(source: Path, out: Path, corpus: list[Passage], encoder: Path, **options: object) -> None:
    import_index(source, out, "e5", {"model": str(encoder), **options}, iter(corpus))


def test_a_foreign_index_is_linked_and_searched_like_ones_own(encoder, corpus, tmp_path, published):
    build(tmp_path / "own", corpus, encoder)
    adopt(published, tmp_path / "index", corpus, encoder)
    adopted, own = open_index(tmp_path / "index"), open_index(tmp_path / "own")
    assert (tmp_path / "index" / "e5" / "index.faiss").samefile(published)
    assert adopted.search(["red fox", "sea"], 5) == own.search(["red fox", "sea"], 5)
    assert adopted.digest == own.digest


def test_a_flat_index_is_searched_with_other_options_without_embedding_again(
    encoder, corpus, tmp_path, embedded
):
    build(tmp_path / "index", corpus, encoder, index="HNSW8")
    embedded.clear()
    adopt(tmp_path / "index/e5/index.faiss", tmp_path / "other", corpus, encoder, index="HNSW8", ef_search=9)
    assert len(embedded) == 16  # those compared
    assert open_index(tmp_path / "other").digest != open_index(tmp_path / "index").digest


def test_an_index_of_another_corpus_order_model_or_prefix_is_noticed(
    encoder, another, corpus, tmp_path, published
):
    for passages, model, options in (
        (corpus[:59], encoder, {}),
        (corpus[::-1], encoder, {}),
        (corpus, another, {}),
        (corpus, encoder, {"pooling": "cls"}),
    ):
        with pytest.raises(UserError, match=r"59 passages|median cosine"):
            adopt(published, tmp_path / "index", passages, model, **options)
    assert not (tmp_path / "index").exists()


def test_an_index_of_other_width_is_refused(make_encoder, corpus, tmp_path, published):
    with pytest.raises(UserError, match=r"vectors of dimension 32, those of .* have 64"):
        adopt(published, tmp_path / "index", corpus, make_encoder("wide-e5", width=64))


@pytest.mark.parametrize("size", [0, 3, 45, 2000])
def test_a_truncated_index_is_one_line(encoder, corpus, tmp_path, published, size):
    os.truncate(published, size)
    with pytest.raises(UserError, match="not a complete faiss index") as caught:
        adopt(published, tmp_path / "index", corpus, encoder)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_one_line(encoder, corpus, tmp_path):
    (tmp_path / "page.index").write_text("<html>404 Not Found</html>" * 99)
    with pytest.raises(UserError, match="not a complete faiss index") as caught:
        adopt(tmp_path / "page.index", tmp_path / "index", corpus, encoder)
    assert "\n" not in str(caught.value)


def test_a_graph_is_not_taken_for_a_flat_index(encoder, corpus, tmp_path):
    build(tmp_path / "theirs", corpus, encoder, index="HNSW8")
    with pytest.raises(UserError, match="IndexHNSWFlat, index=Flat stands for IndexFlat"):
        adopt(tmp_path / "theirs/e5/index.faiss", tmp_path / "index", corpus, encoder)


def test_an_index_of_distances_is_refused(encoder, corpus, tmp_path, published):
    index = faiss.IndexFlatL2(32)
    index.add(faiss.read_index(str(published)).reconstruct_n(0, 60))
    faiss.write_index(index, str(tmp_path / "l2.index"))
    with pytest.raises(UserError, match="made for inner products"):
        adopt(tmp_path / "l2.index", tmp_path / "index", corpus, encoder)


def test_a_damaged_index_of_ones_own_is_one_line(encoder, corpus, tmp_path):
    DenseRetriever(Options(model=str(encoder))).build(corpus, tmp_path, lambda done: None)
    os.truncate(tmp_path / "e5" / "index.faiss", 100)
    with pytest.raises(UserError, match="not a complete faiss index"):
        DenseRetriever().open(tmp_path)
    (tmp_path / "e5" / "e5.json").write_text("{}")
    with pytest.raises(UserError, match=r"e5\.json"):
        DenseRetriever().open(tmp_path)
    (tmp_path / "e5" / "e5.json").unlink()
    with pytest.raises(UserError, match="copy or build it again"):
        DenseRetriever().open(tmp_path)
