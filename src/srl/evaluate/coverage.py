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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from srl.answers import findable
from srl.data.corpus import title_key
from srl.errors import UserError, parsing
from srl.evaluate.corpus_scan import Sought, scan
from srl.evaluate.episode_results import EpisodeResult
from srl.files import FORMAT, check_format, digest_text, write_json
from srl.trajectory import Passage, Question

FILE = "coverage.json"
"""The coverage of the questions of an evaluation, in the directory of its run."""


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

    @classmethod
    def of(cls, values: Iterable[bool | None]) -> Share:
        known = [value for value in values if value is not None]
        return cls(sum(known), len(known))

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
    def of(cls, rows: Iterable[Coverage]) -> CoverageShares:
        rows = list(rows)
        names = ("gold", "some_gold", "answer", "answerable")
        return cls(len(rows), *(Share.of(getattr(row, name) for row in rows) for name in names))


def coverage(
    questions: Sequence[Question],
    passages: Iterable[Passage],
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Coverage]:
    """The coverage of every question by its id, in one pass over the passages (`srl.evaluate.corpus_scan`).

    `note` gets a line for each data source whose gold ids are those of another corpus. Raises UserError for
    gold passages that are not a list of texts.
    """
    ids = {question.id: _gold(question, "supporting_ids") for question in questions}
    titles = {question.id: _gold(question, "supporting_titles") for question in questions}
    answers = {question.id: findable(question.golden_answers) for question in questions}
    sought = Sought(
        set(chain.from_iterable(ids.values())),
        set(map(title_key, chain.from_iterable(titles.values()))),
        set(chain.from_iterable(answers.values())),
    )
    found = scan(passages, sought, progress)
    sources = {question.data_source for question in questions if ids[question.id]}
    own = {question.data_source for question in questions if not found.ids.isdisjoint(ids[question.id])}
    for source in sorted(sources - own):
        note(f"{source}: the corpus has none of its gold ids; gold passages count by title, if named")
    covered = {}
    for question in questions:
        name, gold, there = question.id, ids[question.id], found.ids
        if titles[name] and (question.data_source not in own or not gold):
            gold, there = titles[name], {title for title in titles[name] if title_key(title) in found.titles}
        missing = tuple(each for each in gold if each not in there)
        answer = not found.answers.isdisjoint(answers[name]) if answers[name] else None
        some = len(missing) < len(gold) if gold else None
        covered[name] = Coverage(not missing if gold else None, answer, some, missing)
    return covered


def _gold(question: Question, key: str) -> tuple[str, ...]:
    """The gold passages that a question names, each once."""
    names = question.metadata.get(key) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str | int) for name in names):
        raise UserError(f"question {question.id}: expected a list of texts in {key}")
    return tuple(dict.fromkeys(map(str, names)))


def coverage_metrics(
    results: Iterable[EpisodeResult], found: Mapping[str, Coverage], prefix: str = "eval"
) -> dict[str, float]:
    """`em_answerable`, exact match on the answerable questions, and the shares of the questions.

    These are `answerable`, `gold_in_corpus` and `answer_in_corpus`, each of those for which it is known, and
    left out if that is none. Undecided questions count in neither part.
    """
    known = [(found[result.question_id], result.em) for result in results if result.question_id in found]
    shares = CoverageShares.of(of for of, _ in known)
    right = [em for of, em in known if of.answerable]
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
        json.dumps(
            [
                each.id, each.data_source, _gold(each, "supporting_ids"), _gold(each, "supporting_titles"),
                sorted(findable(each.golden_answers)),
            ]
        )
        for each in questions
    )  # fmt: skip
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
    with suppress(UserError):  # a damaged file is replaced
        if before := read_coverage(run):
            written = written._replace(found=before.found | written.found)
    questions = {name: asdict(of) for name, of in written.found.items()}
    about = {"format": FORMAT, "key": written.key, "notes": written.notes}
    write_json(Path(run) / FILE, {**about, "questions": questions})


def read_coverage(run: Path, key: str | None = None) -> WrittenCoverage | None:
    """What `write_coverage` wrote into the directory of a run; None if it wrote nothing, or of another `key`.

    Raises UserError.
    """
    path = Path(run) / FILE
    if not path.is_file():
        return None
    with parsing(f"{path} is damaged, delete it"):
        about = json.loads(path.read_bytes())
        check_format(path, about["format"])
        if key not in (None, about["key"]):
            return None
        found = {
            name: Coverage(**{**of, "missing": tuple(of["missing"])})
            for name, of in about["questions"].items()
        }
        return WrittenCoverage(found, about["notes"], about["key"])
