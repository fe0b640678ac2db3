"""Suites: the question sets of one evaluation, as a manifest says them, and whether their rows are those."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from srl.config.yaml12 import Lined, parse
from srl.data.parquet import read_questions
from srl.data.sources import source_of
from srl.data.splits import canonical_split
from srl.errors import UserError, expected, nearest, parsing
from srl.files import check_format, check_input, digest_text
from srl.trajectory import Question

DEFAULT = "search-r1"
_SUITES = Path(__file__).parent.parent / "suites"
_ENDS = (".parquet", ".jsonl")
_MERGED = "test.parquet"


class SuiteSet(BaseModel):
    """One set of questions. `rows` and `digest` are checked where they are given.

    `file` is relative to the manifest; with a `source` (a name of `srl data list`) it may be as published.
    Without `file` the set is looked for by name and split in the directory of the suite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    split: str = ""
    rows: int | None = Field(None, ge=1)
    digest: str = ""
    source: str = ""
    file: Path | None = None


class Suite(BaseModel):
    """A manifest: the name of the suite and its sets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[\w.-]+$")
    sets: tuple[SuiteSet, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Rows:
    """The questions of one set as they are in `file`."""

    file: Path
    questions: tuple[Question, ...]
    digest: str


def read_suite(name: str) -> Suite:
    """The suite of that name, or of a manifest file. Raises UserError that names the key at fault."""
    known = sorted(path.stem for path in _SUITES.glob("*.yaml"))
    path = _SUITES / f"{name}.yaml" if name in known else Path(name)
    if not path.is_file():
        raise UserError(
            f"no suite {name!r}: give a manifest file (YAML), or one of {', '.join(known)}"
            f"{nearest(name, known)}"
        )
    with parsing(path):
        text = path.read_text(encoding="utf-8-sig")
    found = parse(text, str(path))
    if not isinstance(found, Lined):
        raise UserError(f"{path}: expected a suite manifest with the keys format, name and sets")
    check_format(path, found.pop("format", None))
    try:
        suite = Suite.model_validate(dict(found))
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {_place(first['loc'])}: {_problem(first)}") from error
    _check_sets(path, suite)
    return suite.model_copy(update={"sets": tuple(_located(one, path.parent) for one in suite.sets)})


def _place(parts: Sequence[int | str]) -> str:
    """`sets[2].rows`"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")


def _problem(error: Mapping[str, Any]) -> str:
    return "unknown key" if error["type"] == "extra_forbidden" else expected(error)


def _check_sets(path: Path, suite: Suite) -> None:
    names = [one.name for one in suite.sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: the set {twice!r} is there twice; give each set a name of its own")
    for one in suite.sets:
        if not ((one.source and one.split) or one.file):
            raise UserError(f"{path}: the set {one.name!r} needs a file, or a source and a split")
        if one.source and source_of(one.source).is_corpus:
            raise UserError(f"{path}: the source of the set {one.name!r} is a corpus, expected questions")


def _located(one: SuiteSet, folder: Path) -> SuiteSet:
    """The set with its split as srl names it, and its file relative to the manifest."""
    split = canonical_split(one.split) if one.split else ""
    return one.model_copy(update={"split": split, "file": one.file and folder / one.file.expanduser()})


def read_sets(suite: Suite, folder: Path) -> dict[str, Rows]:
    """The rows of each set, from its own file or a file in `folder`.

    There a set is `NAME.parquet`, `NAME.jsonl`, `NAME/SPLIT.parquet` or `NAME/SPLIT.jsonl`, or its rows in
    `test.parquet`, which Search-R1 writes with all sets. Raises UserError for missing files (with what to
    type), for rows without a question or an answer, and for an id that occurs twice.
    """
    files = _find_files(suite, folder)
    sets, owner = {}, dict[str, str]()
    for one in suite.sets:
        questions = tuple(_questions(one, files[one.name]))
        for question in questions:
            if question.id in owner:
                raise UserError(
                    f"{files[one.name]}: the id {question.id!r} of the set {one.name} is also in the set "
                    f"{owner[question.id]}; ids must be unique in a suite"
                )
            owner[question.id] = one.name
        sets[one.name] = Rows(files[one.name], questions, rows_digest(questions))
    return sets


def _find_files(suite: Suite, folder: Path) -> dict[str, Path]:
    """The file of each set. Raises UserError that says how to get those that are missing."""
    found = {one.name: _file_of(one, folder) for one in suite.sets}
    missing = [one for one in suite.sets if found[one.name] is None]
    if missing:
        ways = (
            shlex.join(
                ["srl", "data", "prepare", f"{one.source}:{one.split}", "--out", str(folder / one.name)]
            )
            for one in missing
        )
        raise UserError(
            f"no file of {len(missing)} of the {len(suite.sets)} sets of {suite.name} in {folder}; give "
            f"the directory with --data, or type: {' && '.join(ways)}"
        )
    return {name: path for name, path in found.items() if path is not None}


def _file_of(one: SuiteSet, folder: Path) -> Path | None:
    if one.file is not None:
        check_input(one.file)
        return one.file
    names = (f"{one.name}{end}" for end in _ENDS)
    below = (f"{one.name}/{one.split}{end}" for end in _ENDS)
    return next((folder / name for name in (*names, *below, _MERGED) if (folder / name).is_file()), None)


def _questions(one: SuiteSet, path: Path) -> list[Question]:
    """The questions of a set. Raises UserError if its file has none of its source."""
    if not one.source:
        return read_questions(path)
    source = source_of(one.source)
    found = list(source.questions(path, one.split))
    own = [item for item in found if item.data_source == (source.data_source or item.data_source)]
    if not own:
        sources = ", ".join(sorted({item.data_source for item in found}))
        raise UserError(f"{path}: expected rows of the set {one.name}, found those of {sources}")
    return own


def rows_digest(questions: Iterable[Question]) -> str:
    """32 hex digits for questions and their golden answers, in any order and any format of the file.

    A question mark at the end, white space and repeated answers make no difference.
    """
    rows = (
        digest_text(
            " ".join(item.text.split()).rstrip(" ?"), *sorted({text.strip() for text in item.golden_answers})
        )
        for item in questions
    )
    return digest_text(*sorted(rows))


def changes(suite: Suite, sets: Mapping[str, Rows]) -> dict[str, str]:
    """What is different, in words, for each set whose rows are not those of the manifest."""
    different = {}
    for one in suite.sets:
        rows = sets[one.name]
        if one.rows is not None and len(rows.questions) != one.rows:
            different[one.name] = f"{len(rows.questions):,} rows, expected {one.rows:,}"
        elif one.digest and rows.digest != one.digest:
            different[one.name] = f"digest {rows.digest[:12]}, expected {one.digest[:12]}"
    return different
