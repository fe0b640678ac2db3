"""An index: built whole or not at all, with an identity, and never opened when it is not whole."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from srl.cli import main
from srl.errors import UserError
from srl.index import build_index, check_index, open_index, passages, read_index_manifest, verify
from srl.index.passages import CorpusDigest, PassageStore, write_passages
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
def test_a_build_that_ends_early_leaves_what_was_there(tmp_path, corpus, built, error, stage):
    def stop(now: str, done: int, total: int | None) -> None:
        if now == stage and done == 2:
            raise error

    before = open_index(built).digest
    for out, overwrite in ((tmp_path / "new", False), (built, True)):
        with pytest.raises(type(error)):
            build_index(corpus, out, overwrite=overwrite, progress=stop)
    assert open_index(built).digest == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["built", "corpus.jsonl"]


def test_what_is_not_ours_is_never_replaced(tmp_path, corpus, built):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    (built / "bm25" / "notes.txt").write_text("years of work")
    for taken in (tmp_path / "mine", corpus, built):
        for overwrite in (True, False):
            with pytest.raises(UserError):
                build_index(corpus, taken, overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert (built / "bm25" / "notes.txt").exists()
    assert corpus.exists()


def test_what_belongs_to_the_machine_may_change_and_nothing_else(built):
    assert open_index(built, {"n_threads": 2, "k1": 0.9})._retriever.options.n_threads == 2
    with pytest.raises(UserError) as caught:
        open_index(built, {"k1": 1.5})
    assert caught.value.key == "retriever.bm25.k1"


EDITED = {
    "format": 2, "kind": "world", "retriever": "e5", "options": {"k1": 1.3}, "passages": -1, "digest": "x",
    "corpus_digest": "", "files": {}, "checksums": None, "identity": {"encoder": "a"},
}  # fmt: skip


@pytest.mark.parametrize("field", EDITED)
def test_an_edited_manifest_is_refused(built, field):
    whole = json.loads((built / "manifest.json").read_text())
    for edited in ({**whole, field: EDITED[field]}, {name: whole[name] for name in whole if name != field}):
        if edited != whole and (field != "identity" or field in edited):  # none is the default
            (built / "manifest.json").write_text(json.dumps(edited))
            with pytest.raises(UserError):
                open_index(built)


@pytest.mark.parametrize("harm", ["half", "emptied", "longer", "gone", "folder"])
def test_a_file_that_is_not_whole_is_named(tmp_path, built, harm):
    for name in read_index_manifest(built).files:
        mine = shutil.copytree(built, tmp_path / "mine")
        file = mine / name
        content = file.read_bytes()
        file.unlink()
        if harm == "folder":
            file.mkdir()
        elif harm != "gone":
            file.write_bytes({"half": content[:-3], "emptied": b"", "longer": content + b"\0"}[harm])
        for look in (check_index, open_index):
            with pytest.raises(UserError, match=name):
                look(mine)
        shutil.rmtree(mine)


def test_verify_reads_every_byte_of_every_file(tmp_path, built, capsys):
    manifest = check_index(built)
    verify(built, manifest)
    for name in manifest.files:
        mine = shutil.copytree(built, tmp_path / "mine")
        state, content = (mine / name).stat(), bytearray((mine / name).read_bytes())
        content[len(content) // 2] ^= 1
        (mine / name).write_bytes(content)
        os.utime(mine / name, ns=(state.st_atime_ns, state.st_mtime_ns))
        with pytest.raises(UserError, match=name):
            verify(mine, check_index(mine))
        assert main(["index", "info", str(mine)]) == 0
        assert main(["index", "info", str(mine), "--verify"]) == 2
        assert name in capsys.readouterr().err
        shutil.rmtree(mine)


# The passage store: memory-mapped, by row and by id.


SOME = [
    Passage("a", '"Title"\ntext'),
    Passage("东京/1", "東京タワー\n港区 👩‍🚀 é"),
    Passage("x y\nz", ""),
    Passage("0", "no title, one line"),
]


def test_every_passage_comes_back_by_row_and_by_id(tmp_path):
    store = write_passages(iter(SOME), tmp_path)
    assert list(store) == SOME
    assert len(store) == 4
    assert store[-1] == SOME[-1]
    assert [store.passage(passage.id) for passage in SOME] == SOME
    assert [store.row(passage.id) for passage in SOME] == [0, 1, 2, 3]


def test_ids_whose_hashes_collide_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(passages, "_hash", lambda passage_id: 7)
    store = write_passages(SOME, tmp_path)
    assert [store.passage(passage.id) for passage in SOME] == SOME
    assert store.row("b") is None


@pytest.mark.parametrize("collide", [False, True])
def test_an_id_that_comes_twice_is_refused(tmp_path, monkeypatch, collide):
    if collide:
        monkeypatch.setattr(passages, "_hash", lambda passage_id: 7)
    with pytest.raises(UserError):
        write_passages([*SOME[:3], Passage("a", "other")], tmp_path)


def digest(found: list[Passage]) -> str:
    digest = CorpusDigest()
    assert list(digest.of(found)) == found
    return digest.hexdigest()


def test_the_digest_of_a_corpus_covers_ids_contents_and_order():
    others = [
        SOME[::-1],
        SOME[:3],
        [Passage("b", SOME[0].contents), *SOME[1:]],
        [Passage("a", "other"), *SOME[1:]],
    ]
    assert len({digest(found) for found in [SOME, *others]}) == 5
    assert digest([Passage("ab", "c")]) != digest([Passage("a", "bc")])


ADDRESSED = [
    Passage("a", "first"),
    Passage("b", "second", "http://wiki/é"),
    Passage("c", "third", "http://wiki/2"),
    Passage("d", "fourth", "http://wiki/é"),
    Passage("e", "last"),
]


def test_web_addresses_come_back_and_are_found(tmp_path):
    write_passages(ADDRESSED, tmp_path)
    store = PassageStore(tmp_path)
    assert list(store) == ADDRESSED
    assert store[-2] == ADDRESSED[3]
    assert store.passage("http://wiki/é") == ADDRESSED[1], "the first passage with this address"
    assert store.passage("c") == store.passage("http://wiki/2") == ADDRESSED[2]
    assert store.row("http://wiki/2") is None
    with pytest.raises(KeyError):
        store.passage("http://wiki/3")
