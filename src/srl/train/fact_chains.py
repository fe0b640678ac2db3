"""Right chains of searches from supporting facts, made with the search tool of training.

A search counts only if its passage is among those that the model will be shown. If it is not, the search is
reworded; if no wording brings the passage, the question gets no demonstration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from srl.answers import exact_match, normalise_answer
from srl.data import demonstration_texts as texts
from srl.data.demonstration_file import turn_text
from srl.data.stated_values import find_text, find_value
from srl.data.supporting_facts import Facts, Lookup, NoDemonstration, facts_of
from srl.errors import UserError
from srl.protocol import escape
from srl.trajectory import Passage, Question, Search, SearchTool

Show = Callable[[Search], Search]
"""Sets what of a search the model is shown: `shown` and `cut`."""

THOUGHT_WORDS = 50
"""A demonstration with a longer thought is not written."""


RECOVERY = 0.2
"""The share of the questions in which a first search that misses is kept."""


class SearchFailedError(UserError):
    """A search failed while a demonstration was made."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"search failed ({fault})", hint="`srl index search` and `srl serve check` test it")


@dataclass(frozen=True, slots=True)
class Doc:
    """A passage that was shown: as which number, and what of it, with its title and without."""

    rank: int
    passage: Passage
    whole: str
    text: str

    @classmethod
    def shown_of(cls, search: Search) -> list[Doc]:
        """The passages that the model is shown of a search."""
        docs = []
        pairs = zip(search.shown_hits, search.shown_texts, strict=True)
        for rank, (hit, excerpt) in enumerate(pairs, start=1):
            text = excerpt.removeprefix(hit.passage.heading).lstrip(") ").strip()
            docs.append(cls(rank, hit.passage, f"{hit.passage.title}\n{text}", text))
        return docs


@dataclass(slots=True)
class Chain:
    """A demonstration in the making: its turns, and what its searches showed.

    `lookups` are all that the question needs. `searches` were written down, with what is shown of them, and
    `docs` are the passages of these. `said` is what was read since the last search. `keeps_miss`: a search
    that missed is kept, once.
    """

    question: Question
    search: SearchTool
    show: Show
    max_searches: int
    rng: random.Random
    keeps_miss: bool
    lookups: Sequence[Lookup]
    turns: list[str] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    docs: list[Doc] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def queries(self) -> list[str]:
        return [search.query for search in self.searches]

    @property
    def known(self) -> list[str]:
        """The texts whose words a query may use: the question, and what was shown."""
        return [self.question.text, *(doc.whole for doc in self.docs)]

    def seen(self, lookup: Lookup) -> Doc | None:
        """The passage of `lookup` if it was shown, last time."""
        return next((doc for doc in reversed(self.docs) if lookup.is_in(doc.passage, doc.whole)), None)

    async def find(self, lookup: Lookup, name: str) -> Doc:
        """The passage of `lookup`, asked for by `name`; without a search if it was shown.

        One wording after the other is tried until one brings the passage, which is written down.
        Raises NoDemonstration.
        """
        if (doc := self.seen(lookup)) is not None:
            return doc
        misses: dict[str, Search] = {}
        for query in self.wordings(lookup, name):
            if query in self.queries or query in misses:
                continue
            outcome = await self.search.search(query)
            if outcome.is_fault:
                raise SearchFailedError(f"{outcome.status}: {outcome.error}")
            if any(lookup.is_in(hit.passage, hit.passage.contents) for hit in outcome.hits):
                search = self.show(outcome)
                if any(lookup.is_in(doc.passage, doc.whole) for doc in Doc.shown_of(search)):
                    if misses:
                        self._keep_miss(next(iter(misses.values())))
                    self._write(search)
                    break
            misses[query] = outcome
        if (doc := self.seen(lookup)) is None:
            raise NoDemonstration("no wording brings a passage")
        return doc

    def _keep_miss(self, missed: Search) -> None:
        """Write a search that missed down, if it brings no other gold passage either, and leaves a search for
        each that is wanted."""
        remaining = [each for each in self.lookups if self.seen(each) is None]
        hits = [hit.passage for hit in missed.hits]
        brings = any(each.is_in(passage, passage.contents) for each in remaining for passage in hits)
        if self.keeps_miss and not brings and len(self.searches) + len(remaining) < self.max_searches:
            self._write(self.show(missed))
            self.said, self.keeps_miss = [texts.missed(self.rng)], False

    def _write(self, search: Search) -> None:
        if len(self.searches) == self.max_searches:
            raise NoDemonstration("more searches than an episode has")
        self.turns.append(turn_text(self._thought(), "search", escape(search.query)))
        self.searches.append(search)
        self.docs += Doc.shown_of(search)

    def _thought(self) -> str:
        thought, self.said = " ".join(self.said), []
        if len(thought.split()) > THOUGHT_WORDS:
            raise NoDemonstration("a thought that is too long")
        return escape(thought)

    def wordings(self, lookup: Lookup, name: str) -> Iterator[str]:
        """The queries to try, in order, all of known words.

        First the subquestion, or the name with and without the relation, or the question and its content
        words in either order. Then the title of the passage, if a known text names it: with the relation,
        alone, with the question's words. Last the question's words. Where a miss is to be kept, the first
        query has the names of the question only.
        """
        question, vocabulary = self.question.text.strip().rstrip("?").strip(), self.known
        content = texts.content_words(question)
        relation = " ".join(texts.known_words(lookup.relation, vocabulary))
        queries: list[str] = []
        if self.keeps_miss and not self.searches:
            queries.append(texts.names_in(question))
        if lookup.subquestion:
            words = texts.known_words(name, vocabulary)
            queries += [name] * (words == texts.words_of(name)) + [texts.content_words(" ".join(words))]
        elif name:
            queries += [f"{name} {relation}".strip(), name]
        else:
            queries += self.rng.sample([content, question], 2)
        if lookup.title and (title := texts.as_known(lookup.name, vocabulary)):
            other_words = " ".join(word for word in content.split() if word not in title.split())
            queries += [f"{title} {relation}".strip(), title, f"{title} {other_words}".strip()]
        yield from dict.fromkeys(query for query in [*queries, content, question] if query)

    def quote(self, lookup: Lookup, doc: Doc, value: str) -> None:
        """Say what the passage says, in its words around `value`."""
        question, sentences = self.question.text, texts.sentences(doc.text)
        supporting = [sentence for sentence in lookup.sentences if sentence in doc.text]
        best = texts.best_sentence(supporting, question, value)
        best = best or texts.best_sentence(sentences, question, value)
        if best is None:
            best, value = texts.best_sentence(sentences, question, "") or doc.text, ""
        self.said.append(texts.quotes(texts.excerpt(best, question, value), doc.rank, self.rng))

    def answer(self, text: str, doc: Doc | None = None) -> None:
        """The last turn, which names the passage that has the answer."""
        self.said += [f"Doc {doc.rank} says it."] if doc else []
        self.turns.append(turn_text(self._thought(), "answer", escape(text)))

    def accepted(self, passages: Sequence[str]) -> str:
        """A golden answer that stands in a shown text, in the text's case. Raises NoDemonstration."""
        answers = [
            (gold, text[slice(*span)])
            for gold in self.question.golden_answers
            for text in passages
            if (span := find_text(gold, text)) is not None and exact_match(text[slice(*span)], [gold])
        ]
        if not answers:
            raise NoDemonstration("the passages do not have the answer")
        same = (wording for gold, wording in answers if wording.casefold() == gold.casefold())
        return next(same, answers[0][0]).rstrip(",;: ")


