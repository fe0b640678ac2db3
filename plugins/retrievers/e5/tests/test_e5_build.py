"""Embedding goes on where it was killed, the index is the one asked for, and foreign files are looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import faiss
import numpy as np
import pytest

from srl.errors import UserError
from srl.index import build_index, open_index
from srl.trajectory import Passage
from srl_e5 import faiss_index
from srl_e5.embedding_files import Shards
from srl_e5.encoder import Encoder
from srl_e5.model_settings import Settings
from srl_e5.options import Options
from srl_e5.retriever import DenseRetriever


class Killed(BaseException):
    """Ends a build as ctrl-C does."""


def build(out: Path, corpus: list[Passage], encoder: Path, **options: object) -> list[int]:
    """Build an index at `out`; the counts that progress was told while embedding."""
    counts: list[int] = []

    def told(stage: str, done: int, total: int | None) -> None:
        counts.extend([done] if stage == "indexing" else [])

    build_index(corpus, out, "e5", {"model": str(encoder), "shard_size": 7, **options}, told)
    return counts


def vectors(out: Path) -> np.ndarray:
    index = faiss.read_index(str(out / "e5" / "index.faiss"))
    return index.reconstruct_n(0, index.ntotal)


@contextmanager
def dying(
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    name: str,
    after: int,
    counts: Callable[..., bool] = lambda *given: True,
) -> Iterator[None]:
    """Calls of `where.name` that count work `after` times; the next one kills."""
    calls, working = iter(range(after)), getattr(where, name)

    def call(*given, **named):
        if counts(*given) and next(calls, None) is None:
            raise Killed
        return working(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(where, name, call)
        yield


def test_a_flat_index_holds_each_passages_vector_in_the_order_of_the_corpus(encoder, corpus, tmp_path):
    build(tmp_path / "index", corpus, encoder)
    one_by_one = Encoder(encoder, Settings("query: ", "passage: ", "mean", True), batch_size=1)
    expected = one_by_one.passages([passage.contents for passage in corpus])
    assert vectors(tmp_path / "index") == pytest.approx(expected, abs=2e-6)


def test_a_flat_index_is_the_file_that_faiss_would_write(encoder, corpus, tmp_path):
    build(tmp_path / "index", corpus, encoder)
    whole = faiss.IndexFlatIP(32)
    whole.add(vectors(tmp_path / "index"))
    faiss.write_index(whole, str(tmp_path / "whole.faiss"))
    written = (tmp_path / "index" / "e5" / "index.faiss").read_bytes()
    assert written == (tmp_path / "whole.faiss").read_bytes()


def test_only_the_index_is_left_at_the_end(encoder, corpus, tmp_path):
    for spec in ("Flat", "HNSW8"):
        build(tmp_path / spec, corpus, encoder, index=spec)
        assert sorted(os.listdir(tmp_path / spec / "e5")) == ["e5.json", "index.faiss"]


@pytest.mark.parametrize("after", [0, 1, 4, 8])
@pytest.mark.parametrize("spec", ["Flat", "HNSW8"])
def test_a_killed_build_goes_on_after_the_last_shard(
    encoder, corpus, tmp_path, monkeypatch, embedded, spec, after
):
    build(tmp_path / "whole", corpus, encoder, index=spec)
    out = tmp_path / "index"
    with pytest.raises(Killed), dying(monkeypatch, Shards, "save", after):
        build(out, corpus, encoder, index=spec)
    assert not out.exists()
    embedded.clear()
    counts = build(out, corpus, encoder, index=spec)
    assert embedded == [passage.contents for passage in corpus[7 * after :]]
    assert counts[0] == 7 * after
    assert (vectors(out) == vectors(tmp_path / "whole")).all()


@pytest.mark.parametrize("after", range(0, 9, 2))
@pytest.mark.parametrize("moment", ["before it is on the disk", "before its shard is removed"])
def test_a_build_killed_while_shards_move_goes_on_without_embedding(
    encoder, corpus, tmp_path, monkeypatch, embedded, after, moment
):
    build(tmp_path / "whole", corpus, encoder)
    removes_shard = lambda path, *_: getattr(path, "suffix", "") == ".npy"  # noqa: E731
    place = (faiss_index, "_sync", after) if "disk" in moment else (Path, "unlink", after, removes_shard)
    with pytest.raises(Killed), dying(monkeypatch, *place):
        build(tmp_path / "index", corpus, encoder)
    embedded.clear()
    build(tmp_path / "index", corpus, encoder)
    assert embedded == []
    assert (vectors(tmp_path / "index") == vectors(tmp_path / "whole")).all()


def test_a_shard_that_was_moved_in_part_is_moved_again(encoder, corpus, tmp_path, monkeypatch):
    build(tmp_path / "whole", corpus, encoder)
    with pytest.raises(Killed), dying(monkeypatch, faiss_index, "_sync", 3):
        build(tmp_path / "index", corpus, encoder)
    part = tmp_path / "index.building" / "e5" / "index.faiss.part"
    os.truncate(part, part.stat().st_size - 300)
    build(tmp_path / "index", corpus, encoder)
    assert (vectors(tmp_path / "index") == vectors(tmp_path / "whole")).all()


def test_a_shard_that_a_failing_disk_cut_short_is_embedded_again(
    encoder, corpus, tmp_path, monkeypatch, embedded
):
    out = tmp_path / "index"
    with pytest.raises(Killed), dying(monkeypatch, Shards, "save", 3):
        build(out, corpus, encoder)
    shard = tmp_path / "index.building" / "e5" / "embeddings" / "000000000007-000000000014.npy"
    shard.write_bytes(shard.read_bytes()[:-5])
    embedded.clear()
    build(out, corpus, encoder)
    assert embedded == [passage.contents for passage in (*corpus[7:14], *corpus[21:])]
    assert len(vectors(out)) == len(corpus)


def test_the_size_of_shards_may_change_on_the_way(encoder, corpus, tmp_path, monkeypatch):
    build(tmp_path / "whole", corpus, encoder, shard_size=60)
    with pytest.raises(Killed), dying(monkeypatch, Shards, "save", 2):
        build(tmp_path / "index", corpus, encoder, shard_size=11)
    build(tmp_path / "index", corpus, encoder, shard_size=13)
    assert vectors(tmp_path / "index") == pytest.approx(vectors(tmp_path / "whole"), abs=2e-6)


def test_what_another_encoder_began_is_not_continued(encoder, another, corpus, tmp_path, monkeypatch):
    with pytest.raises(Killed), dying(monkeypatch, Shards, "save", 2):
        build(tmp_path / "index", corpus, encoder)
    with pytest.raises(UserError, match=r"index.building"):
        build(tmp_path / "index", corpus, another, query_prefix="query: ", passage_prefix="passage: ")


def test_the_retriever_alone_continues_only_its_own(encoder, another, corpus, tmp_path):
    DenseRetriever(Options(model=str(encoder))).build(corpus, tmp_path, lambda done: None)
    DenseRetriever(Options(model=str(encoder))).build(corpus, tmp_path, lambda done: None)
    with pytest.raises(UserError, match="another query_prefix"):
        DenseRetriever(Options(model=str(another))).build(corpus, tmp_path, lambda done: None)
    with pytest.raises(UserError, match="another passages"):
        DenseRetriever(Options(model=str(encoder))).build(corpus[:9], tmp_path, lambda done: None)


def test_progress_grows_with_the_tokens_and_never_falls(encoder, corpus, tmp_path):
    counts = build(tmp_path / "index", corpus, encoder, shard_size=60, batch_size=20)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 60)
    assert counts[1] > 20  # the 20 longest of 60 passages hold more than a third of the tokens


def test_a_shard_is_saved_before_the_next_is_embedded(encoder, corpus, tmp_path, monkeypatch):
    sizes: list[int] = []
    working = Encoder.passages
    monkeypatch.setattr(
        Encoder,
        "passages",
        lambda self, given, report: sizes.append(len(given)) or working(self, given, report),
    )
    build(tmp_path / "index", corpus, encoder)
    assert sizes == [7] * 8 + [4]


@pytest.mark.parametrize("spec", ["HNSW8", "IVF4,Flat", "IVF4,PQ8x4", "PQ8x4", "SQfp16", "PCA16,IVF4,Flat"])
def test_factory_strings_make_the_index_that_faiss_calls_so(encoder, corpus, tmp_path, spec):
    build(tmp_path / "index", corpus, encoder, index=spec)
    found = faiss.read_index(str(tmp_path / "index" / "e5" / "index.faiss"))
    assert type(found) is type(faiss.index_factory(32, spec, faiss.METRIC_INNER_PRODUCT))
    assert found.metric_type == faiss.METRIC_INNER_PRODUCT
    own = [passage.contents for passage in corpus[:5]]
    hits = open_index(tmp_path / "index").search(own, 10)
    assert all(len({hit.passage.id for hit in found}) == len(found) == 10 for found in hits)
    assert all(list(map(score, found)) == sorted(map(score, found), reverse=True) for found in hits)


def score(hit) -> float:
    return hit.score


def test_training_takes_a_sample_that_repeats(encoder, corpus, tmp_path, monkeypatch):
    samples: list[np.ndarray] = []
    working = Shards.rows
    monkeypatch.setattr(Shards, "rows", lambda self, wanted: samples.append(wanted) or working(self, wanted))
    for name in ("one", "two"):
        build(tmp_path / name, corpus, encoder, index="IVF4,Flat", train_size=40)
    assert len(set(samples[0].tolist())) == 40
    assert (samples[0] == samples[1]).all()
    files = [tmp_path / name / "e5" / "index.faiss" for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_rows_of_shards_are_those_asked_for(tmp_path):
    shards, all_rows = Shards(tmp_path, 3), np.arange(60, dtype=np.float32).reshape(20, 3)
    for first in range(0, 20, 6):
        shards.save(first, all_rows[first : first + 6])
    wanted = np.array([0, 5, 6, 11, 19])
    assert (shards.rows(wanted) == all_rows[wanted]).all()
    assert shards.end(0) == 20
    assert shards.end(3) == 3
    assert Shards(tmp_path, 4).end(0) == 0
    np.save(tmp_path / "000000000006-000000000012.npy", all_rows[:6].astype(np.float64))
    assert shards.end(0) == 6


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("HNWS64", r"\(could not parse index string HNWS64\)"),
        ("PQ7", r"multiple of the number of sub"),
        ("IVF4096,Flat", "4,096 lists, the corpus only 60"),
    ],
)
def test_an_index_that_cannot_be_is_refused_before_anything_is_embedded(
    encoder, corpus, tmp_path, embedded, spec, match
):
    with pytest.raises(UserError, match=match) as caught:
        build(tmp_path / "index", corpus, encoder, index=spec)
    assert "\n" not in str(caught.value)
    assert embedded == []


def test_a_misspelt_index_leaves_nothing_in_the_way(encoder, corpus, tmp_path):
    with pytest.raises(UserError, match="HNWS64"):
        build(tmp_path / "index", corpus, encoder, index="HNWS64")
    build(tmp_path / "index", corpus, encoder, index="HNSW8")


def test_too_few_passages_to_train_on_is_one_line(encoder, corpus, tmp_path):
    with pytest.raises(UserError, match="could not be trained on 60 passages") as caught:
        build(tmp_path / "index", corpus, encoder, index="PQ8")
    assert "\n" not in str(caught.value)


def test_a_disk_too_small_is_said_before_anything_is_embedded(
    encoder, corpus, tmp_path, monkeypatch, embedded
):
    monkeypatch.setattr(faiss_index, "disk_needed", lambda *given: 10**18)
    with pytest.raises(UserError, match=r"1,000,000,000\.0 GB of disk"):
        build(tmp_path / "index", corpus, encoder)
    assert embedded == []


@pytest.mark.parametrize(
    ("spec", "vectors_kept"), [("Flat", 1_010), ("HNSW8", 2_000), ("IVF4,Flat", 2_000), ("IVF4,PQ8", 1_000)]
)
def test_disk_needed_is_the_vectors_and_what_lies_beside_them(spec, vectors_kept):
    index = faiss_index.new_index(32, spec)
    assert faiss_index.disk_needed(index, Options(index=spec, shard_size=10), 1_000) == vectors_kept * 32 * 4


CHILD = """
import sys
from pathlib import Path
from srl.index import build_index
from srl.trajectory import Passage
corpus = [Passage(str(row), f"passage {row} red fox " + "sea " * (row % 9)) for row in range(400)]
tell = lambda stage, done, total: print(stage, done, flush=True)
build_index(corpus, Path(sys.argv[1]), "e5", {"model": sys.argv[2], "shard_size": 10, "batch_size": 5}, tell)
"""


@pytest.mark.slow
@pytest.mark.must_run
def test_sigkill_at_any_line_of_progress_loses_no_finished_shard(encoder, tmp_path):
    command, saved = [sys.executable, "-c", CHILD, tmp_path / "index", encoder], 0
    shards = Shards(tmp_path / "index.building" / "e5" / "embeddings", 32)
    for lines in (0, 7, 30):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            counts = (int(line.split()[1]) for line in child.stdout if line.startswith("indexing"))
            assert next(counts) == saved
            for _ in range(lines):
                last = next(counts)
            child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        assert not (tmp_path / "index").exists()
        assert shards.end(0) >= ((last - 1) // 10 * 10 if lines else 0)
        saved = shards.end(0)
    assert 0 < saved < 400
    subprocess.run(command, capture_output=True, check=True)
    command[3] = tmp_path / "whole"
    subprocess.run(command, capture_output=True, check=True)
    assert (vectors(tmp_path / "index") == vectors(tmp_path / "whole")).all()
