"""Does the corpus have what the questions ask for? Their gold passages, and their answers.

No model can find what the corpus lacks, so exact match is also reported on the *answerable* questions: those
whose gold passages, where any are named, are all in the corpus, and whose answer, where it is text, is in
some passage. A yes or no is in every corpus, so it is not looked for. A question with neither gold passages
nor an answer to look for is undecided: it is neither answerable nor not.

Gold passages are named by their ids (metadata `supporting_ids`) or titles (`supporting_titles`). Ids count
where the corpus has at least one of those that the questions of a data source name. Where it has none, they
are the ids of another corpus, and titles count. A title is in the corpus if any passage has it: a corpus that
cuts pages into passages has each title many times.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from srl.answers import findable
from srl.data.corpus import title_key
from srl.data.published_rows import describe
from srl.errors import UserError, parsing
from srl.evaluate.corpus_scan import Found, Sought, scan
from srl.files import FORMAT, atomic_file, check_format, digest_text
from srl.trajectory import Passage, Question

FILE = "coverage.parquet"
"""The coverage of the questions of an evaluation, in the directory of its run."""
_SCHEMA = pa.schema(
    [
        ("question_id", pa.string()),
        ("gold", pa.bool_()),
        ("some_gold", pa.bool_()),
        ("answer", pa.bool_()),
        ("missing", pa.list_(pa.string())),
    ]
)
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the corpus has of one question.

    `gold` and `some_gold`: all, and at least one, of its gold passages; None where it names none. `answer`:
    a golden answer is in some passage; None where all are yes or no. `missing` are the ids or titles of
    the gold passages that the corpus lacks.
    """

    gold: bool | None
    answer: bool | None
    some_gold: bool | None = None
    missing: tuple[str, ...] = ()

    @property
    def answerable(self) -> bool | None:
        """Whether the corpus has all gold passages and an answer, as far as known; None if neither is."""
        known = [value for value in (self.gold, self.answer) if value is not None]
        return all(known) if known else None


class Share(NamedTuple):
    """How many of the `known` questions are `covered`; `value` is None where nothing is known."""

    covered: int
    known: int

    @property
    def value(self) -> float | None:
        return self.covered / self.known if self.known else None


@dataclass(frozen=True, slots=True)
class CoverageShares:
    """The coverage of several questions: those of one split and data source, say."""

    questions: int
    gold: Share
    some_gold: Share
    answer: Share
    answerable: Share

    @classmethod
    def of(cls, found: Iterable[Coverage]) -> CoverageShares:
        rows = list(found)
        names = ("gold", "some_gold", "answer", "answerable")
        return cls(len(rows), *(_share([getattr(row, name) for row in rows]) for name in names))


def _share(values: Sequence[bool | None]) -> Share:
    known = [value for value in values if value is not None]
    return Share(sum(known), len(known))


def coverage(
    questions: Sequence[Question],
    passages: Iterable[Passage],
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Coverage]:
    """The coverage of every question by its id, in one pass over the passages (`srl.evaluate.corpus_scan`).

    `note` gets a line for each thing that a reader of the figures has to know. Raises UserError for gold
    passages that are not a list of texts.
    """
    gold = {question.id: _Gold.of(question) for question in questions}
    answers = {question.id: findable(question.golden_answers) for question in questions}
    sought = Sought(
        frozenset(name for each in gold.values() for name in each.ids),
        frozenset(title_key(title) for each in gold.values() for title in each.titles),
        frozenset(chain.from_iterable(answers.values())),
    )
    found = scan(passages, sought, progress)
    named = _names_that_count(questions, gold, found, note)
    _tell_of_several(named.values(), found, note)
    if undecided := sum(not wanted for wanted in answers.values()):
        note(f"{undecided:,} questions have no answer to look for in passages (only yes or no)")
    return {
        name: _coverage(these, found, not found.answers.isdisjoint(answers[name]) if answers[name] else None)
        for name, these in named.items()
    }


class _Name(NamedTuple):
    """A gold passage, by its id or by its title."""

    name: str
    is_title: bool

    def is_in(self, found: Found) -> bool:
        return title_key(self.name) in found.titles if self.is_title else self.name in found.ids


def _coverage(named: Sequence[_Name], found: Found, answer: bool | None) -> Coverage:
    if not named:
        return Coverage(None, answer)
    missing = tuple(each.name for each in named if not each.is_in(found))
    return Coverage(not missing, answer, len(missing) < len(named), missing)


class _Gold(NamedTuple):
    """The gold passages that a question names."""

    ids: tuple[str, ...]
    titles: tuple[str, ...]

    @classmethod
    def of(cls, question: Question) -> _Gold:
        return cls(_named(question, "supporting_ids"), _named(question, "supporting_titles"))

    def names(self, strange_ids: bool) -> list[_Name]:
        """Its ids; or its titles, where it has no ids or those of another corpus."""
        if self.titles and (strange_ids or not self.ids):
            return [_Name(title, True) for title in self.titles]
        return [_Name(name, False) for name in self.ids]


