"""Preparing a training directory: questions of one or more sources, their corpora, a manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
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
    guess_split,
    split_off,
    without_repeats,
)
from srl.errors import UserError
from srl.files import atomic_directory, check_input, files_in, replaceable, write_manifest
from srl.protocol import Template
from srl.protocol import template as template_of
from srl.trajectory import Passage, Question

CORPUS = "corpus.jsonl"
KIND = "data"


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
    there in parts.
    """

    directory: Path
    questions: dict[str, int]
    passages: int
    notes: tuple[str, ...] = ()
    merged: int = 0
    split: int = 0


@dataclass(slots=True)
class _Composition:
    """The questions by split, what the manifest says of each file, and notes for the user."""

    splits: dict[str, list[Question]]
    sources: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def change(self, to: Callable[[Question], Question]) -> None:
        """Put another question in the place of each."""
        self.splits = {split: list(map(to, questions)) for split, questions in self.splits.items()}

    def leave_out(self, path: Path, skipped: Mapping[str, int]) -> None:
        """Note the rows of a file that were left out, by reason."""
        self.notes += [f"{path.name}: {count:,} left out: {why}" for why, count in skipped.items()]

    def drop(self, split: str, *others: str) -> None:
        """Drop the questions of a split that the others have too, and note their number."""
        everything = self.splits[split]
        questions = (question for other in others for question in self.splits[other])
        self.splits[split] = remaining = without_repeats(everything, questions)
        if dropped := len(everything) - len(remaining):
            self.notes.append(f"dropped from {split}: {dropped:,} also in {' or '.join(others)}")


def parse_input(text: str) -> Input:
    """Parse `SOURCE[:SPLIT][=FILE[,FILE…]]`."""
    left, equals, right = text.partition("=")
    name, _, split = left.partition(":")
    paths = tuple(Path(part) for part in right.split(",") if part)
    if equals and not paths:
        raise UserError(f"{text!r}: expected SOURCE=FILE[,FILE…], found no file after the =")
    return Input(source_of(name), paths, canonical_split(split) if split else None)


