"""Parts: directories with one Parquet file per table, which appear atomically by a rename.

    log/parts/step-000030-train-main-000031/            one write of one step
    log/parts/steps-000001-000032-main-000040/          compacted; part.json names what it replaces

A part is garbage as soon as a part that replaces it appears. So a reader that lists the directory sees each
step exactly once, whenever the writer is killed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from srl.files import atomic_directory, discard, remove_leftovers
from srl.store.older import with_current_columns
from srl.store.run_info import DamagedError
from srl.store.schema import FORMAT, PARTS, PER_TOKEN

PARTS_DIRECTORY = "parts"
FINISHED = "log.duckdb"

_PLAIN = re.compile(r"step-(?P<first>\d{6,})-(?P<phase>[a-z]+)-(?P<worker>\w+)-(?P<number>\d{6,})")
_COMPACTED = re.compile(r"steps-(?P<first>\d{6,})-(?P<last>\d{6,})-(?P<worker>\w+)-(?P<number>\d{6,})")
_REPLACES = "part.json"
_GROUP_BYTES = 32 << 20

_DICTIONARY = ["run_id", "trajectory_id", "phase", "kind", "data_source", "question_id", "question", "prompt"]
_DICTIONARY += ["metadata", "split", "end", "status", "index_digest", "retriever"]
_DICTIONARY += [f"hits.list.element.{name}" for name in ("passage_id", "title", "contents")]
_SPLIT = [f"{name}.list.element" for name in ("logprobs", *PER_TOKEN)]

Keep = Callable[[pa.Table], pa.Table]


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

    def replaced(self) -> set[str]:
        """The names of the parts that this one replaces. Raises DamagedError."""
        if not self.is_compacted:
            return set()
        file = self.path / _REPLACES
        try:
            return set(json.loads(file.read_text(encoding="utf-8"))["replaces"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{file}: unexpected content ({error})") from error

    def steps(self) -> set[tuple[int, str]]:
        """The (step, phase) pairs it holds."""
        if not self.is_compacted:
            return {(self.first, self.phase)}
        table = pq.read_table(self.file("steps"), columns=["step", "phase"])
        return set(zip(table["step"].to_pylist(), table["phase"].to_pylist(), strict=True))

    def steps_in_words(self) -> str:
        """The steps in the part according to its name: `val step 30`, `steps 1 to 32`."""
        return (
            f"steps {self.first} to {self.last}" if self.is_compacted else f"{self.phase} step {self.first}"
        )


def all_parts(directory: Path) -> list[Part]:
    """Every complete part in `directory`, including garbage, in the order of their steps."""
    if not directory.is_dir():
        return []
    found = [_parse(entry) for entry in directory.iterdir() if not entry.name.startswith(".")]
    return sorted((part for part in found if part), key=lambda part: (part.first, part.last, part.number))


def live_parts(directory: Path, without: Set[Path] = frozenset(), *, strict: bool = True) -> list[Part]:
    """The valid parts: complete, not replaced by another, and not in `without`.

    Raises DamagedError for a part that does not say what it replaces; if not `strict`, such a part replaces
    nothing.
    """
    parts = [part for part in all_parts(directory) if part.path not in without]
    garbage: set[str] = set()
    faults: dict[str, DamagedError] = {}
    for part in parts:
        try:
            garbage |= part.replaced()
        except DamagedError as error:
            if not part.path.exists():  # removed since it was listed, when another had replaced it
                return live_parts(directory, without, strict=strict)
            faults[part.path.name] = error
    live = [part for part in parts if part.path.name not in garbage]
    if fault := next((faults[part.path.name] for part in live if strict and part.path.name in faults), None):
        raise fault
    return live


def _parse(path: Path) -> Part | None:
    if match := _PLAIN.fullmatch(path.name):
        step = int(match["first"])
        return Part(path, step, step, match["phase"], match["worker"], int(match["number"]))
    if match := _COMPACTED.fullmatch(path.name):
        first, last = int(match["first"]), int(match["last"])
        return Part(path, first, last, "", match["worker"], int(match["number"]))
    return None


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

    def batches(table: str) -> Iterable[pa.Table]:
        for part in parts:
            yield from _row_groups(part.file(table))

    replaces = {name for part in parts for name in (part.path.name, *part.replaced())}
    first, last = min(part.first for part in parts), max(part.last for part in parts)
    path = compacted_path(directory, first, last, worker, next_number(directory, worker))
    write_compacted(path, batches, replaces, keep)


def compacted_path(directory: Path, first: int, last: int, worker: str, number: int) -> Path:
    """The path of a compacted part of these steps."""
    return directory / f"steps-{first:06d}-{last:06d}-{worker}-{number:06d}"


def write_compacted(
    path: Path, batches: Callable[[str], Iterable[pa.Table]], replaces: set[str], keep: Keep | None = None
) -> None:
    """Write a compacted part from `batches(table)`, with only some batches in memory at a time."""
    with atomic_directory(path) as aside:
        for table in PARTS:
            with _parquet(aside, table) as file:
                current = (with_current_columns(batch, table) for batch in batches(table))
                for group in _together(current, keep):
                    file.write_table(group)
        (aside / _REPLACES).write_text(json.dumps({"format": FORMAT, "replaces": sorted(replaces)}))


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


def _row_groups(path: Path) -> Iterable[pa.Table]:
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group)


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


def remove_part(part: Part) -> None:
    """Hide a part by a rename, then delete it."""
    discard(part.path)


def sweep(directory: Path) -> None:
    """Delete replaced parts, and those that a killed writer was deleting."""
    live = {part.path for part in live_parts(directory)}
    for part in all_parts(directory):
        if part.path not in live:
            remove_part(part)
    remove_leftovers(directory)
