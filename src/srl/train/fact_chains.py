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
from srl.data.stated_values import date_in, find_text, find_value, is_earlier, same_value
from srl.data.supporting_facts import Facts, Lookup, NoDemonstration, facts_of
from srl.errors import UserError
from srl.protocol import escape
from srl.trajectory import Hit, Passage, Question, Search, SearchTool

Show = Callable[[Search], Search]
"""Sets what of a search the model is shown: `shown` and `cut`."""

THOUGHT_WORDS = 50
"""A demonstration with a longer thought is not written."""
RECOVERY = 0.2
_YES_NO = ("yes", "no")


class SearchFailedError(UserError):
    """A search failed while a demonstration was made."""

    def __init__(self, fault: str) -> None:
        super().__init__(
            f"search failed ({fault}); test it with `srl index search` or `srl serve check`, then type the "
            "same command again"
        )


@dataclass(frozen=True, slots=True)
class Doc:
    """A passage that was shown: as which number, and what of it, with its title and without."""

    rank: int
    passage: Passage
    whole: str
    text: str


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """The most searches of a demonstration, and in which share of the questions a missed search is kept.

    `brief`: no thought before anything was read, and none that quotes the passage of the answer.
    """

    max_searches: int = 4
    recovery: float = RECOVERY
    seed: int = 0
    brief: bool = False


