"""Corpora as they come: odd or cut short. Each is read right or refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from srl.data.corpus import read_corpus
from srl.errors import UserError
from srl.trajectory import Passage

FOX, DOG = ({"id": "a", "contents": '"A"\nred fox'}, {"id": "b", "contents": '"B"\nblue dog'})


def rows(*given: object) -> bytes:
    """JSON lines; bytes are written as they are."""
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in given)


WHOLE = rows(FOX, DOG)

REFUSED = {
    "one id twice": (rows({"id": 1, "contents": "x"}, {"id": "1", "contents": "y"}), 2),
    "no id": (rows(FOX, {"contents": "x"}), 2),
    "an id that is null": (rows(FOX, {"id": None, "contents": "x"}), 2),
    "an id of too many digits": (b'{"id": ' + b"9" * 5000 + b', "contents": "x"}', 1),
    "half a character in an id": (rows(FOX, b'{"id": "\\ud800", "contents": "x"}'), 2),
    "a null byte in a line": (rows(FOX, b'{"id": "s", "contents": "x\0y"}'), 2),
    "UTF-16": (WHOLE.decode().encode("utf-16"), 1),
    "a last line cut short": (WHOLE[:-9], 2),
    "an array cut short": (json.dumps([FOX, DOG]).encode()[:-9], None),
    "lines without end": (rows(b'{"id": "a", "contents": ' + b"[" * 100_000), 1),
    "blank lines only": (b"\n \n\r\n\t\n", None),
    "parquet": (b"PAR1\x15\x04" + bytes(range(256)), None),
}
"""A corpus, and the line at fault where one is."""

TAKEN = {
    "blank lines": b"\n\n" + rows(FOX) + b" \t\n\r\n" + rows(DOG) + b"\n",
    "CRLF": WHOLE.replace(b"\n", b"\r\n"),
    "no line end at the end": WHOLE.rstrip(),
    "a byte order mark": b"\xef\xbb\xbf" + WHOLE,
    "a byte order mark where two files met": rows(FOX) + b"\xef\xbb\xbf" + rows(DOG),
    "an array": json.dumps([FOX, DOG], indent=1).encode(),
    "an array after a byte order mark": b"\xef\xbb\xbf" + json.dumps([FOX, DOG]).encode(),
    "two gzip files in one": gzip.compress(rows(FOX)) + gzip.compress(rows(DOG)),
    "fields that nobody asked for": rows({**FOX, "link": "x", "url": None}, {**DOG, "score": [1]}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_corpus_that_cannot_be_right_is_named_with_its_line(tmp_path: Path, what: str) -> None:
    content, number = REFUSED[what]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_corpus(path))
    assert str(caught.value).startswith(str(path) if number is None else f"{path}:{number}:")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", TAKEN)
def test_a_corpus_written_another_way_is_the_same_corpus(tmp_path: Path, what: str) -> None:
    path = tmp_path / ("corpus.jsonl.gz" if "gzip" in what else "corpus.jsonl")
    path.write_bytes(TAKEN[what])
    assert list(read_corpus(path)) == [Passage(**FOX), Passage(**DOG)]
