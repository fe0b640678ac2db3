"""Corpora: read as a stream, with every error at its line, and written whole or not at all."""

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
        packed = {".gz": gzip.compress, ".zst": lambda data: pa.Codec("zstd").compress(data).to_pybytes()}
        path.with_name(name + packing).write_bytes(packed[packing](path.read_bytes()))
    assert list(read_corpus(path.with_name(name + packing))) == [
        Passage("1", '"Osk"\nOsk is a town, by the river.', "http://wiki/Osk"),
        Passage("2", '"Köhler"\nA "hut"\nof turf.'),
    ]


def test_a_folder_of_texts_is_a_corpus(tmp_path):
    texts = {
        "b.md": "# The mill\n\nIt is old.\n", "guide/a.txt": "A walk\nFirst left.\n\nThen right.",
        "guide/one-line.txt": "Only this.", "guide/page.MD": "---\nkind: page\n---\nText.",
        "empty.txt": " \n", ".hidden/x.md": "no", "notes.pdf": "no", "rows.csv": "id,contents\nr1,A row.\n",
        "rows.jsonl": '{"id": "r2", "contents": "Another."}\n',
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), tmp_path / "rows.parquet")
    skipped: Counter[str] = Counter()
    passages = {passage.id: passage for passage in read_corpus(tmp_path, skipped)}
    rows, titled = ["r1", "r2", "1"], ["b.md", "guide/a.txt", "guide/one-line.txt", "guide/page.MD"]
    assert list(passages) == titled + rows
    assert [passages[name].title for name in titled] == ["The mill", "A walk", "one-line", "page"]
    assert passages["b.md"].text == "It is old."
    assert passages["guide/a.txt"].text == "First left.\n\nThen right."
    assert passages["guide/page.MD"].text == texts["guide/page.MD"]
    assert (skipped.total(), any(".pdf" in why for why in skipped)) == (2, True)
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    assert "bad.txt" in complaint(tmp_path)


FOX, DOG = ({"id": "a", "contents": '"A"\nred fox'}, {"id": "b", "contents": '"B"\nblue dog'})


def json_lines(*given: object) -> bytes:
    """JSON lines; bytes are written as they are."""
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in given)


WHOLE = json_lines(FOX, DOG)

REFUSED = {
    "one id twice": (json_lines({"id": 1, "contents": "x"}, {"id": "1", "contents": "y"}), 2),
    "no id": (json_lines(FOX, {"contents": "x"}), 2),
    "an id that is null": (json_lines(FOX, {"id": None, "contents": "x"}), 2),
    "an id of too many digits": (b'{"id": ' + b"9" * 5000 + b', "contents": "x"}', 1),
    "half a character in an id": (json_lines(FOX, b'{"id": "\\ud800", "contents": "x"}'), 2),
    "a null byte in a line": (json_lines(FOX, b'{"id": "s", "contents": "x\0y"}'), 2),
    "UTF-16": (WHOLE.decode().encode("utf-16"), 1),
    "a last line cut short": (WHOLE[:-9], 2),
    "an array cut short": (json.dumps([FOX, DOG]).encode()[:-9], None),
    "lines without end": (json_lines(b'{"id": "a", "contents": ' + b"[" * 100_000), 1),
    "blank lines only": (b"\n \n\r\n\t\n", None),
    "parquet": (b"PAR1\x15\x04" + bytes(range(256)), None),
}
"""A corpus, and the line at fault where one is."""

TAKEN = {
    "blank lines": b"\n\n" + json_lines(FOX) + b" \t\n\r\n" + json_lines(DOG) + b"\n",
    "CRLF": WHOLE.replace(b"\n", b"\r\n"),
    "no line end at the end": WHOLE.rstrip(),
    "a byte order mark": b"\xef\xbb\xbf" + WHOLE,
    "a byte order mark where two files met": json_lines(FOX) + b"\xef\xbb\xbf" + json_lines(DOG),
    "an array": json.dumps([FOX, DOG], indent=1).encode(),
    "an array after a byte order mark": b"\xef\xbb\xbf" + json.dumps([FOX, DOG]).encode(),
    "two gzip files in one": gzip.compress(json_lines(FOX)) + gzip.compress(json_lines(DOG)),
    "fields that nobody asked for": json_lines({**FOX, "link": "x", "url": None}, {**DOG, "score": [1]}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_corpus_that_cannot_be_right_is_named_with_its_line(tmp_path: Path, what: str) -> None:
    content, number = REFUSED[what]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_corpus(path))
    assert str(caught.value).startswith(str(path) if number is None else f"{path}:{number}:")


@pytest.mark.parametrize("what", TAKEN)
def test_a_corpus_written_another_way_is_the_same_corpus(tmp_path: Path, what: str) -> None:
    path = tmp_path / ("corpus.jsonl.gz" if "gzip" in what else "corpus.jsonl")
    path.write_bytes(TAKEN[what])
    assert list(read_corpus(path)) == [Passage(**FOX), Passage(**DOG)]