@dataclass(slots=True)
class Chain:
    """A demonstration in the making: its turns, and what its searches showed.

    `lookups` are all that the question needs. `observed` are the searches that were written down, with what
    was shown of them. `known` are the texts that a query may use: the question and
    what was shown. `said` is what was read since the last search. `keeps_miss`: the next search that brings
    no gold passage is kept, once. `reworded` counts the passages that the first wording did not bring.
    """

    question: Question
    search: SearchTool
    show: Show
    max_searches: int
    rng: random.Random
    keeps_miss: bool
    brief: bool
    lookups: Sequence[Lookup]
    known: list[str]
    turns: list[str] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    observed: list[Search] = field(default_factory=list)
    shown: list[Doc] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    reworded: int = 0
    recovered: bool = False

    async def find(self, lookup: Lookup, name: str) -> Doc:
        """The passage of `lookup`, asked for by `name`; without a search if it was shown. Raises
        NoDemonstration."""
        if (doc := self.seen(lookup)) is not None:
            return doc
        tried: list[tuple[str, Search]] = []
        if await self._try(lookup, name, tried) or await self._try_after_miss(lookup, name, tried):
            self.reworded += len(tried) > 1
            if (doc := self.seen(lookup)) is not None:
                return doc
        raise NoDemonstration("no wording brings a passage")

    def seen(self, lookup: Lookup) -> Doc | None:
        """The passage of `lookup` if it was shown, last time."""
        return next((doc for doc in reversed(self.shown) if lookup.is_in(doc.passage, doc.whole)), None)

    async def _try(self, lookup: Lookup, name: str, tried: list[tuple[str, Search]]) -> bool:
        """Search with one wording after the other until one brings the passage; write that search down."""
        for query in self.wordings(lookup, name):
            if query in self.queries or any(query == before for before, _ in tried):
                continue
            found = await self._ask(query)
            tried.append((query, found))
            if any(lookup.is_in(doc.passage, doc.whole) for doc in self._docs(found, lookup)):
                if len(tried) > 1 and self._may_keep(tried[0][1]):
                    self._keep_miss(lookup, name, *tried[0])
                self._write_search(lookup, name, query, found)
                return True
        return False

    async def _try_after_miss(self, lookup: Lookup, name: str, tried: list[tuple[str, Search]]) -> bool:
        """Keep the first search although it missed: what it showed may give better words."""
        if not tried or not self._may_keep(tried[0][1]):
            return False
        self._keep_miss(lookup, name, *tried[0])
        return await self._try(lookup, name, tried)

    async def _ask(self, query: str) -> Search:
        found = await self.search.search(query)
        if found.is_fault:
            raise SearchFailedError(f"{found.status}: {found.error}")
        return found

    def _docs(self, found: Search, lookup: Lookup) -> list[Doc]:
        """The passages that the model is shown; none where that of `lookup` is not even a hit."""
        if not any(lookup.is_in(hit.passage, hit.passage.contents) for hit in found.hits):
            return []
        return _docs_of(self.show(found))

    def _may_keep(self, found: Search) -> bool:
        """Whether a search that missed its passage may be kept: it brings no other gold one either, and
        leaves a search for each that is wanted."""
        hits = [hit.passage for hit in found.hits]
        wanted = [lookup for lookup in self.lookups if self.seen(lookup) is None]
        brings = any(lookup.is_in(passage, passage.contents) for lookup in wanted for passage in hits)
        has_room = len(self.queries) + len(wanted) < self.max_searches
        return self.keeps_miss and has_room and not brings

    def _keep_miss(self, lookup: Lookup, name: str, query: str, found: Search) -> None:
        self._write_search(lookup, name, query, found)
        self.said, self.keeps_miss, self.recovered = [texts.missed(self.rng)], False, True

    def _write_search(self, lookup: Lookup, name: str, query: str, found: Search) -> None:
        if len(self.queries) == self.max_searches:
            raise NoDemonstration("more searches than an episode has")
        spoken = "" if lookup.subquestion else name
        thought = self._thought() or ("" if self.brief else texts.need(lookup.relation, spoken, self.rng))
        self.turns.append(f"{_think(thought)}<search> {escape(query)} </search>")
        self.queries.append(query)
        seen = self.show(found)
        docs = _docs_of(seen)
        self.observed.append(seen)
        self.shown += docs
        self.known += [doc.whole for doc in docs]

    def _thought(self) -> str:
        thought, self.said = " ".join(self.said), []
        if len(thought.split()) > THOUGHT_WORDS:
            raise NoDemonstration("a thought that is too long")
        return thought

    def wordings(self, lookup: Lookup, name: str) -> Iterator[str]:
        """The queries to try, in order, all of known words.

        First the subquestion, or the name with and without the relation, or the question and its content
        words in either order. Then the title of the passage, if a known text names it: with the relation,
        alone, with the question's words. Last the question's words. Where a miss is to be kept, the first
        query has the names of the question only.
        """
        question = self.question.text.strip().rstrip("?").strip()
        content = texts.content_words(question)
        asked, found = [content, question], list[str]()
        relation = " ".join(texts.known_words(lookup.relation, self.known))
        if lookup.relation not in texts.RELATION_NOUNS:
            relation = texts.content_words(relation)
        if self.keeps_miss and not self.queries:
            found.append(texts.names_in(question))
        if lookup.subquestion:
            words = texts.known_words(name, self.known)
            found += [name] * (words == texts.words_of(name)) + [texts.content_words(" ".join(words))]
        elif name:
            found += [f"{name} {relation}".strip(), name]
        else:
            found += asked[:: self.rng.choice((1, -1))]
        if lookup.title and (title := texts.as_known(lookup.name, self.known)):
            rest = " ".join(word for word in content.split() if word not in title.split())
            found += [f"{title} {relation}".strip(), title, f"{title} {rest}".strip()]
        yield from dict.fromkeys(query for query in [*found, *asked] if query)

    def quote(self, lookup: Lookup, doc: Doc, value: str) -> None:
        """Say what the passage says, in its words around `value`."""
        asked, found = self.question.text, texts.sentences(doc.text)
        supporting = [sentence for sentence in lookup.sentences if sentence in doc.text]
        best = texts.best_sentence(supporting, asked, value) or texts.best_sentence(found, asked, value)
        if best is None:
            best, value = texts.best_sentence(found, asked, "") or doc.text, ""
        self.said.append(f"{texts.quotes(texts.excerpt(best, asked, value), doc.rank, self.rng)}.")

    def state(self, lookup: Lookup, doc: Doc, name: str, value: str) -> None:
        """Say what the passage says of a relation, in a sentence of our own if it has one."""
        if lookup.relation in texts.RELATION_NOUNS:
            self.said.append(f"{texts.states(lookup.relation, name, value, self.rng)}.")
        else:
            self.quote(lookup, doc, value)

    def name(self, doc: Doc) -> None:
        """Say which passage has the answer."""
        self.said.append(f"Doc {doc.rank} says it.")

    def answer(self, text: str) -> None:
        self.turns.append(f"{_think(self._thought())}<answer> {escape(text)} </answer>")

    def accepted(self, shown: Sequence[str]) -> str:
        """A golden answer that stands in a shown text, in the text's case. Raises NoDemonstration."""
        found = [
            (gold, text[slice(*span)])
            for gold in self.question.golden_answers
            for text in shown
            if (span := find_text(gold, text)) is not None and exact_match(text[slice(*span)], [gold])
        ]
        if not found:
            raise NoDemonstration("the passages do not have the answer")
        same = (written for gold, written in found if written.casefold() == gold.casefold())
        return next(same, found[0][0]).rstrip(",;: ")


