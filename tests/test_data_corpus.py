"""Corpora: read as a stream, with every error at its line, and written whole or not at all."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.data.corpus import passage_of, read_corpus, write_corpus
from srl.errors import UserError
from srl.trajectory import Passage

FIXTURES = Path(__file__).parent / "fixtures" / "data"


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def complaint(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(read_corpus(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_id_and_contents_are_read_as_they_are():
    passages = list(read_corpus(FIXTURES / "corpus.jsonl"))
    assert [p.id for p in passages] == ["0", "1", "2"]
    assert (passages[2].title, passages[2].text) == ("Köhlerhütte", "A hut of turf — and of poles.")


def test_title_and_text_get_an_id_from_their_content_and_repeats_are_left_out():
    passages = list(read_corpus(FIXTURES / "titles.jsonl"))
    assert [p.heading for p in passages] == ['"Osk"', '"Thorne "Old" Mill"', '"Rye"']
    assert passages[0].id.startswith("Osk-")
    assert passages[2].id == "rye-1"
    assert passages[0] == passage_of("Osk", "Osk is a town on the river Osk.")


def test_a_json_array_is_a_corpus_too():
    assert [p.title for p in read_corpus(FIXTURES / "2wiki_corpus.json")] == [
        "The Salt Road",
        "Ana Reuss",
        "Salt",
    ]


def test_a_gzipped_corpus_reads_like_the_plain_one(tmp_path):
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress((FIXTURES / "corpus.jsonl").read_bytes()))
    assert list(read_corpus(packed)) == list(read_corpus(FIXTURES / "corpus.jsonl"))


def test_spaces_do_not_change_the_id_of_a_passage():
    assert passage_of("Rye", "Rye is\na grass.").id == passage_of("Rye ", " Rye is a  grass.").id
    assert passage_of("Rye", "Rye is a grass").id != passage_of("Rye", "Rye is a grass.").id


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"contents": "x"}, ":2: expected a field 'id', found contents"),
        ({"id": "9", "contents": " "}, ":2: expected a text in 'contents', found ' '"),
        ({"id": "9", "contents": None}, ":2: expected a field 'contents'"),
        ({"id": "9", "question": "?"}, ":2: expected 'contents', or 'title' and 'text', found id, question"),
        ({"title": ["x"], "text": "y"}, ":2: expected a text in 'title', found list ['x']"),
        ({"id": "0", "contents": "again"}, ":2: expected an id that no earlier passage has, found '0'"),
        ("text", ":2: expected a JSON object"),
    ],
)  # fmt: skip
def test_a_broken_row_is_named_with_its_line(row, expected, tmp_path):
    path = lines(tmp_path / "corpus.jsonl", {"id": "0", "contents": "first"}, row)
    assert f"{path}{expected}" in complaint(path)


@pytest.mark.parametrize("ids", [["0", "1", "0"], ["1", "0", "1"], ["b", "a", "b"], ["1", "x", "0", "1"]])
def test_a_repeated_id_is_found_whether_ids_count_rows_or_not(ids, tmp_path):
    rows = [{"id": name, "contents": f"passage {n}"} for n, name in enumerate(ids)]
    path = lines(tmp_path / "corpus.jsonl", *rows)
    assert f":{len(ids)}: expected an id that no earlier passage has" in complaint(path)


def test_ids_that_look_alike_are_not_the_same(tmp_path):
    path = lines(
        tmp_path / "corpus.jsonl", *({"id": i, "contents": "x"} for i in ("0", "00", "1", "01", "٠"))
    )
    assert len(list(read_corpus(path))) == 5


@pytest.mark.parametrize("content", ["", "\n", "[]"])
def test_an_empty_corpus_is_refused(content, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    assert complaint(path).startswith(f"{path}: expected passages, one")


def test_a_missing_corpus_is_named(tmp_path):
    assert complaint(tmp_path / "no.jsonl") == f"{tmp_path / 'no.jsonl'}: no such file"


def test_numbered_lines_take_no_memory_however_many(tmp_path):
    path = tmp_path / "corpus.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"id": "{n}", "contents": "passage {n}"}}\n' for n in range(20_000))
    stream = read_corpus(path)
    next(islice(stream, 1000, None))
    tracemalloc.start()
    try:
        assert sum(1 for _ in stream) == 18_999
        assert tracemalloc.get_traced_memory()[1] < 400_000
    finally:
        tracemalloc.stop()


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.strip())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.builds(Passage, id=TEXT, contents=TEXT), min_size=1, unique_by=lambda p: p.id))
def test_what_is_written_is_read_back(tmp_path_factory, passages):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    assert write_corpus(path, passages) == len(passages)
    assert list(read_corpus(path)) == passages


def test_an_interrupted_corpus_leaves_no_file(tmp_path):
    def passages():
        yield Passage("0", "first")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_corpus(tmp_path / "corpus.jsonl", passages())
    assert list(tmp_path.iterdir()) == []


def test_a_passage_that_comes_again_is_written_once(tmp_path):
    passage = Passage("a", "text")
    assert write_corpus(tmp_path / "corpus.jsonl", [passage, passage]) == 1


def test_two_passages_with_one_id_are_not_written(tmp_path):
    with pytest.raises(UserError, match="two passages have the id 'a'"):
        write_corpus(tmp_path / "corpus.jsonl", [Passage("a", "text"), Passage("a", "other")])
    with pytest.raises(UserError, match="there are no passages"):
        write_corpus(tmp_path / "corpus.jsonl", [])
    assert list(tmp_path.iterdir()) == []
