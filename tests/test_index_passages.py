"""The passage store: memory-mapped, by row and by id."""

from __future__ import annotations

import pytest

from srl.errors import UserError
from srl.index import passages
from srl.index.passages import CorpusDigest, PassageStore, write_passages
from srl.trajectory import Passage

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
