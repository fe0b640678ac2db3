"""Does the corpus have what the questions ask for? Their gold passages, and their answers.

No model can find what the corpus lacks. A question is *answerable* if its gold passages, where any are named,
are all in the corpus, and its answer, where it is text, is in some passage. A yes or no is in every corpus,
so it is not looked for. A question with neither gold passages nor an answer to look for is undecided: it is
neither answerable nor not.

Gold passages are named by their ids (metadata `supporting_ids`) or titles (`supporting_titles`). Ids count
where the corpus has at least one of those that the questions of a data source name. Where it has none, they
are the ids of another corpus, and titles count. A title is in the corpus if any passage has it: a corpus that
cuts pages into passages has each title many times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from srl.answers import findable, normalise_answer
from srl.data.corpus import title_key
from srl.errors import UserError
from srl.trajectory import Passage, Question

_TOLD = 1000
"""Passages between two calls of `progress`."""


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
        labels = [value for value in (self.gold, self.answer) if value is not None]
        return all(labels) if labels else None


class Share(NamedTuple):
    """How many of the `known` questions are `covered`; `value` is None where nothing is known."""

    covered: int
    known: int

    @classmethod
    def of(cls, values: Iterable[bool | None]) -> Share:
        labels = [value for value in values if value is not None]
        return cls(sum(labels), len(labels))

    @property
    def value(self) -> float | None:
        return self.covered / self.known if self.known else None


def coverage(
    questions: Sequence[Question],
    passages: Iterable[Passage],
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Coverage]:
    """The coverage of every question by its id, in one pass over the passages.

    `note` gets a line for each data source whose gold ids are those of another corpus. Raises UserError for
    gold passages that are not a list of texts.
    """
    ids = {question.id: _gold(question, "supporting_ids") for question in questions}
    titles = {question.id: _gold(question, "supporting_titles") for question in questions}
    answers = {question.id: findable(question.golden_answers) for question in questions}
    all_ids = set(chain.from_iterable(ids.values()))
    all_titles = set(map(title_key, chain.from_iterable(titles.values())))
    phrases, own_ids, own_titles = Phrases(chain.from_iterable(answers.values())), set[str](), set[str]()
    count = 0
    for count, passage in enumerate(passages, start=1):
        own_ids |= {passage.id} & all_ids
        own_titles |= {title_key(passage.title)} & all_titles if all_titles else set()
        phrases.see(passage.contents)
        if count % _TOLD == 0:
            progress(count)
    progress(count)
    sources = {question.data_source for question in questions if ids[question.id]}
    own_sources = {question.data_source for question in questions if not own_ids.isdisjoint(ids[question.id])}
    for source in sorted(sources - own_sources):
        note(f"{source}: the corpus has none of its gold ids; gold passages count by title, if named")
    coverages = {}
    for question in questions:
        name, gold, present = question.id, ids[question.id], own_ids
        if titles[name] and (question.data_source not in own_sources or not gold):
            gold, present = titles[name], {title for title in titles[name] if title_key(title) in own_titles}
        missing = tuple(each for each in gold if each not in present)
        answer = not phrases.found.isdisjoint(answers[name]) if answers[name] else None
        some_gold = len(missing) < len(gold) if gold else None
        coverages[name] = Coverage(not missing if gold else None, answer, some_gold, missing)
    return coverages


def _gold(question: Question, key: str) -> tuple[str, ...]:
    """The gold passages that a question names, each once."""
    names = question.metadata.get(key) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str | int) for name in names):
        raise UserError(f"question {question.id}: expected a list of texts in {key}")
    return tuple(dict.fromkeys(map(str, names)))


class Phrases:
    """Normalised answers that are looked for in many texts, with the meaning of `contains_answer`."""

    def __init__(self, phrases: Iterable[str]) -> None:
        self.found: set[str] = set()
        self._words: set[str] = set()
        self._longer: dict[tuple[str, str], set[str]] = defaultdict(set)  # first two words → phrases
        for phrase in set(phrases):
            words = phrase.split()
            if len(words) == 1:
                self._words.add(phrase)
            else:
                self._longer[words[0], words[1]].add(phrase)

    def see(self, text: str) -> None:
        """Look for the phrases that no earlier text had."""
        words = normalise_answer(text).split()
        single = self._words.intersection(words)
        self._words -= single
        self.found |= single
        for start, pair in enumerate(pairwise(words)):
            if pair in self._longer:
                for phrase in list(self._longer[pair]):
                    if phrase.split() == words[start : start + 1 + phrase.count(" ")]:
                        self._longer[pair].remove(phrase)
                        self.found.add(phrase)
