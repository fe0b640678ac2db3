"""Parts: directories with one Parquet file per table, which appear atomically by a rename.

    log/parts/step-000030-train-main-000031/            one write of one step
    log/parts/steps-000001-000032-main-000040/          compacted; its steps.parquet names what it replaces

A part is garbage as soon as a part that replaces it appears. So a reader that lists the directory sees each
step exactly once, whenever the writer is killed.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from srl.errors import error_line
from srl.files import atomic_directory, discard, remove_leftovers
from srl.store.schema import PARTS, PER_TOKEN

PARTS_DIRECTORY = "parts"
REPLACES = "replaces"
"""The key in the metadata of a compacted part's steps.parquet; the value is names separated by spaces."""

_PLAIN = re.compile(r"step-(?P<first>\d{6,})-(?P<phase>[a-z]+)-(?P<worker>\w+)-(?P<number>\d{6,})")
_COMPACTED = re.compile(r"steps-(?P<first>\d{6,})-(?P<last>\d{6,})-(?P<worker>\w+)-(?P<number>\d{6,})")
_GROUP_BYTES = 32 << 20

_DICTIONARY = ["run_id", "trajectory_id", "phase", "kind", "data_source", "question_id", "question", "prompt"]
_DICTIONARY += ["metadata", "split", "end", "status", "index_digest", "retriever"]
_DICTIONARY += [f"hits.list.element.{name}" for name in ("passage_id", "title", "contents", "url")]
_SPLIT = [f"{name}.list.element" for name in ("logprobs", *PER_TOKEN)]

Keep = Callable[[pa.Table], pa.Table]
"""Filters the rows of a table; those of one part come in its order of tables."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part, described by its name; `phase` is empty for a compacted part."""

    path: Path
    first: int
    last: int
    phase: str
    worker: str
    number: int

    @property
    def is_compacted(self) -> bool:
        return not self.phase

    def file(self, table: str) -> Path:
        """The part's file of `table`."""
        return self.path / f"{table}.parquet"

    def replaces(self) -> set[str]:
        """The names of the parts that this one replaces."""
        if not self.is_compacted:
            return set()
        about = pq.read_metadata(self.file("steps")).metadata
        return set(about[REPLACES.encode()].decode().split())

    def steps(self) -> set[tuple[int, str]]:
        """The (step, phase) pairs it holds."""
        if not self.is_compacted:
            return {(self.first, self.phase)}
        table = pq.read_table(self.file("steps"), columns=["step", "phase"])
        return set(zip(table["step"].to_pylist(), table["phase"].to_pylist(), strict=True))

    def __str__(self) -> str:
        """The steps in the part according to its name: `val step 30`, `steps 1 to 32`."""
        return (
            f"steps {self.first} to {self.last}" if self.is_compacted else f"{self.phase} step {self.first}"
        )


def all_parts(directory: Path) -> list[Part]:
    """Every complete part in `directory`, including garbage, in the order of their steps."""
    if not directory.is_dir():
        return []
    parts = [_parse(entry) for entry in directory.iterdir()]
    return sorted((part for part in parts if part), key=lambda part: (part.first, part.last, part.number))


def _parse(path: Path) -> Part | None:
    if match := _PLAIN.fullmatch(path.name):
        step = int(match["first"])
        return Part(path, step, step, match["phase"], match["worker"], int(match["number"]))
    if match := _COMPACTED.fullmatch(path.name):
        first, last = int(match["first"]), int(match["last"])
        return Part(path, first, last, "", match["worker"], int(match["number"]))
    return None


def live_parts(directory: Path, without: Set[Path] = frozenset()) -> list[Part]:
    """The valid parts: complete, not replaced by another, and not in `without`.

    Raises what pyarrow does for a compacted part that cannot be read.
    """
    parts = [part for part in all_parts(directory) if part.path not in without]
    garbage = set[str]()
    for part in parts:
        try:
            garbage |= part.replaces()
        except FileNotFoundError:
            if part.path.exists():
                raise
            return live_parts(directory, without)  # it was replaced and removed since it was listed
    return [part for part in parts if part.path.name not in garbage]


