"""Rows of published files, each with its place for error messages and checked access to its fields."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from srl.data.golden_answers import UnclearAnswers, golden_answers
from srl.errors import UserError, first_line, parsing
from srl.files import (
    beginning,
    check_input,
    is_compressed,
    json_object,
    no_constant,
    open_input,
    read_jsonl,
)

if TYPE_CHECKING:
    import pyarrow.parquet as pq

T = TypeVar("T")
_ROWS = 4096
"""Rows of a Parquet file that are read together."""
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
csv.field_size_limit(1 << 24)


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file. `index` counts rows from 0; `place` follows the file's name in errors."""

    path: Path
    place: str
    index: int
    row: Mapping[str, Any]

    def error(self, expected: str, found: str) -> UserError:
        return UserError(f"{self.path}{self.place}: expected {expected}, found {found}")

    def has(self, *names: str) -> bool:
        """Whether one of these fields is there and not null."""
        return any(self.row.get(name) is not None for name in names)

    def text(self, *names: str) -> str:
        """The first of the fields `names` that exists, as stripped text; it must not be empty."""
        return self.exact(*names).strip()

    def exact(self, *names: str) -> str:
        """Like `text`, with surrounding white space."""
        value = self._first(names)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)  # some files have `1640`, others `"1640"`
        text = self.valid(value, names[0])
        if not text or text.isspace():
            raise self.error(f"a text in {names[0]!r}", repr(text))
        return text

    def answers(self, *names: str) -> tuple[str, ...]:
        """`golden_answers` of the first of the fields `names` that exists."""
        value = self._first(names)
        try:
            return tuple(self.valid(answer, names[0]) for answer in golden_answers(value))
        except UnclearAnswers:
            raise self.error(
                f"golden answers in {names[0]!r}, one text for each", describe(value, 80)
            ) from None

    def items(self, name: str) -> list[Any]:
        """The field `name`, which must be a list; an empty list where it is missing."""
        value = self.row.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(f"a list in {name!r}", describe(value))
        return value or []

    def inner(self, row: object, name: str) -> Record:
        """An object in the field `name`, or its JSON as text, as a record of its own, at the same place."""
        if isinstance(row, str):  # as tables have it
            with suppress(UserError):
                row = json_object(row.encode("utf-8", "surrogatepass"), name, no_constant)
        if not isinstance(row, dict):
            raise self.error(f"an object in {name!r}", describe(row))
        return replace(self, row=row)

    def valid(self, value: object, name: str) -> str:
        """`value`, which must be text that UTF-8 can encode (lone surrogates of JSON are not)."""
        if not isinstance(value, str):
            raise self.error(f"a text in {name!r}", describe(value))
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise self.error(f"valid Unicode in {name!r}", "a lone surrogate") from None
        return value

    def _first(self, names: tuple[str, ...]) -> Any:
        for name in names:
            if self.row.get(name) is not None:
                return self.row[name]
        fields = ", ".join(str(name) for name in list(self.row)[:12]) or "no field at all"
        raise self.error(f"a field {names[0]!r}", fields)


def describe(value: object, length: int = 40) -> str:
    """A value for an error message: its type, and itself if it is short."""
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= length else type(value).__name__


def read_each(records: Iterable[Record], read: Callable[[Record], T]) -> Iterator[T]:
    """`read` of each record. Raises UserError with its place for a row in which something else stands."""
    for record in records:
        try:
            value = read(record)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise UserError(f"{record.path}{record.place}: not a row of this format: {error!r}") from error
        yield value


def read_rows(path: Path) -> Iterator[Record]:
    """The rows of a file: JSON lines, a JSON array, Parquet, CSV or TSV; all but Parquet may be compressed.

    Tables are known by their name, the others by how they begin.
    """
    if is_parquet(path):
        yield from parquet_rows(path)
    elif (delimiter := _DELIMITERS.get(suffix_of(path))) is not None:
        yield from table_rows(path, delimiter)
    elif first_character(path) == "[":
        yield from json_array(path)
    else:
        for index, (line, row) in enumerate(read_jsonl(path)):
            yield Record(path, f":{line}", index, row)


def suffix_of(path: Path) -> str:
    """The suffix of the file's name, that of a compressed file before it was compressed."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def is_parquet(path: Path) -> bool:
    """Whether the file is Parquet, by its name or, where that does not say it, by its first bytes."""
    return path.suffix == ".parquet" or beginning(path).startswith(b"PAR1")


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file, open. Raises UserError on what is no Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_input(path)
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: expected a parquet file, found {first_line(error)}") from error


def columns_of(path: Path) -> list[str]:
    """The columns of a Parquet file. Raises UserError."""
    with open_parquet(path) as file:
        return list(file.schema_arrow.names)


def parquet_rows(path: Path, columns: Iterable[str] = ()) -> Iterator[Record]:
    """The rows of a Parquet file, of all columns or of those of `columns` that it has."""
    with open_parquet(path) as file:
        names = [name for name in columns if name in file.schema_arrow.names] or None
        index = 0
        for batch in file.iter_batches(_ROWS, columns=names):
            with parsing(path):  # Python has fewer dates
                rows = batch.to_pylist()
            for row in rows:
                yield Record(path, f": row {index}", index, row)
                index += 1


def json_array(path: Path, key: str | None = None) -> Iterator[Record]:
    """The objects of a JSON array, or of the array under `key` of a JSON object."""
    with parsing(path), open_text(path) as file:
        data = json.load(file)
        rows = data if key is None else data[key]
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a JSON array, found {describe(rows)}")
    for index, row in enumerate(rows):
        record = Record(path, f": record {index + 1}", index, row)
        if not isinstance(row, dict):
            raise record.error("a JSON object {…}", describe(row))
        yield record


def table_rows(path: Path, delimiter: str) -> Iterator[Record]:
    """The rows of a CSV or TSV file with a header line, as fields of text."""
    with open_text(path, newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        try:
            for index, row in enumerate(reader):
                record = Record(path, f":{reader.line_num}", index, row)
                if None in row or None in row.values():
                    columns = f"{len(reader.fieldnames or ())} columns"
                    raise record.error(columns, "more" if None in row else "fewer")
                yield record
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path}:{reader.line_num}: expected a table in UTF-8, found {error}") from error


def first_character(path: Path) -> str:
    """The first character that is not white space; empty if there is none in the first MiB."""
    return beginning(path).decode("utf-8-sig", errors="replace").lstrip()[:1]


@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a text file in UTF-8 (`.gz` too). Raises UserError, as `open_input` does."""
    with open_input(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline) as text:
        yield text
