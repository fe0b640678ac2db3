"""Preparing a training directory: questions of one or more sources, their corpora, a manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from srl.data.corpus import digest_corpus, write_corpus
from srl.data.hub import download
from srl.data.merge import GoldPassages, Merging
from srl.data.parquet import is_training_parquet, write_questions
from srl.data.sources import Source, source_of
from srl.data.split_passages import Splitter, name_parts
from srl.data.splits import (
    ALIASES,
    SPLITS,
    canonical_split,
    contradicting,
    guess_split,
    split_off,
    without_copies,
    without_repeats,
)
from srl.errors import UserError
from srl.files import atomic_directory, check_input, files_in, replaceable, write_manifest
from srl.protocol import Template
from srl.protocol import template as template_of
from srl.trajectory import Passage, Question

CORPUS = "corpus.jsonl"
KIND = "data"
_FILES = (*(f"{split}.parquet" for split in SPLITS), CORPUS)


@dataclass(frozen=True, slots=True)
class Input:
    """A source to read. Without `files` it is downloaded; without `split` the file's name tells the split."""

    source: Source
    files: tuple[Path, ...] = ()
    split: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was written to `directory`; `notes` are messages for the user.

    `merged` passages are not in the corpus, since it has the same title and text already; `split` ones are
    there in parts. `gold` counts the questions by how their gold passages were found
    (`srl.data.merge.GoldBy`); empty without a corpus.
    """

    directory: Path
    questions: dict[str, int]
    passages: int
    notes: tuple[str, ...] = ()
    merged: int = 0
    split: int = 0
    gold: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Composition:
    """The questions by split, the sources read, and notes for the user."""

    splits: dict[str, list[Question]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    notes: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)

    def leave_out(self, path: Path, skipped: Mapping[str, int]) -> None:
        """Note the rows of a file that were left out, by reason."""
        for reason, number in skipped.items():
            self.notes.append(f"{path.name}: {number:,} rows left out: {reason}")


def parse_input(text: str, files: Sequence[Path] = (), split: str | None = None) -> Input:
    """Parse `SOURCE[:SPLIT][=FILE[,FILE…]]`; `files` and `split` are the defaults."""
    left, equals, right = text.partition("=")
    name, colon, own_split = left.partition(":")
    paths = tuple(Path(part) for part in right.split(",") if part) if equals else tuple(files)
    if equals and not paths:
        raise UserError(f"{text!r}: expected SOURCE=FILE[,FILE…], found no file after the =")
    chosen = own_split if colon else split
    return Input(source_of(name), paths, canonical_split(chosen) if chosen else None)


def prepare(
    inputs: Sequence[Input],
    out: Path,
    *,
    template: str = "search-r1",
    limit: int | None = None,
    validation: float | Mapping[str, float] = 0.0,
    contexts: bool = True,
    merge: bool = True,
    passage_words: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Prepared:
    """Write `{train,validation,test}.parquet` and `corpus.jsonl`, as far as there are any, and the manifest.

    `limit` is the maximum number of questions from each file, `validation` the share or number of training
    questions to hold out, of all or of each data source by name, `contexts` whether paragraphs that come with
    questions join the corpus, `merge` whether passages with the same title and text become one
    (`srl.data.merge`), `passage_words` the most words of a passage, beyond which it is split
    (`srl.data.split_passages`). Questions name their gold passages by their ids in this corpus. A question of
    two files of a split is there once. One that another split has, in the same words or with the same id of
    its file, is dropped: from training first, then from validation.
    `overwrite` replaces a directory that an earlier call wrote and that holds nothing else. `progress` is
    called with the number of passages written. Raises UserError, and then leaves nothing behind.
    """
    rendering = template_of(template)
    if rendering.retrieves:
        raise UserError(
            f"--template {template} has passages in its prompts, which an episode retrieves: prepare with "
            f"another template, and train or evaluate with data.template={template}"
        )
    named = [(each, path) for each in inputs for path in _files(each)]
    replace = replaceable(KIND, "a directory of prepared data") if overwrite else None
    with atomic_directory(out, replace=replace) as folder:
        made = _read(named, limit)
        split = None if passage_words is None else Splitter(passage_words).split
        merging = Merging(_gold(made, named), merge, split)
        passages = _write_passages(folder, _passages(made, named, contexts, progress), merging)
        if passages:
            _resolve(made, merging.gold)
        _set_aside(made, validation)  # by whole paragraphs, so before the parts of a split one are named
        _name_parts(made, merging.gold_parts)
        counts = _write_splits(folder, made, rendering)
        if not counts and not passages:
            raise UserError("nothing to write: the sources contain no questions and no passages")
        settings = {"template": template, "limit": limit, "validation": validation, "contexts": contexts}
        merged, gold = merging.merged, {str(by): count for by, count in merging.gold.counts.items()}
        done = {"sources": made.sources, "questions": counts, "passages": passages, "notes": made.notes}
        settings |= {"merge": merge, "passage_words": passage_words}
        found = {"merged": merged, "split": merging.split, "gold": gold, "files": files_in(folder)}
        write_manifest(folder, KIND, {**settings, **done, **found})
    return Prepared(out, counts, passages, tuple(made.notes), merged, merging.split, gold)


def _gold(made: _Composition, files: Sequence[tuple[Input, Path]]) -> GoldPassages:
    """The gold passages that the questions name, with their texts: those of question files first."""
    gold = GoldPassages(question for questions in made.splits.values() for question in questions)
    for each, path in sorted(files, key=lambda named: named[0].source.is_corpus):
        if each.source.is_corpus and not gold.unknown:
            break
        for passage in each.source.passages(path, Counter()):
            gold.know(passage)
    return gold


def _resolve(made: _Composition, gold: GoldPassages) -> None:
    for split, questions in made.splits.items():
        made.splits[split] = list(map(gold.resolve, questions))


def _name_parts(made: _Composition, parts: Mapping[str, Sequence[Passage]]) -> None:
    for split, questions in made.splits.items():
        made.splits[split] = [name_parts(question, parts) for question in questions]


def _files(each: Input) -> tuple[Path, ...]:
    """The files of an input, downloaded where none are given. Raises UserError for a missing one."""
    for path in each.files:
        if not (each.source.is_corpus and path.is_dir()):
            check_input(path)
    if each.files:
        return each.files
    if each.source.is_corpus:
        return (download(each.source),)
    first = next(iter(each.source.hub_files), "train")
    return (download(each.source, each.split or first),)


def _read(files: Sequence[tuple[Input, Path]], limit: int | None) -> _Composition:
    made, rows = _Composition(), Counter[tuple[str, str]]()
    read: dict[str, list[list[Question]]] = {split: [] for split in SPLITS}
    for each, path in files:
        split = each.split or guess_split(path) or _only_split(each.source) or "train"
        skipped: Counter[str] = Counter()
        key = each.source.data_source, split
        questions = list(islice(each.source.questions(path, split, skipped, rows[key]), limit))
        rows[key] += len(questions) + skipped.total()
        by_row = _has_splits(each, path)
        for name, own in read.items():
            own.append([one for one in questions if ((by_row and _split_in(one)) or split) == name])
        _account(made, each, path, split, len(questions), skipped)
    for name, lists in read.items():
        made.splits[name] = without_copies(lists)
        if copies := sum(map(len, lists)) - len(made.splits[name]):
            made.notes.append(f"{copies:,} questions of {name} are in two files; each is kept once")
        if contrary := contradicting(made.splits[name]):
            made.notes.append(
                f"{len(contrary):,} questions of {name} are there more than once, with no answer in common; "
                f"the first is {contrary[0].id!r}"
            )
        _check_ids(made.splits[name], lists, [path for _, path in files])
    return made


def _check_ids(kept: Sequence[Question], lists: Sequence[Sequence[Question]], paths: Sequence[Path]) -> None:
    """Raises UserError for two questions with one id, with the names of their files."""
    counts = Counter(question.id for question in kept)
    if name := next((name for name, count in counts.items() if count > 1), None):
        both = [
            path
            for path, questions in zip(paths, lists, strict=True)
            if any(question.id == name for question in questions)
        ]
        raise UserError(
            f"{both[-1]}: the question id {name!r} is also in {both[0]}: rename one of the files, or give "
            "its questions ids of their own"
        )


def _only_split(source: Source) -> str | None:
    """The split of a data set that has only one (PopQA and Bamboogle are test sets)."""
    return next(iter(source.hub_files)) or None if len(source.hub_files) == 1 else None


def _has_splits(each: Input, path: Path) -> bool:
    """Whether the rows of a file say their split, and no other was asked for."""
    return each.split is None and (each.source.format is None or is_training_parquet(path))


def _split_in(question: Question) -> str:
    """The split in the row, or an empty text."""
    own = ALIASES.get(question.split.lower(), question.split.lower())
    return own if own in SPLITS else ""


def _account(
    made: _Composition, each: Input, path: Path, split: str, count: int, skipped: Counter[str]
) -> None:
    made.leave_out(path, skipped)
    if count and each.split is None and guess_split(path) is None and not _has_splits(each, path):
        made.notes.append(f"{path.name}: read as {split}, since its name has no split; --split changes it")
    entry: dict[str, Any] = {"source": each.source.name, "licence": each.source.licence, "file": path.name}
    entry |= {"digest": digest_corpus(path), "skipped": dict(skipped)}
    made.sources.append({**entry, "split": split, "questions": count} if count else entry)


def _set_aside(made: _Composition, validation: float | Mapping[str, float]) -> None:
    """Drop questions that a later split has too, and hold out a validation set of the others."""
    _drop_repeats(made, "validation", "test")
    _drop_repeats(made, "train", "validation", "test")
    splits = made.splits
    if validation:
        if not splits["train"]:
            raise UserError("a validation set is split off training questions, and there are none")
        splits["train"], held = split_off(splits["train"], validation)
        splits["validation"] = splits["validation"] + held
        _drop_repeats(made, "train", "validation")  # what the training questions had twice


def _drop_repeats(made: _Composition, name: str, *others: str) -> None:
    splits = made.splits
    kept = without_repeats(splits[name], (question for other in others for question in splits[other]))
    if dropped := len(splits[name]) - len(kept):
        made.notes.append(
            f"{dropped:,} questions dropped from {name}: they are also in {' or '.join(others)}"
        )
    splits[name] = kept


def _write_splits(folder: Path, made: _Composition, rendering: Template) -> dict[str, int]:
    counts = {}
    for split, questions in made.splits.items():
        if questions:
            counts[split] = write_questions(
                folder / f"{split}.parquet", _rendered(questions, rendering, split)
            )
    return counts


def _rendered(questions: Iterable[Question], rendering: Template, split: str) -> Iterator[Question]:
    for question in questions:
        yield replace(question, prompt=rendering.messages(question.text), split=split)


def _write_passages(folder: Path, passages: Iterator[Passage], merging: Merging) -> int:
    """Stream all passages into one corpus and return their number; no file is written for 0."""
    first = next(passages, None)
    if first is None:
        return 0
    return write_corpus(folder / CORPUS, _chain(first, passages), merging.written)


def _chain(first: Passage, rest: Iterator[Passage]) -> Iterator[Passage]:
    yield first
    yield from rest


def _passages(
    made: _Composition,
    files: Sequence[tuple[Input, Path]],
    contexts: bool,
    progress: Callable[[int], None] | None,
) -> Iterator[Passage]:
    count = 0
    for each, path in files:
        skipped: Counter[str] = Counter()
        for passage in each.source.passages(path, skipped) if contexts or each.source.is_corpus else ():
            count += 1
            if progress is not None and count % 1000 == 0:
                progress(count)
            yield passage
        made.leave_out(path, skipped)
    if progress is not None:
        progress(count)
