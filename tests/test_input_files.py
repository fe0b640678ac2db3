"""What a command reads may be compressed; a directory, a pipe and nothing are named."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest

from srl.data.relevance import read_labelled_questions
from srl.errors import UserError
from srl.files import beginning

QUESTIONS = [
    {"id": "1", "question": "a fox ?", "golden_answers": ["red"], "supporting_ids": ["a"]},
    {"id": "2", "question": "a dog ?", "golden_answers": ["blue"], "supporting_ids": ["b"]},
]


@pytest.mark.parametrize("name", ["q.tsv", "q.tsv.zst", "q.tsv.gz", "q.csv.zst", "q.jsonl.zst"])
def test_questions_are_read_from_compressed_files_of_each_kind(name, tmp_path):
    texts = {
        "tsv": "1\ta fox ?\n2\ta dog ?\n",
        "csv": "id,question,golden_answers\n1,a fox ?,red\n2,a dog ?,blue\n",
        "jsonl": "".join(json.dumps(row) + "\n" for row in QUESTIONS),
    }
    data = texts[name.split(".")[1]].encode()
    packed = {".gz": gzip.compress, ".zst": lambda data: pyarrow.Codec("zstd").compress(data).to_pybytes()}
    (tmp_path / name).write_bytes(packed.get(Path(name).suffix, bytes)(data))
    asked = read_labelled_questions(tmp_path / name).questions
    assert [(question.id, question.text) for question in asked] == [("1", "a fox ?"), ("2", "a dog ?")]


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe"):
        with pytest.raises(UserError, match=str(path)):
            beginning(path)