def _think(thought: str) -> str:
    return f"<think> {escape(thought)} </think>\n" if thought else ""


def _docs_of(seen: Search) -> list[Doc]:
    """The passages that the model is shown of a search."""
    pairs = enumerate(zip(seen.shown_hits, seen.shown_texts, strict=True), start=1)
    return [_doc(rank, hit, text) for rank, (hit, text) in pairs]


def _doc(rank: int, hit: Hit, text: str) -> Doc:
    heading = hit.passage.heading
    inside = text.removeprefix(heading).lstrip(") ").strip()
    return Doc(rank, hit.passage, f"{hit.passage.title}\n{inside}", inside)


async def fact_chain(question: Question, search: SearchTool, show: Show, options: ChainOptions) -> Chain:
    """The demonstration of a question. Raises NoDemonstration, and UserError if search fails."""
    rng = random.Random(f"demonstration {options.seed} {question.id}")
    keeps_miss = rng.random() < options.recovery
    facts = facts_of(question)
    chain = Chain(
        question, search, show, options.max_searches, rng, keeps_miss, options.brief, facts.lookups,
        [question.text],
    )  # fmt: skip
    await (_by_values(facts, chain) if facts.by_value else _by_titles(facts, chain))
    return chain


async def _by_values(facts: Facts, chain: Chain) -> None:
    """Look up one value after the other; each may be the name of the next."""
    values: list[str] = []
    for lookup in facts.lookups:
        name = _name(lookup, values, chain)
        doc = await chain.find(lookup, name)
        span = find_value(lookup.value, doc.text) or find_value(lookup.value, doc.whole)
        if span is None:
            raise NoDemonstration("a passage does not state its value")
        source = doc.text if find_value(lookup.value, doc.text) else doc.whole
        values.append(source[slice(*span)])
        if len(values) < len(facts.lookups):
            chain.state(lookup, doc, name, values[-1])
    if facts.compared:
        _compare(facts, values, name, chain)
        return
    answer = chain.accepted([doc.text, doc.whole])
    if chain.brief and lookup.relation not in texts.RELATION_NOUNS:
        chain.name(doc)
    else:
        chain.state(lookup, doc, name, values[-1])
    chain.answer(answer)


def _name(lookup: Lookup, values: Sequence[str], chain: Chain) -> str:
    """What to ask for, with the values so far put in. Raises NoDemonstration for a name not yet known."""
    asked = lookup.subquestion.rstrip("? ") or lookup.subject
    for number in range(len(values), 0, -1):
        asked = asked.replace(f"#{number}", values[number - 1])
    if lookup.subquestion:
        return asked
    for name in filter(None, (asked, lookup.name)):
        if (known := texts.as_known(name, chain.known)) is not None:
            return known
    raise NoDemonstration("a name that nothing before it says")