def damaged_parts(directory: Path) -> dict[Part, str]:
    """The parts with a file whose footer cannot be read, each with the file and why.

    Values are not looked at. Raises OSError for a file that is only out of reach.
    """
    parts = {part: _fault(part) for part in all_parts(directory)}
    replaced = set[str]().union(*(part.replaces() for part, fault in parts.items() if not fault))
    return {
        part: fault
        for part, fault in parts.items()
        if fault and part.path.name not in replaced and part.path.exists()
    }


def _fault(part: Part) -> str:
    for table, schema in PARTS.items():
        fault = footer_fault(part.file(table), schema)
        if fault:
            return fault
    return ""


def footer_fault(file: Path, schema: pa.Schema) -> str:
    """What is wrong with a Parquet file by its footer, which names the file; empty if nothing is."""
    try:
        if pq.read_schema(file).names == schema.names:
            return ""
        return f"{file}: it has the columns of another version of srl"
    except (pa.ArrowException, OSError) as error:
        if not is_damage(error):
            raise
        return f"{file}: {error_line(error)}"


def is_damage(error: BaseException) -> bool:
    """Whether an error in reading a file comes from its content, not from the machine."""
    if isinstance(error, OSError):  # Arrow's errors for damaged files have no number
        return error.errno in (None, errno.ENOENT, errno.EIO)
    return isinstance(error, pa.ArrowException) and not isinstance(error, MemoryError)


def write_part(
    directory: Path, step: int, phase: str, worker: str, number: int, tables: Mapping[str, pa.Table]
) -> None:
    """Write the tables of one step as a part, atomically."""
    name = f"step-{step:06d}-{phase}-{worker}-{number:06d}"
    with atomic_directory(directory / name) as path:
        for table, content in tables.items():
            with _parquet(path, table) as file:
                file.write_table(content)


def next_number(directory: Path, worker: str) -> int:
    """The number of `worker`'s next part."""
    return 1 + max((part.number for part in all_parts(directory) if part.worker == worker), default=0)


def merge_parts(directory: Path, parts: list[Part], worker: str, keep: Keep | None = None) -> None:
    """Write one compacted part that replaces `parts`, with the rows that `keep` returns for each table.

    The old parts stay on disk as garbage, for current readers.
    """

    def batches(table: str) -> Iterator[pa.Table]:
        for part in parts:
            with pq.ParquetFile(part.file(table)) as file:
                for group in range(file.num_row_groups):
                    yield file.read_row_group(group).replace_schema_metadata(None)

    replaces = {name for part in parts for name in (part.path.name, *part.replaces())}
    first, last = min(part.first for part in parts), max(part.last for part in parts)
    number = next_number(directory, worker)
    write_compacted(
        directory / f"steps-{first:06d}-{last:06d}-{worker}-{number:06d}", batches, replaces, keep
    )


def write_compacted(
    path: Path, batches: Callable[[str], Iterable[pa.Table]], replaces: set[str], keep: Keep | None = None
) -> None:
    """Write a compacted part from `batches(table)`, with only one row group in memory at a time."""
    with atomic_directory(path) as aside:
        for table in PARTS:
            with _parquet(aside, table) as file:
                for group in _together(batches(table), keep):
                    file.write_table(group)
                if table == "steps":
                    file.add_key_value_metadata({REPLACES: " ".join(sorted(replaces))})


def _together(batches: Iterable[pa.Table], keep: Keep | None) -> Iterator[pa.Table]:
    """The rows that `keep` returns for the batches, concatenated to row groups."""
    group: list[pa.Table] = []
    size = 0
    for batch in batches:
        group.append(keep(batch) if keep else batch)
        size += group[-1].nbytes
        if size > _GROUP_BYTES:
            yield pa.concat_tables(group)
            group, size = [], 0
    if any(table.num_rows for table in group):
        yield pa.concat_tables(group)


def _parquet(directory: Path, table: str) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        directory / f"{table}.parquet",
        PARTS[table],
        compression="zstd",
        compression_level=1,
        use_dictionary=_DICTIONARY,  # numbers rarely repeat, so dictionaries do not pay
        use_byte_stream_split=_SPLIT,
        write_page_checksum=True,
    )


def sweep(directory: Path) -> None:
    """Delete replaced parts, and those that a killed writer was deleting."""
    live = {part.path for part in live_parts(directory)}
    for part in all_parts(directory):
        if part.path not in live:
            discard(part.path)
    remove_leftovers(directory)
