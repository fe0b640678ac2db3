"""Embedding goes on where it was killed, the index is the one asked for, and foreign files are looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

from srl.errors import UserError
from srl.index import build_index, import_index, open_index
from srl.trajectory import Passage
from srl_e5 import embeddings
from srl_e5.embeddings import Embeddings
from srl_e5.encoder import Encoder
from srl_e5.model_settings import Settings
from srl_e5.options import Options
from srl_e5.retriever import DenseRetriever

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


def test_an_index_is_faisss_file_of_each_passages_vector_and_nothing_else_is_left(encoder, corpus, tmp_path):
    build(tmp_path / "index", corpus, encoder)
    one_by_one = Encoder(encoder, Settings("query: ", "passage: ", "mean", True), batch_size=1)
    expected = one_by_one.passages([passage.contents for passage in corpus])
    assert vectors(tmp_path / "index") == pytest.approx(expected, abs=2e-6)
    assert sorted(os.listdir(tmp_path / "index" / "e5")) == ["e5.json", "index.faiss"]


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


def test_a_build_killed_while_faiss_writes_goes_on_without_embedding(
    encoder, corpus, tmp_path, monkeypatch, embedded
):
    killed_at(monkeypatch, faiss, "write_index", 0, tmp_path / "index", corpus, encoder)
    embedded.clear()
    build(tmp_path / "index", corpus, encoder)
    assert (embedded, len(vectors(tmp_path / "index"))) == ([], 60)


@pytest.mark.parametrize("cut", [1, 4 * 32, 300])
def test_vectors_that_a_full_disk_cut_short_are_made_again(encoder, corpus, tmp_path, monkeypatch, cut):
    build(tmp_path / "whole", corpus, encoder)
    killed_at(monkeypatch, Embeddings, "append", 3, tmp_path / "index", corpus, encoder)
    file = tmp_path / "index.building" / "e5" / "embeddings.f32"
    os.truncate(file, file.stat().st_size - cut)
    build(tmp_path / "index", corpus, encoder)
    assert vectors(tmp_path / "index") == pytest.approx(vectors(tmp_path / "whole"), abs=2e-6)


def test_what_another_encoder_began_is_not_continued(encoder, another, corpus, tmp_path, monkeypatch):
    killed_at(monkeypatch, Embeddings, "append", 2, tmp_path / "index", corpus, encoder)
    with pytest.raises(UserError, match=r"index\.building"):
        build(tmp_path / "index", corpus, another, query_prefix="query: ", passage_prefix="passage: ")


def test_progress_grows_with_the_tokens_and_never_falls(encoder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(embeddings, "SHARD", 60)
    counts = build(tmp_path / "index", corpus, encoder, batch_size=20)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 60)
    assert counts[1] > 20  # the 20 longest of 60 passages hold more than a third of the tokens


@pytest.mark.parametrize("spec", ["HNSW8", "IVF4,Flat", "IVF4,PQ8x4", "PQ8x4", "SQfp16", "PCA16,IVF4,Flat"])
def test_factory_strings_make_the_index_that_faiss_calls_so(encoder, corpus, tmp_path, spec):
    build(tmp_path / "index", corpus, encoder, index=spec, nprobe=4)
    index = faiss.read_index(str(tmp_path / "index" / "e5" / "index.faiss"))
    assert type(index) is type(faiss.index_factory(32, spec, faiss.METRIC_INNER_PRODUCT))
    assert index.metric_type == faiss.METRIC_INNER_PRODUCT
    for hits in open_index(tmp_path / "index").search([passage.contents for passage in corpus[:5]], 10):
        assert len({hit.passage.id for hit in hits}) == len(hits) == 10
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_training_repeats(encoder, corpus, tmp_path):
    files = [tmp_path / name / "e5" / "index.faiss" for name in ("one", "two")]
    for file in files:
        build(file.parents[1], corpus, encoder, index="IVF4,Flat")
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("spec", ["HNWS64", "PQ7", "IVF4096,Flat"])
def test_an_index_that_cannot_be_is_refused_before_anything_is_embedded(
    encoder, corpus, tmp_path, embedded, spec
):
    with pytest.raises(UserError) as caught:
        build(tmp_path / "index", corpus, encoder, index=spec)
    assert caught.value.key == "retriever.e5.index"
    assert "\n" not in str(caught.value)
    assert embedded == []


def test_too_few_passages_to_train_on_and_a_full_disk_are_one_line(
    encoder, corpus, tmp_path, embedded, monkeypatch
):
    with pytest.raises(UserError) as caught:
        build(tmp_path / "index", corpus, encoder, index="PQ8")
    assert "\n" not in str(caught.value)
    embedded.clear()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Disk)
    with pytest.raises(UserError, match="GB of disk"):
        build(tmp_path / "other", corpus, encoder)
    assert embedded == []


class Disk:
    free = 2 * 60 * 32 * 4 - 1  # a byte less than the vectors and the index need


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


def test_an_index_is_searched_with_other_options_without_embedding_again(encoder, corpus, tmp_path, embedded):
    build(tmp_path / "index", corpus, encoder, index="HNSW8")
    embedded.clear()
    file = tmp_path / "index/e5/index.faiss"
    adopt(file, tmp_path / "other", corpus, encoder, index="HNSW8", ef_search=9)
    assert len(embedded) == 16  # those compared
    assert open_index(tmp_path / "other").digest != open_index(tmp_path / "index").digest


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
        with pytest.raises(UserError) as caught:
            adopt(source, tmp_path / "index", passages, model, **options)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("size", [0, 3, 45, 2000])
def test_a_truncated_file_is_one_line(encoder, corpus, tmp_path, published, size):
    os.truncate(published, size)
    with pytest.raises(UserError) as caught:
        adopt(published, tmp_path / "index", corpus, encoder)
    assert "\n" not in str(caught.value)
    DenseRetriever(Options(model=str(encoder))).build(corpus, tmp_path, lambda done: None)
    os.truncate(tmp_path / "e5" / "index.faiss", size)
    with pytest.raises(UserError):
        DenseRetriever().open(tmp_path)


CHILD = """
import sys
from pathlib import Path
from srl.index import build_index
from srl.trajectory import Passage
from srl_e5 import embeddings
embeddings.SHARD = 10
corpus = [Passage(str(row), f"passage {row} red fox " + "sea " * (row % 9)) for row in range(400)]
tell = lambda stage, done, total: print(stage, done, flush=True)
build_index(corpus, Path(sys.argv[1]), "e5", {"model": sys.argv[2], "batch_size": 5}, tell)
"""


@pytest.mark.slow
@pytest.mark.must_run
def test_sigkill_at_any_line_of_progress_loses_no_finished_shard(encoder, tmp_path):
    command, saved = [sys.executable, "-c", CHILD, tmp_path / "index", encoder], 0
    file = Embeddings(tmp_path / "index.building" / "e5" / "embeddings.f32", 32)
    for lines in (0, 7, 30):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            counts = (int(line.split()[1]) for line in child.stdout if line.startswith("indexing"))
            assert next(counts) == saved
            for _ in range(lines):
                last = next(counts)
            child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        assert not (tmp_path / "index").exists()
        assert len(file) >= ((last - 1) // 10 * 10 if lines else 0)
        saved = len(file)
    assert 0 < saved < 400
    subprocess.run(command, capture_output=True, check=True)
    command[3] = tmp_path / "whole"
    subprocess.run(command, capture_output=True, check=True)
    assert (vectors(tmp_path / "index") == vectors(tmp_path / "whole")).all()
