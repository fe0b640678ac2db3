"""Does the corpus have what the questions ask for? Their gold passages, and their answers.

No model can find what the corpus lacks. A question is *answerable* if its gold passages, where any are named,
are all in the corpus, and its answer, where it is text, is in some passage. A yes or no is in every corpus,
so it is not looked for. A question with neither gold passages nor an answer to look for is undecided: it is
neither answerable nor not.

Gold passages are named by their ids (metadata `supporting_ids`); where the corpus has none of a question's,
they are those of another corpus, and titles count (`supporting_titles`). A title is in the corpus if any
passage has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from srl.answers import findable, normalise_answer
from srl.data.corpus import title_key
from srl.errors import UserError
from srl.trajectory import Passage, Question


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the corpus has of one question.

    `gold`: all of its gold passages; None where it names none. `answer`: a golden answer is in some passage;
    None where all are yes or no. `missing` are the ids or titles of the gold passages that the corpus lacks.
    """

    gold: bool | None
    answer: bool | None
    missing: tuple[str, ...] = ()

    @property
    def answerable(self) -> bool | None:
        """Whether the corpus has all gold passages and an answer, as far as known; None if neither is."""
        labels = [value for value in (self.gold, self.answer) if value is not None]
        return all(labels) if labels else None


def coverage(
    questions: Sequence[Question],
    passages: Iterable[Passage],
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Coverage]:
    """The coverage of every question by its id, in one pass over the passages.

    Raises UserError for gold passages that are not a list of texts.
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
        if count % 1000 == 0:
            progress(count)
    progress(count)
    coverages = {}
    for question in questions:
        name, gold = question.id, ids[question.id]
        missing = tuple(each for each in gold if each not in own_ids)
        if titles[name] and missing == gold:
            gold = titles[name]
            missing = tuple(title for title in gold if title_key(title) not in own_titles)
        answer = not phrases.found.isdisjoint(answers[name]) if answers[name] else None
        coverages[name] = Coverage(not missing if gold else None, answer, missing)
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
