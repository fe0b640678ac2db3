"""Corpora: read as a stream, with every error at its line, and written whole or not at all."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
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


@pytest.mark.parametrize("ids", [["0", "1", "0"], ["1", "0", "1"], ["b", "a", "b"], ["1", "x", "0", "1"]])
def test_a_repeated_id_is_found_whether_ids_count_rows_or_not(ids, tmp_path):
    rows = [{"id": name, "contents": f"passage {n}"} for n, name in enumerate(ids)]
    path = lines(tmp_path / "corpus.jsonl", *rows)
    assert complaint(path).startswith(f"{path}:{len(ids)}: ")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.strip())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.builds(Passage, id=TEXT, contents=TEXT), min_size=1, unique_by=lambda p: p.id))
def test_what_is_written_is_read_back(tmp_path_factory, passages):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    assert write_corpus(path, passages) == len(passages)
    assert list(read_corpus(path)) == passages


def test_a_passage_is_written_once_and_two_have_no_id_in_common(tmp_path):
    passage = Passage("a", "text", "http://wiki/a")
    assert write_corpus(tmp_path / "corpus.jsonl", [passage, passage]) == 1
    assert list(read_corpus(tmp_path / "corpus.jsonl")) == [passage]
    for wrong in ([passage, Passage("a", "other")], []):
        with pytest.raises(UserError):
            write_corpus(tmp_path / "other.jsonl", wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


ROWS = [
    {"id": "1", "title": "Osk", "text": "Osk is a town, by the river.", "url": "http://wiki/Osk"},
    {"id": "2", "title": "Köhler", "text": 'A "hut"\nof turf.', "url": ""},
]


def compressed(data: bytes, kind: str) -> bytes:
    return gzip.compress(data) if kind == "gz" else pa.Codec("zstd").compress(data).to_pybytes()


@pytest.mark.parametrize("name", ["c.parquet", "c.csv", "c.tsv", "c.jsonl", "c.json"])
@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
def test_a_corpus_is_the_same_in_every_format(name, packing, tmp_path):
    table, path = pa.Table.from_pylist(ROWS), tmp_path / name
    if name == "c.parquet":
        pq.write_table(table, path)
        packing = ""
    elif name in ("c.csv", "c.tsv"):
        delimiter = "," if name == "c.csv" else "\t"
        pyarrow.csv.write_csv(table, path, pyarrow.csv.WriteOptions(delimiter=delimiter))
    elif name == "c.json":
        path.write_text(json.dumps(ROWS))
    else:
        lines(path, *ROWS)
    if packing:
        path.with_name(name + packing).write_bytes(compressed(path.read_bytes(), packing[1:]))
    assert list(read_corpus(path.with_name(name + packing))) == [
        Passage("1", '"Osk"\nOsk is a town, by the river.', "http://wiki/Osk"),
        Passage("2", '"Köhler"\nA "hut"\nof turf.'),
    ]


def test_a_folder_of_texts_is_a_corpus(tmp_path):
    texts = {
        "b.md": "# The mill\n\nIt is old.\n",
        "guide/a.txt": "A walk\nFirst left.\n\nThen right.",
        "guide/one-line.txt": "Only this.",
        "guide/page.MD": "---\nkind: page\n---\nText.",
        "empty.txt": " \n",
        ".hidden/x.md": "no",
        "notes.pdf": "no",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    skipped: Counter[str] = Counter()
    passages = {passage.id: passage for passage in read_corpus(tmp_path, skipped)}
    assert list(passages) == ["b.md", "guide/a.txt", "guide/one-line.txt", "guide/page.MD"]
    assert [passage.title for passage in passages.values()] == ["The mill", "A walk", "one-line", "page"]
    assert passages["b.md"].text == "It is old."
    assert passages["guide/a.txt"].text == "First left.\n\nThen right."
    assert passages["guide/page.MD"].text == texts["guide/page.MD"]
    assert skipped.total() == 1
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    assert "bad.txt" in complaint(tmp_path)
