"""The words of an error: its first line, in messages of ours."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from srl.config import yaml12
from srl.data.parquet import open_parquet
from srl.errors import UserError, first_line


@pytest.mark.parametrize(
    ("message", "line"),
    [("one line", "one line"), ("\n \n  second \nthird", "second"), ("", "OSError"), (" \n", "OSError")],
)
def test_the_first_line_of_an_error_is_never_empty(message, line):
    assert first_line(OSError(message)) == line


def test_a_file_whose_reader_gives_no_reason_is_refused_in_one_line(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError

    (tmp_path / "a.parquet").touch()
    monkeypatch.setattr(pq, "ParquetFile", refuse)
    with (
        pytest.raises(UserError, match=r"expected a parquet file, found OSError$"),
        open_parquet(tmp_path / "a.parquet"),
    ):
        pass


def test_yaml_whose_reader_gives_no_reason_is_refused_in_one_line(monkeypatch):
    def refuse(text, loader):
        raise ValueError

    monkeypatch.setattr(yaml12.yaml, "load", refuse)
    with pytest.raises(UserError, match=r"^a\.yaml: not YAML: ValueError$"):
        yaml12.parse("a: 1", "a.yaml")
