"""An index: built whole or not at all, with an identity, and never opened when it is not whole."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from srl import index
from srl.errors import CheckFailed, UserError
from srl.index import build_index, check_corpus, open_index, read_index_manifest
from srl.index.manifest import index_digest
from srl.trajectory import Passage

ROWS = [
    {"id": "p0", "contents": '"Lighthouse"\nThe lighthouse of Genoa is tall.'},
    {"id": "p1", "contents": '"Genoa"\nGenoa is a port in Italy.'},
    {"id": "p2", "contents": '"Kenya"\nMount Kenya is a volcano.'},
]


def write(path: Path, rows: list[dict]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write(tmp_path / "corpus.jsonl", ROWS)


@pytest.fixture
def built(tmp_path: Path, corpus: Path) -> Path:
    build_index(corpus, tmp_path / "built")
    return tmp_path / "built"


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_index_finds_passages_and_gives_them_back(built):
    found = open_index(built)
    (hits,) = found.search(["where is the lighthouse"], 2)
    assert [hit.passage.id for hit in hits] == ["p0"]
    assert found.passage("p2") == Passage("p2", ROWS[2]["contents"])
    assert len(found) == 3
    assert found.search([], 3) == []
    with pytest.raises(KeyError):
        found.passage("p3")
    with pytest.raises(ValueError, match="at least 1"):
        found.search(["x"], 0)


def test_the_manifest_says_what_was_built(tmp_path, corpus):
    manifest = build_index(corpus, tmp_path / "out", "bm25", {"k1": 1.2})
    assert manifest == index.read_index_manifest(tmp_path / "out") == open_index(tmp_path / "out").manifest
    assert manifest.options == {"k1": 1.2, "b": 0.4, "stopwords": "english", "stemmer": "english"}
    assert (manifest.retriever, manifest.passages, manifest.corpus) == ("bm25", 3, "corpus.jsonl")
    assert manifest.retriever_version.startswith("srl-search-bm25 ")
    written = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (written["format"], written["kind"]) == (1, "index")


def test_the_digest_is_that_of_corpus_and_parameters_alone(tmp_path, corpus):
    zipped = write(tmp_path / "same.jsonl.gz", ROWS)
    turned = write(tmp_path / "turned.jsonl", ROWS[::-1])
    same = [
        build_index(corpus, tmp_path / "1"),
        build_index(zipped, tmp_path / "2", options={"n_threads": 2, "k1": 0.9}),
        build_index([Passage(**row) for row in ROWS], tmp_path / "3"),
    ]
    assert len({manifest.digest for manifest in same}) == 1
    others = [
        build_index(turned, tmp_path / "4"),
        build_index(corpus, tmp_path / "5", options={"b": 0.5}),
        build_index(corpus, tmp_path / "6", options={"stemmer": "none"}),
    ]
    assert len({manifest.digest for manifest in [same[0], *others]}) == 4


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
@pytest.mark.parametrize("stage", ["reading", "indexing"])
def test_a_build_that_is_interrupted_leaves_nothing(tmp_path, corpus, error, stage):
    def stop(now: str, done: int, total: int | None) -> None:
        if now == stage and done == 2:
            raise error

    with pytest.raises(type(error)):
        build_index(corpus, tmp_path / "out", progress=stop)
    assert entries(tmp_path) == ["corpus.jsonl"]


def test_a_rebuild_that_fails_leaves_the_old_index(tmp_path, corpus, built):
    before = open_index(built).digest
    write(corpus, [*ROWS, {"id": "p0", "contents": "again"}])
    with pytest.raises(UserError, match=r"corpus\.jsonl:4"):
        build_index(corpus, built, overwrite=True)
    assert open_index(built).digest == before
    assert entries(tmp_path) == ["built", "corpus.jsonl"]


def test_machine_dependent_options_of_a_manifest_are_left_out(built):
    """No build writes them: a manifest of somebody else could say trust_remote_code."""
    manifest = read_index_manifest(built)
    options = {**manifest.options, "n_threads": 7}
    digest = index_digest(manifest.corpus_digest, "bm25", options, manifest.identity)
    replace(manifest, options=options, digest=digest).write(built)
    opened = open_index(built)._retriever
    assert (opened.options.n_threads, opened.options.k1) == (1, 0.9)
    assert open_index(built, {"n_threads": 2})._retriever.options.n_threads == 2


def test_an_index_is_replaced_only_when_asked(tmp_path, corpus, built):
    with pytest.raises(UserError, match="an index of 3 passages; add --overwrite"):
        build_index(corpus, built)
    manifest = build_index(corpus, built, options={"k1": 2}, overwrite=True)
    assert open_index(built).digest == manifest.digest


def test_what_is_no_index_is_never_replaced(tmp_path, corpus):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    for taken in (tmp_path / "mine", corpus):
        with pytest.raises(UserError, match="is not an index"):
            build_index(corpus, taken, overwrite=True)
        with pytest.raises(UserError, match="exists already"):
            build_index(corpus, taken)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_file_that_somebody_put_into_an_index_is_not_dropped(tmp_path, corpus, built):
    (built / "bm25" / "notes.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"built is not replaced: srl did not write bm25/notes\.txt in it"):
        build_index(corpus, built, overwrite=True)
    assert (built / "bm25" / "notes.txt").exists()


def test_a_damaged_index_is_replaced_when_asked(corpus, built):
    (built / "bm25" / "data.npy").write_bytes(b"")
    (built / "bm25" / "hashes.npy").unlink()
    build_index(corpus, built, overwrite=True)
    assert len(open_index(built)) == 3


def test_an_empty_directory_may_be_filled(tmp_path, corpus):
    (tmp_path / "out").mkdir()
    build_index(corpus, tmp_path / "out")
    assert len(open_index(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no passage|none|empty"),
        ([ROWS[0], ROWS[1], ROWS[0]], r"corpus.jsonl:3.*'p0'"),
        ([ROWS[0], {"id": "p1"}], r"corpus.jsonl:2"),
    ],
)
def test_a_bad_corpus_is_refused_with_its_line(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        build_index(write(tmp_path / "corpus.jsonl", rows), tmp_path / "out")
    assert entries(tmp_path) == ["corpus.jsonl"]


def test_a_missing_corpus_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.jsonl: no such file"):
        build_index(tmp_path / "nowhere.jsonl", tmp_path / "out")


@pytest.mark.parametrize(
    ("retriever", "options", "message"),
    [
        ("bm26", {}, "did you mean 'bm25'"),
        ("bm25", {"k2": 1}, "did you mean 'k1'"),
        ("bm25", {"k1": "much"}, r"retriever\.bm25\.k1"),
    ],
)
def test_an_unknown_retriever_or_option_is_refused_first(tmp_path, retriever, options, message):
    with pytest.raises(UserError, match=message):
        build_index(tmp_path / "never-read.jsonl", tmp_path / "out", retriever, options)


def test_an_index_belongs_to_its_corpus(tmp_path, corpus, built):
    assert check_corpus(built, corpus).passages == 3
    other = write(tmp_path / "other.jsonl", ROWS[:2])
    with pytest.raises(
        CheckFailed,
        match=r"was not built from .*other.jsonl.*expected corpus digest .*3 passages.*found .*\(2\)",
    ):
        check_corpus(built, other)


def test_what_belongs_to_the_machine_may_change(built):
    assert open_index(built, {"n_threads": 2, "k1": 0.9})._retriever.options.n_threads == 2
    with pytest.raises(UserError, match=r"was built with k1=0.9, not 1.5.*--set k1=1.5"):
        open_index(built, {"k1": 1.5})


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.*does not exist"):
        open_index(tmp_path / "nowhere")


def test_a_directory_of_another_kind_is_refused(tmp_path, built):
    change(built, kind="run")
    with pytest.raises(UserError, match="expected a directory of kind 'index', found 'run'"):
        open_index(built)


def test_a_newer_format_is_refused_in_one_line(built):
    change(built, format=2)
    with pytest.raises(UserError, match="format 2") as error:
        open_index(built)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", [{"corpus_digest": "0" * 32}, {"retriever": "e5"}, {"options": {"k1": 2}}])
def test_an_edited_manifest_is_noticed(built, field):
    change(built, **field)
    with pytest.raises(UserError, match=r"expected digest .* found .*edited"):
        open_index(built)


def test_a_manifest_with_holes_is_refused(built):
    manifest = json.loads((built / "manifest.json").read_text())
    del manifest["files"]
    (built / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="files missing"):
        open_index(built)


@pytest.mark.parametrize("name", ["passages/text.bin", "bm25/data.npy", "bm25/hashes.npy"])
def test_a_missing_or_truncated_file_is_refused(built, name):
    file = built / name
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(UserError, match=f"{name} is damaged"):
        open_index(built)
    file.unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        open_index(built)


def test_a_file_from_another_index_is_refused(tmp_path, corpus, built):
    build_index(corpus, tmp_path / "other", options={"k1": 2})
    name = "bm25/data.npy"
    assert (built / name).stat().st_size == (tmp_path / "other" / name).stat().st_size
    shutil.copy(tmp_path / "other" / name, built / name)
    with pytest.raises(UserError, match="from another index"):
        open_index(built)


def test_an_index_may_be_moved(tmp_path, built):
    before = open_index(built).digest
    built.rename(tmp_path / "moved")
    assert open_index(tmp_path / "moved").digest == before


def change(directory: Path, **fields: object) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
