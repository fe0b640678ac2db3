"""Finds damaged files in a log.

A healthy log is not checked, so that it opens fast. Readers check after a failed read, and continue without
the damaged files. The writer checks when a run is resumed and when a merge fails, and moves damaged files to
`damaged/`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.files import MANIFEST
from srl.store import run_info
from srl.store.database import attach, in_one_line, scan
from srl.store.parts import FINISHED, PARTS_DIRECTORY, Part, live_parts
from srl.store.rescores import DIRECTORY as RESCORES
from srl.store.rescores import rescore_files
from srl.store.run_info import DamagedError
from srl.store.schema import PARTS
from srl.store.watches import watch_file
from srl.workspace import is_evaluation

DAMAGED = "damaged"

_MAY_BE_WHOLE = re.compile(r"set lock|version|permission denied|too many open", re.IGNORECASE)
"""DuckDB's messages for a file that another program holds open, or that a newer DuckDB wrote."""

_FAULTS = (
    DamagedError, OSError, duckdb.IOException, duckdb.InvalidInputException, duckdb.InternalException,
    duckdb.FatalException, duckdb.SerializationException, pa.ArrowException,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged part, manifest or database at `place`; `why` names the file.

    `steps` are the steps it holds, such as `train step 30`. If it `may_be_whole`, it is only not accessible
    now, and is not set aside.
    """

    log: Path
    place: Path
    why: str
    steps: str
    may_be_whole: bool = False

    def __str__(self) -> str:
        return f"run {self.log.parent.name}: {self.why}"


def may_be_damage(error: BaseException) -> bool:
    """Whether an error in reading a log may be caused by a damaged file."""
    if (
        isinstance(error, OSError) and error.errno is not None
    ):  # Arrow's errors for damaged files have no errno
        return error.errno in (errno.ENOENT, errno.EIO)
    if isinstance(error, MemoryError):
        return False
    return isinstance(error, _FAULTS) or type(error) is duckdb.Error  # raised for corrupt pages


def find_damage(log: Path, *, thorough: bool = True) -> list[Damage]:
    """The damage in `log`: reads every value if `thorough`, else only the metadata of each file."""
    found = [*_manifest_damage(log)]
    if (log / FINISHED).exists():
        found += _database_damage(log, thorough)
    else:
        found += _part_damage(log, thorough)
    found += damage_beside(log, thorough=thorough)
    return [damage for damage in found if damage.place.exists()]  # compaction removes parts


def further_damage(logs: Sequence[Path], known: Mapping[Path, Damage]) -> dict[Path, Damage]:
    """Further damage: from the metadata of each file, or if that finds none, from all values."""
    for thorough in (False, True):
        found = [damage for log in logs for damage in find_damage(log, thorough=thorough)]
        if new := {damage.place: damage for damage in found if damage.place not in known}:
            return new
    return {}


def left_out(damage: Damage) -> str:
    """The warning for a reader that continues without a damaged file."""
    mend = "restore the file, or set it aside" if damage.place.exists() else "restore it, or accept the loss,"
    run = damage.log.parent
    command = "`srl eval run` as before" if is_evaluation(run) else f"`srl train --resume --run {run.name}`"
    if damage.place.parent.name == RESCORES:
        return f"{damage}; left out: {damage.steps}; delete the file, and type `srl eval rescore` as before"
    return f"{damage}; left out: {damage.steps or 'the run'}; {mend} and continue with {command}"


def lost_log(run: Path) -> Damage | None:
    """The missing log of `run`, if remaining parts or checkpoints show that it had one; else None.

    A run that is being set up has neither yet.
    """
    log = run / "log"
    if run_info.has_log(log) or not (run / "run.json").is_file():
        return None
    if log.exists() and not log.is_dir():
        return Damage(log, log, f"no log in {log}: it is a file", "")
    if (log / PARTS_DIRECTORY).is_dir() or (log / FINISHED).exists():
        return Damage(log, log / MANIFEST, f"no log in {log}: its {MANIFEST} is missing", "")
    saved = run / "checkpoints"
    if saved.is_dir() and any(saved.iterdir()):
        return Damage(log, log, f"no log in {log}: it is missing", "")
    return None


def set_aside(damage: Damage) -> Path:
    """Move a damaged file to the log's `damaged/`; returns its new path."""
    folder = damage.log / DAMAGED
    folder.mkdir(exist_ok=True)
    taken = sum(1 for _ in folder.glob(f"{damage.place.name}*"))
    target = folder / (f"{damage.place.name}-{taken + 1}" if taken else damage.place.name)
    os.rename(damage.place, target)
    return target


def _manifest_damage(log: Path) -> Iterator[Damage]:
    try:
        run_info.load(log)
    except DamagedError as error:
        yield Damage(log, log / MANIFEST, str(error), "")


def _database_damage(log: Path, thorough: bool) -> Iterator[Damage]:
    try:
        with _connect() as connection:
            attach(connection, log / FINISHED, "log")
            for table in PARTS if thorough else ():
                _read_all(connection, f"log.raw.{table}")
    except duckdb.Error as error:
        why = in_one_line(error)
        is_whole = bool(_MAY_BE_WHOLE.search(why)) or not may_be_damage(error)
        yield Damage(log, log / FINISHED, f"{log / FINISHED}: {why}", "all steps", is_whole)


def _part_damage(log: Path, thorough: bool) -> Iterator[Damage]:
    connection = _connect() if thorough else None
    for part in live_parts(log / PARTS_DIRECTORY, strict=False):
        if why := _part_fault(part, connection):
            connection = connection and _connect()  # some errors invalidate a connection
            yield Damage(log, part.path, why, part.steps_in_words())


def damage_beside(log: Path, *, thorough: bool) -> Iterator[Damage]:
    """The damage in tables that have files of their own."""
    beside = {watch_file(log): "which watches fired"} if watch_file(log).is_file() else {}
    for file, holds in (dict.fromkeys(rescore_files(log), "what was rescored") | beside).items():
        try:
            pq.read_table(file) if thorough else pq.read_schema(file)
        except (pa.ArrowException, OSError) as error:
            if not may_be_damage(error):
                raise
            yield Damage(log, file, f"{file}: {in_one_line(error)}", holds)


def _part_fault(part: Part, connection: duckdb.DuckDBPyConnection | None) -> str:
    """Why a part cannot be read, or an empty string; with a connection, Arrow and DuckDB read all of it.

    Re-raises errors that are not caused by the file, such as out of memory or permission denied.
    """
    try:
        part.replaced()
        for table in PARTS:
            with pq.ParquetFile(part.file(table)) as file:
                for group in range(file.num_row_groups if connection else 0):
                    file.read_row_group(group).validate(full=True)
            if connection:
                _read_all(connection, f"({scan([part.file(table)])})")
    except DamagedError as error:
        return str(error)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if not may_be_damage(error):
            raise
        return f"{part.file(table)}: {in_one_line(error)}"
    return ""


def _connect() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET enable_progress_bar = false")
    return connection


def _read_all(connection: duckdb.DuckDBPyConnection, source: str) -> None:
    connection.execute(f"SELECT count(hash(source)) FROM {source} AS source")
