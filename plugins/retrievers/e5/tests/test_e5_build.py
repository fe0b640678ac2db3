"""Embedding goes on where it was killed, the index is the one asked for, and foreign files are looked at."""

from pathlib import Path

import faiss
import numpy as np
import pytest

from srl.errors import UserError
from srl.index import build_index, import_index, open_index
from srl.trajectory import Passage
from srl_e5 import embeddings
from srl_e5.embeddings import Embeddings

SHARD = 7


class Killed(BaseException):
    """Ends a build as ctrl-C does."""


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(embeddings, "SHARD", SHARD)


def build(out: Path, corpus: list[Passage], encoder: Path, **options: object) -> list[int]:
    """Build an index at `out`; the counts that progress was told while embedding."""
    counts: list[int] = []

    def told(stage: str, done: int, total: int | None) -> None:
        counts.extend([done] if stage == "indexing" else [])

    build_index(corpus, out, "e5", {"model": str(encoder), **options}, told)
    return counts


def vectors(out: Path) -> np.ndarray:
    index = faiss.read_index(str(out / "e5" / "index.faiss"))
    return index.reconstruct_n(0, index.ntotal)


def killed_at(monkeypatch, where: object, name: str, after: int, *build_args, **options) -> None:
    """A build that dies at call number `after` of `where.name`."""
    calls, working = iter(range(after)), getattr(where, name)

    def call(*given, **named):
        if next(calls, None) is None:
            raise Killed
        return working(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, call)
        with pytest.raises(Killed):
            build(*build_args, **options)


def test_equal_texts_have_equal_vectors_and_are_embedded_once(encoder, corpus, tmp_path, embedded):
    texts = [passage.contents for passage in corpus[:20]] + [
        corpus[row].contents for row in (3, 3, 19, 0)
    ] * 3
    build(tmp_path / "index", [Passage(str(row), text) for row, text in enumerate(texts)], encoder)
    made = vectors(tmp_path / "index")
    assert sorted(embedded) == sorted(set(texts))
    for row, text in enumerate(texts):
        assert (made[row] == made[texts.index(text)]).all()


@pytest.mark.parametrize("after", [0, 1, 4, 8])
@pytest.mark.parametrize("spec", ["Flat", "HNSW8"])
def test_a_killed_build_goes_on_after_the_last_shard(
    encoder, corpus, tmp_path, monkeypatch, embedded, spec, after
):
    build(tmp_path / "whole", corpus, encoder, index=spec)
    out = tmp_path / "index"
    killed_at(monkeypatch, Embeddings, "append", after, out, corpus, encoder, index=spec)
    assert not out.exists()
    embedded.clear()
    counts = build(out, corpus, encoder, index=spec)
    assert embedded == [passage.contents for passage in corpus[SHARD * after :]]
    assert counts[0] == SHARD * after
    assert (vectors(out) == vectors(tmp_path / "whole")).all()


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


def test_an_index_of_another_corpus_model_prefix_width_type_or_metric_is_refused(
    encoder, another, make_encoder, corpus, tmp_path, published
):
    l2 = faiss.IndexFlatL2(32)
    l2.add(faiss.read_index(str(published)).reconstruct_n(0, 60))
    faiss.write_index(l2, str(tmp_path / "l2.index"))
    (tmp_path / "page.index").write_text("<html>404 Not Found</html>" * 99)
    for source, passages, model, options in (
        (published, corpus[:59], encoder, {}),
        (published, corpus[::-1], encoder, {}),
        (published, corpus, another, {}),
        (published, corpus, encoder, {"pooling": "cls"}),
        (published, corpus, make_encoder("wide-e5", width=64), {}),
        (published, corpus, encoder, {"index": "HNSW8"}),
        (tmp_path / "l2.index", corpus, encoder, {}),
        (tmp_path / "page.index", corpus, encoder, {}),
    ):
        with pytest.raises(UserError):
            adopt(source, tmp_path / "index", passages, model, **options)
    assert not (tmp_path / "index").exists()