def _named(question: Question, key: str) -> tuple[str, ...]:
    given = question.metadata.get(key)
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(name, str | int) for name in given):
        raise UserError(f"question {question.id}: expected a list of texts in {key}, found {describe(given)}")
    return tuple(dict.fromkeys(map(str, given)))


def _names_that_count(
    questions: Sequence[Question], gold: Mapping[str, _Gold], found: Found, note: Callable[[str], None]
) -> dict[str, list[_Name]]:
    """The gold passages of each question, by id or title as its data source has it; notes strange ids."""
    by_source: dict[str, list[_Gold]] = defaultdict(list)
    for question in questions:
        if gold[question.id].ids:
            by_source[question.data_source].append(gold[question.id])
    strange = {
        source for source, those in by_source.items() if all(found.ids.isdisjoint(each.ids) for each in those)
    }
    for source in sorted(strange):
        note(_strange_ids(source, by_source[source], found.example))
    return {each.id: gold[each.id].names(each.data_source in strange) for each in questions}


def _strange_ids(source: str, gold: Sequence[_Gold], example: str) -> str:
    ids = {name for each in gold for name in each.ids}
    start = f"{source}: the corpus has none of the {len(ids):,} gold ids (its own are like {example!r})"
    if all(each.titles for each in gold):
        return f"{start}, so gold passages are matched by title"
    return f"{start}; without titles they count as missing: is it the corpus of these questions?"


def _tell_of_several(named: Iterable[Sequence[_Name]], found: Found, note: Callable[[str], None]) -> None:
    """Note the gold titles that several passages have."""
    titles = {title_key(each.name) for these in named for each in these if each.is_title}
    several = sorted(title for title in titles if found.titles[title] > 1)
    if several:
        shown = ", ".join(f"{title!r}: {found.titles[title]:,}" for title in several[:_SHOWN])
        more = ", …" if len(several) > _SHOWN else ""
        note(
            f"{len(several):,} of {len(titles):,} gold titles match several passages ({shown}{more}); "
            "one passage with the title is enough"
        )


class Answered(Protocol):
    """One episode: the question that it answered, and its exact match."""

    @property
    def question_id(self) -> str: ...
    @property
    def em(self) -> float: ...


def coverage_metrics(
    results: Iterable[Answered], found: Mapping[str, Coverage], prefix: str = "eval"
) -> dict[str, float]:
    """`em_answerable`, exact match on the answerable questions, and the shares of the questions.

    These are `answerable`, `gold_in_corpus` and `answer_in_corpus`, each of those for which it is known, and
    left out if that is none. Undecided questions count in neither part.
    """
    known = [(found[one.question_id], one.em) for one in results if one.question_id in found]
    shares = CoverageShares.of(one for one, _ in known)
    right = [em for one, em in known if one.answerable]
    metrics = {
        "em_answerable": fmean(right) if right else None,
        "answerable": shares.answerable.value,
        "gold_in_corpus": shares.gold.value,
        "answer_in_corpus": shares.answer.value,
    }
    return {f"{prefix}/{name}": value for name, value in metrics.items() if value is not None}


def coverage_key(questions: Iterable[Question], corpora: Sequence[str]) -> str:
    """The same for the same questions, in any order, and the same digests of corpora; 32 hex digits."""
    rows = (
        json.dumps([each.id, each.data_source, *_Gold.of(each), sorted(findable(each.golden_answers))])
        for each in questions
    )
    return digest_text("coverage", *corpora, *sorted(rows))


class WrittenCoverage(NamedTuple):
    """The coverage of a run's questions, what was noted, and the `coverage_key`."""

    found: dict[str, Coverage]
    notes: list[str]
    key: str


def write_coverage(run: Path, written: WrittenCoverage) -> None:
    """Write the coverage of an evaluation's questions into the directory of its run.

    That of questions which the run was asked before is kept: all its evaluations search the same corpora.
    """
    names = _SCHEMA.names[1:]
    with suppress(UserError):  # a damaged file is replaced
        if before := read_coverage(run):
            written = written._replace(found=before.found | written.found)
    rows = [
        {"question_id": name} | {key: getattr(one, key) for key in names}
        for name, one in written.found.items()
    ]
    told = {"srl_format": str(FORMAT), "key": written.key, "notes": json.dumps(written.notes)}
    with atomic_file(Path(run) / FILE, "wb") as file:
        pq.write_table(pa.Table.from_pylist(rows, _SCHEMA.with_metadata(told)), file)


def read_coverage(run: Path, key: str | None = None) -> WrittenCoverage | None:
    """What `write_coverage` wrote into the directory of a run; None if it wrote nothing, or of another `key`.

    Raises UserError.
    """
    path = Path(run) / FILE
    if not path.is_file():
        return None
    with parsing(f"{path} is damaged, delete it"):
        told = pq.read_schema(path).metadata or {}
        check_format(path, int(told[b"srl_format"]))
        own, notes = told[b"key"].decode(), json.loads(told[b"notes"])
        if key not in (None, own):
            return None
        rows = pq.read_table(path, columns=_SCHEMA.names).to_pylist()
        found = {
            row.pop("question_id"): Coverage(**{**row, "missing": tuple(row["missing"])}) for row in rows
        }
    return WrittenCoverage(found, notes, own)