def _compare(facts: Facts, values: Sequence[str], name: str, chain: Chain) -> None:
    """Say how the two values compare, and answer with what comes out. Raises NoDemonstration if that is
    not the right answer."""
    one, other = (facts.lookups[place] for place in facts.ends)
    says = texts.states(other.relation, name, values[facts.ends[1]], chain.rng)
    golds, first = chain.question.golden_answers, values[facts.ends[0]]
    if normalise_answer(golds[0]) in _YES_NO:
        same = same_value(one.value, other.value)
        chain.said.append(f"{says}, {'the same as' if same else 'not'} {first}.")
        result = "yes" if same else "no"
    else:
        earlier = _second_is_earlier(one, other, chain.question.text)
        chain.said.append(f"{says}, {'earlier' if earlier else 'later'} than {first}.")
        wanted = earlier == (_direction(chain.question.text) == "earlier")
        asked = facts.lookups[facts.begins[wanted]]
        right = any(exact_match(result, golds) for result in (asked.subject, asked.title, asked.name))
        result = golds[0] if right else ""
    if not exact_match(result, golds):
        raise NoDemonstration("a comparison that comes out otherwise")
    chain.answer(result)


def _second_is_earlier(one: Lookup, other: Lookup, question: str) -> bool:
    first, second = date_in(one.value), date_in(other.value)
    earlier = is_earlier(second, first) if first and second else None
    if earlier is None or not _direction(question):
        raise NoDemonstration("a comparison that is not understood")
    return earlier


def _direction(question: str) -> str:
    """Whether a question asks for the earlier or the later of two dates; empty where it does not say."""
    words = set(texts.words_of(question.lower()))
    earlier = bool(words & {"older", "earlier", "first"})
    later = bool(words & {"younger", "later", "recently", "last"})
    return "" if earlier == later else "earlier" if earlier else "later"


async def _by_titles(facts: Facts, chain: Chain) -> None:
    """Find the gold passages, each by its name once that is known, else by the question's words."""
    left, found = list(facts.lookups), list[tuple[Lookup, Doc]]()
    while left:
        lookup, name = _next(left, chain, by_name=len(facts.lookups) > 1)
        if name or len(left) == 1:
            doc = await chain.find(lookup, name)
        else:
            doc = await chain.find(Lookup("", left[0].ids.union(*(each.ids for each in left))), "")
            lookup = next((each for each in left if each.is_in(doc.passage, doc.whole)), lookup)
        left.remove(lookup)
        found.append((lookup, doc))
        if left:
            names = (each.name for each in left)
            chain.quote(lookup, doc, next((each for each in names if find_text(each, doc.text)), ""))
    _answer_from(found, chain)


def _next(left: Sequence[Lookup], chain: Chain, by_name: bool) -> tuple[Lookup, str]:
    """The next passage to find, first one that was shown already; and its name, if that is known."""
    for lookup in left:
        if chain.seen(lookup) is not None:
            return lookup, lookup.name
    for lookup in left if by_name else ():
        if lookup.title and (name := texts.as_known(lookup.name, chain.known)):
            return lookup, name
    return left[0], ""


def _answer_from(found: Sequence[tuple[Lookup, Doc]], chain: Chain) -> None:
    """Quote the passage that was found last and the one that has the answer, or name that; and give it."""
    gold = normalise_answer(chain.question.golden_answers[0])
    if gold in _YES_NO:
        if not chain.brief:
            chain.quote(*found[-1], "")
        chain.said.append(f"So the answer is {gold}.")
        chain.answer(gold)
        return
    latest = list(reversed(found))
    answer = chain.accepted([doc.text for _, doc in latest] + [doc.whole for _, doc in latest])
    last, source = latest[0], next((each for each in latest if find_text(answer, each[1].text)), latest[0])
    if chain.brief:
        chain.name(source[1])
    else:
        if last is not source:
            chain.quote(*last, "")
        if not any(find_text(answer, said) for said in chain.said):
            chain.quote(*source, answer)
    chain.answer(answer)
