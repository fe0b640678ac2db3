"""Suites: the question sets of one evaluation, as a manifest says them, and their questions."""

from __future__ import annotations

import shlex
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from srl.config.yaml12 import Lined, parse
from srl.data.parquet import read_questions
from srl.data.sources import source_of
from srl.data.splits import canonical_split
from srl.errors import UserError, expected, nearest, parsing
from srl.files import check_format, check_input
from srl.trajectory import Question

DEFAULT = "search-r1"
_SUITES = Path(__file__).parent.parent / "suites"
_ENDS = (".parquet", ".jsonl")
_MERGED = "test.parquet"


class SuiteSet(BaseModel):
    """One set of questions. `rows` is checked where it is given.

    `file` is relative to the manifest; with a `source` (a name of `srl data list`) it may be as published.
    Without `file` the set is looked for by name and split in the directory of the suite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    split: str = ""
    rows: int | None = Field(None, ge=1)
    source: str = ""
    file: Path | None = None

    @model_validator(mode="after")
    def _can_be_found(self) -> SuiteSet:
        if not ((self.source and self.split) or self.file):
            raise ValueError(f"the set {self.name!r} needs a file, or a source and a split")
        if self.source and source_of(self.source).is_corpus:
            raise ValueError(f"the source of the set {self.name!r} is a corpus")
        return self


class Suite(BaseModel):
    """A manifest: the name of the suite and its sets."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[\w.-]+$")
    sets: tuple[SuiteSet, ...] = Field(min_length=1)


def read_suite(name: str) -> Suite:
    """The suite of that name, or of a manifest file. Raises UserError that names the key at fault."""
    known = sorted(path.stem for path in _SUITES.glob("*.yaml"))
    path = _SUITES / f"{name}.yaml" if name in known else Path(name)
    if not path.is_file():
        hint = f"a manifest file (YAML), or one of {', '.join(known)}"
        raise UserError(f"no suite {name!r}{nearest(name, known)}", hint=hint)
    with parsing(path):
        manifest = parse(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(manifest, Lined):
        raise UserError(f"{path}: expected a suite manifest with the keys format, name and sets")
    check_format(path, manifest.pop("format", None))
    try:
        suite = Suite.model_validate(dict(manifest))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise UserError(f"{path}: {place.lstrip('.')}: {expected(first)}") from error
    names = [each.name for each in suite.sets]
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise UserError(f"{path}: the set {twice!r} is there twice; give each set a name of its own")
    sets = [
        each.model_copy(update={
            "split": canonical_split(each.split) if each.split else "",
            "file": each.file and path.parent / each.file.expanduser(),
        })
        for each in suite.sets
    ]  # fmt: skip
    return suite.model_copy(update={"sets": tuple(sets)})


def read_sets(suite: Suite, folder: Path) -> dict[str, tuple[Path, list[Question]]]:
    """The file and the questions of each set, from its own file or a file in `folder`.

    There a set is `NAME.parquet`, `NAME.jsonl`, `NAME/SPLIT.parquet` or `NAME/SPLIT.jsonl`, or its rows in
    `test.parquet`, which Search-R1 writes with all sets. Raises UserError for missing files (with what to
    type), for rows without a question or an answer, for another number of rows than the manifest's, and for
    an id that occurs twice.
    """
    files = {each.name: _file_of(each, folder) for each in suite.sets}
    if missing := [each for each in suite.sets if files[each.name] is None]:
        prepare = ("srl", "data", "prepare")
        ways = (
            shlex.join([*prepare, f"{each.source}:{each.split}", "--out", str(folder / each.name)])
            for each in missing
        )
        what = f"no file of {len(missing)} of the {len(suite.sets)} sets of {suite.name} in {folder}"
        raise UserError(what, hint=f"give the directory with --data, or type: {' && '.join(ways)}")
    sets, owner = {}, dict[str, str]()
    for each in suite.sets:
        file = files[each.name]
        assert file is not None
        questions = _questions(each, file)
        if each.rows not in (None, len(questions)):
            raise UserError(
                f"{file}: {len(questions):,} rows of {each.name}, expected {each.rows:,}", key=each.name
            )
        for question in questions:
            if (other := owner.setdefault(question.id, each.name)) != each.name:
                raise UserError(f"{file}: the id {question.id!r} of {each.name} is also in the set {other}")
        sets[each.name] = file, questions
    return sets


def _file_of(one: SuiteSet, folder: Path) -> Path | None:
    if one.file is not None:
        check_input(one.file)
        return one.file
    names = (f"{start}{end}" for start in (one.name, f"{one.name}/{one.split}") for end in _ENDS)
    return next((folder / name for name in (*names, _MERGED) if (folder / name).is_file()), None)


def _questions(one: SuiteSet, path: Path) -> list[Question]:
    """The questions of a set. Raises UserError if its file has none of its source."""
    if not one.source:
        return read_questions(path)
    source = source_of(one.source)
    every = list(source.questions(path, one.split))
    own = [each for each in every if each.data_source == (source.data_source or each.data_source)]
    if not own:
        sources = ", ".join(sorted({each.data_source for each in every}))
        raise UserError(f"{path}: expected rows of the set {one.name}, found those of {sources}")
    return own