def prepare(
    inputs: Sequence[Input],
    out: Path,
    *,
    template: str = "search-r1",
    limit: int | None = None,
    validation: float | Mapping[str, float] = 0.0,
    contexts: bool = True,
    passage_words: int | None = None,
    only: Container[str] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Prepared:
    """Write `{train,validation,test}.parquet` and `corpus.jsonl`, as far as there are any, and the manifest.

    `limit` is the maximum number of questions from each file, `validation` the share or number of training
    questions to hold out, of all or of each data source by name, `contexts` whether paragraphs that come with
    questions join the corpus, `passage_words` the most words of a passage, beyond which it is split
    (`srl.data.split_passages`), `only` the ids of the questions that are kept. Questions name their gold
    passages by their ids in this corpus, where passages with the same title and text are one
    (`srl.data.merge`). A question that another split has, in the same words or with the same id of its file,
    is dropped: from training first, then from validation.
    `overwrite` replaces a directory that an earlier call wrote and that holds nothing else. `progress` is
    called with the number of passages written. Raises UserError, and then leaves nothing behind.
    """
    rendering = template_of(template)
    if rendering.retrieves:
        raise UserError(
            f"--template {template} has passages in its prompts, which an episode retrieves",
            hint=f"prepare with another one, and train or evaluate with data.template={template}",
        )
    files = [(each, path) for each in inputs for path in _files(each)]
    replace = replaceable(KIND, "a directory of prepared data") if overwrite else None
    with atomic_directory(out, replace=replace) as folder:
        data = _read(files, limit, only)
        split = None if passage_words is None else Splitter(passage_words).split
        merging = Merging(_gold(data, files), split)
        passages = _passages(data, files, contexts, progress or (lambda count: None))
        count = 0
        if first := next(passages, None):
            count = write_corpus(folder / CORPUS, chain([first], passages), merging.written)
            data.change(merging.gold.resolve)
        _set_aside(data, validation)  # by whole paragraphs, so before the parts of a split one are named
        data.change(lambda question: name_parts(question, merging.gold_parts))
        questions = {name: len(part) for name, part in data.splits.items() if part}
        for name in questions:
            write_questions(folder / f"{name}.parquet", _rendered(data.splits[name], rendering, name))
        if not questions and not count:
            why = "; ".join(data.notes) or "the sources contain no questions and no passages"
            raise UserError(f"nothing to write: {why}")
        write_manifest(folder, KIND, {
            "template": template, "limit": limit, "validation": validation, "contexts": contexts,
            "passage_words": passage_words, "sources": data.sources, "questions": questions,
            "passages": count, "notes": data.notes, "merged": merging.merged, "split": merging.split,
            "files": files_in(folder),
        })  # fmt: skip
    return Prepared(out, questions, count, tuple(data.notes), merging.merged, merging.split)


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


def _read(
    files: Sequence[tuple[Input, Path]], limit: int | None, only: Container[str] | None
) -> _Composition:
    """All questions, each in its split: that which was asked for, or its row says, or its file's name."""
    data, rows = _Composition({}), Counter[tuple[str, str]]()
    data.splits = {name: [] for name in SPLITS}
    for each, path in files:
        source, named_split = each.source, each.split or guess_split(path)
        split = named_split or source.only_split or "train"
        skipped: Counter[str] = Counter()
        key = source.data_source, split
        questions: list[Question] = []
        for question in source.questions(path, split, skipped, rows[key]):
            if len(questions) == limit:
                break
            if only is None or question.id in only:
                questions.append(question)
            else:
                skipped["not chosen by the log"] += 1
        rows[key] += len(questions) + skipped.total()
        by_row = each.split is None and (source.format is None or is_training_parquet(path))
        for question in questions:
            data.splits[(by_row and _own_split(question)) or split].append(question)
        data.leave_out(path, skipped)
        if questions and not named_split and not by_row:
            argument = f"{source.name}:SPLIT={path.name}"
            data.notes.append(
                f"{path.name}: read as {split}, since its name has no split; say which: {argument}"
            )
        entry: dict[str, Any] = {"source": source.name, "licence": source.licence, "file": path.name}
        entry |= {"digest": digest_corpus(path), "skipped": dict(skipped)}
        data.sources.append({**entry, "split": split, "questions": len(questions)} if questions else entry)
    return data


def _own_split(question: Question) -> str:
    """The split in the row, or an empty text."""
    split = ALIASES.get(question.split.lower(), question.split.lower())
    return split if split in SPLITS else ""


def _gold(data: _Composition, files: Sequence[tuple[Input, Path]]) -> GoldPassages:
    """The gold passages that the questions name, with their texts: those of question files first."""
    gold = GoldPassages(question for questions in data.splits.values() for question in questions)
    for each, path in sorted(files, key=lambda pair: pair[0].source.is_corpus):
        if each.source.is_corpus and not gold.unknown:
            break
        for passage in each.source.passages(path, Counter()):
            gold.know(passage)
    return gold


def _passages(
    data: _Composition, files: Sequence[tuple[Input, Path]], contexts: bool, progress: Callable[[int], None]
) -> Iterator[Passage]:
    """All passages as a stream; `progress` is called with their number so far."""
    count = 0
    for each, path in files:
        skipped: Counter[str] = Counter()
        for passage in each.source.passages(path, skipped) if contexts or each.source.is_corpus else ():
            count += 1
            if count % 1000 == 0:
                progress(count)
            yield passage
        data.leave_out(path, skipped)
    progress(count)


def _set_aside(data: _Composition, validation: float | Mapping[str, float]) -> None:
    """Drop questions that a later split has too, and hold out a validation set of the others."""
    data.drop("validation", "test")
    data.drop("train", "validation", "test")
    if validation:
        if not data.splits["train"]:
            raise UserError("a validation set is split off training questions, and there are none")
        data.splits["train"], validation_questions = split_off(data.splits["train"], validation)
        data.splits["validation"] += validation_questions
        data.drop("train", "validation")  # what the training questions had twice


def _rendered(questions: Iterable[Question], rendering: Template, split: str) -> Iterator[Question]:
    for question in questions:
        yield replace(question, prompt=rendering.messages(question.text), split=split)