async def fact_chain(
    question: Question,
    search: SearchTool,
    show: Show,
    *,
    max_searches: int = 4,
    recovery: float = RECOVERY,
    seed: int = 0,
) -> Chain:
    """The demonstration of a question, of at most `max_searches`; a share `recovery` of the questions keeps a
    search that missed. Raises NoDemonstration, and SearchFailedError.
    """
    rng = random.Random(f"demonstration {seed} {question.id}")
    facts = facts_of(question)
    chain = Chain(question, search, show, max_searches, rng, rng.random() < recovery, facts.lookups)
    await (_by_values(facts, chain) if facts.by_value else _by_titles(facts, chain))
    return chain


async def _by_values(facts: Facts, chain: Chain) -> None:
    """Look up one value after the other; each may be the name of the next. The last one is the answer."""
    values: list[str] = []
    for lookup in facts.lookups:
        doc = await chain.find(lookup, _name(lookup, values, chain))
        source = next((text for text in (doc.text, doc.whole) if find_value(lookup.value, text)), None)
        if source is None or (span := find_value(lookup.value, source)) is None:
            raise NoDemonstration("a passage does not state its value")
        values.append(source[slice(*span)])
        if len(values) < len(facts.lookups):
            chain.quote(lookup, doc, values[-1])
    chain.answer(chain.accepted([doc.text, doc.whole]), doc)


def _name(lookup: Lookup, values: Sequence[str], chain: Chain) -> str:
    """What to ask for, with the values so far put in. Raises NoDemonstration for a name not yet known."""
    phrase = lookup.subquestion.rstrip("? ") or lookup.subject
    for number in range(len(values), 0, -1):
        phrase = phrase.replace(f"#{number}", values[number - 1])
    if lookup.subquestion:
        return phrase
    for name in filter(None, (phrase, lookup.name)):
        if (spelling := texts.as_known(name, chain.known)) is not None:
            return spelling
    raise NoDemonstration("a name that nothing before it says")


async def _by_titles(facts: Facts, chain: Chain) -> None:
    """Find the gold passages, each by its name once that is known, else by the question's words."""
    remaining, docs = list(facts.lookups), list[Doc]()
    while remaining:
        lookup, name = _next(remaining, chain, by_name=len(facts.lookups) > 1)
        if name or len(remaining) == 1:
            doc = await chain.find(lookup, name)
        else:
            doc = await chain.find(Lookup("", remaining[0].ids.union(*(each.ids for each in remaining))), "")
            lookup = next((each for each in remaining if each.is_in(doc.passage, doc.whole)), lookup)
        remaining.remove(lookup)
        docs.insert(0, doc)
        if remaining:
            names = (each.name for each in remaining)
            chain.quote(lookup, doc, next((each for each in names if find_text(each, doc.text)), ""))
    gold = normalise_answer(chain.question.golden_answers[0])
    if gold in ("yes", "no"):
        chain.said.append(f"So the answer is {gold}.")
        chain.answer(gold)
        return
    answer = chain.accepted([doc.text for doc in docs] + [doc.whole for doc in docs])
    chain.answer(answer, next((doc for doc in docs if find_text(answer, doc.text)), docs[0]))


def _next(lookups: Sequence[Lookup], chain: Chain, by_name: bool) -> tuple[Lookup, str]:
    """The next passage to find, first one that was shown already; and its name, if that is known."""
    for lookup in lookups:
        if chain.seen(lookup) is not None:
            return lookup, lookup.name
    for lookup in lookups if by_name else ():
        if lookup.title and (name := texts.as_known(lookup.name, chain.known)):
            return lookup, name
    return lookups[0], ""
