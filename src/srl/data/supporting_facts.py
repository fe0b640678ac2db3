"""What must be looked up to answer a question, in order: from the supporting facts in its metadata.

Evidence triples (2WikiMultihopQA), a decomposition (MuSiQue), or the titles of the gold passages alone
(HotpotQA; SQuAD's and NQ's questions have one passage).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import combining, normalize

from srl.data.stated_values import find_text
from srl.trajectory import Passage, Question

Triple = tuple[str, str, str]
"""Subject, relation and object."""


NO_FACTS = "no supporting facts"
"""The reason of a question whose data set has no gold passages."""


class NoDemonstration(Exception):  # noqa: N818  # not an error of the program: an outcome
    """Why a question gets no demonstration, in a few words."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One passage to find, and what to read there.

    `ids` are those of the passage; where only the question's are known, all of them, and `title` tells which.
    An empty title stands for any of them. To ask for is a `relation` of a `subject` ("director" of "King of
    the Sierras") or a `subquestion`; in both `#1` stands for the value of the first lookup. `value` is what
    the passage says of that; empty where the data set does not tell. `sentences` are the supporting ones.
    """

    title: str
    ids: frozenset[str] = frozenset()
    subject: str = ""
    relation: str = ""
    subquestion: str = ""
    value: str = ""
    sentences: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The title without the note in parentheses that tells it from others."""
        before, _, end = self.title.rpartition(")")
        start = before.find("(", before.rfind(")") + 1)
        return self.title if start < 0 or end.strip() else before[:start].rstrip() or self.title

    def is_in(self, passage: Passage, text: str) -> bool:
        """Whether `passage`, of which `text` was shown, is the one to find.

        Another passage with the title counts if it states the value: some pages are there in two versions.
        """
        if passage.id in self.ids:
            return not self.title or _same_title(passage.title, self.title)
        if not self.title or not _same_title(passage.title, self.title):
            return False
        return not self.ids or bool(self.value and find_text(self.value, text))


@dataclass(frozen=True, slots=True)
class Facts:
    """The lookups of a question. `by_value`: each value is stated, and is a name for the next lookup.

    Where the question compares two things, `begins` are the positions of the lookups of which they are the
    subjects, and `ends` those of the two values.
    """

    lookups: tuple[Lookup, ...]
    by_value: bool = False
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def compared(self) -> bool:
        return len(self.ends) == 2


def facts_of(question: Question) -> Facts:
    """The supporting facts of a question. Raises NoDemonstration where its metadata have none.

    Triples and decompositions in a form that is not known are passed over: the titles remain.
    """
    metadata = question.metadata
    passages = _Passages(metadata)
    if steps := steps_of(metadata.get("question_decomposition")):
        return Facts(tuple(_step(step, passages) for step in steps), by_value=True)
    if passages.titles and (triples := triples_of(metadata.get("evidences"))):
        return _by_triples(triples, passages)
    if not passages.titles and not passages.all_ids:
        raise NoDemonstration(NO_FACTS)
    if passages.titles:
        return Facts(passages.lookups())
    return Facts(tuple(Lookup("", frozenset([name])) for name in passages.ids))


def steps_of(given: object) -> list[Mapping[str, Any]]:
    """The steps of a decomposition, if all have a question and an answer."""
    steps = given if isinstance(given, list) else []
    whole = (
        isinstance(step, dict) and _are_texts(step.get("question"), step.get("answer")) for step in steps
    )
    return steps if all(whole) else []


def triples_of(given: object) -> list[Triple]:
    """The triples in a list, or in the columns `fact`, `relation` and `entity`."""
    if isinstance(given, dict):
        columns = [given.get(name) for name in ("fact", "relation", "entity")]
        same = (
            all(isinstance(column, list) for column in columns) and len({len(c or ()) for c in columns}) == 1
        )
        given = [list(row) for row in zip(*columns, strict=True)] if same else []
    rows = given if isinstance(given, list) else []
    if not all(isinstance(row, list) and len(row) == 3 and _are_texts(*row) for row in rows):
        return []
    return [(row[0], row[1], row[2]) for row in rows]


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) and value.strip() for value in values)


class _Passages:
    """The gold passages of a question: titles, ids, and which sentences support."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.titles = [str(title) for title in metadata.get("supporting_titles") or ()]
        ids = [str(name) for name in metadata.get("supporting_ids") or ()]
        facts = metadata.get("supporting_facts")
        named = (fact for fact in facts if isinstance(fact, dict)) if isinstance(facts, list) else ()
        self.facts = [fact for fact in named if _are_texts(fact.get("title"))]
        self.listed, self.ids, self.all_ids = ids, tuple(dict.fromkeys(ids)), frozenset(ids)
        pairs = list(zip(self.titles, ids, strict=True)) if len(ids) == len(self.titles) else []
        pairs += [(fact["title"], fact["id"]) for fact in self.facts if fact.get("id")]
        self.title_of = {name: title for title, name in pairs}

    def lookups(self) -> tuple[Lookup, ...]:
        """A lookup for each title; where there is an id for each, of that passage alone, since two may have
        the same title."""
        found = tuple(map(self.lookup, self.titles))
        if len(self.listed) != len(found):
            return found
        pairs = zip(found, self.listed, strict=True)
        return tuple(replace(each, ids=frozenset([name])) for each, name in pairs)

    def lookup(self, title: str, **rest: Any) -> Lookup:
        """The lookup of the passage with this title."""
        ids = frozenset(name for name, of in self.title_of.items() if of == title and name in self.all_ids)
        texts = tuple(fact["text"] for fact in self.facts if fact["title"] == title and fact.get("text"))
        return Lookup(title, ids or self.all_ids, sentences=texts, **rest)


def _step(step: Mapping[str, Any], passages: _Passages) -> Lookup:
    """A step of a decomposition: `{question, answer, id}`; the question may be `subject >> relation`.

    An `id` that is no passage's, as those in MuSiQue's own steps, is passed over.
    """
    asked, name = step["question"], step.get("id")
    name = name if name in passages.all_ids else None
    subject, arrow, relation = (part.strip() for part in asked.partition(">>"))
    title = passages.title_of.get(name or "", "")
    ids = frozenset([name]) if name else passages.all_ids
    if arrow:
        return Lookup(title, ids, subject, relation, value=step["answer"])
    return Lookup(title, ids, subquestion=asked, value=step["answer"])


def _by_triples(triples: Sequence[Triple], passages: _Passages) -> Facts:
    """Each chain of triples to its end before the next one; without an order, only the passages count."""
    chains = [list(_chain(root, triples)) for root in range(len(triples)) if _is_root(root, triples)]
    order = [place for chain in chains for place in chain]
    lookups = tuple(
        passages.lookup(
            _title(triples, place, passages.titles), subject=triples[place][0], relation=triples[place][1],
            value=triples[place][2],
        )
        for place in order
    )  # fmt: skip
    if sorted(order) == list(range(len(triples))):
        if len(chains) == 1:
            return Facts(lookups, by_value=True)
        begins = tuple(order.index(chain[0]) for chain in chains)
        ends = tuple(order.index(chain[-1]) for chain in chains)
        if len(chains) == 2 and len({lookups[end].relation for end in ends}) == 1:
            return Facts(lookups, True, begins, ends)
    return Facts(passages.lookups())


def _is_root(place: int, triples: Sequence[Triple]) -> bool:
    return not any(_same_name(triples[place][0], other[2]) for other in triples)


def _same_name(subject: str, value: str) -> bool:
    """Whether a triple begins where another ends; `Kanye` and `Kanye West` are one name."""
    words, others = _folded(subject).split(), _folded(value).split()
    return bool(words) and (words == others[: len(words)] or others == words[: len(others)] != [])


def _chain(place: int, triples: Sequence[Triple]) -> Iterator[int]:
    """The place of a triple, and of those that begin where it ends."""
    for _ in triples:
        yield place
        value = triples[place][2]
        following = [other for other, triple in enumerate(triples) if _same_name(triple[0], value)]
        if not following:
            return
        place = following[0]


def _title(triples: Sequence[Triple], place: int, titles: Sequence[str]) -> str:
    """The title of the passage that a triple is from: its subject's, else the one in the same place."""
    subject = triples[place][0]
    for title in titles:
        if _same_title(title, subject) or _same_title(Lookup(title).name, subject):
            return title
    if len(titles) == len(triples):
        return titles[place]
    raise NoDemonstration("a triple of no gold passage")


def _same_title(one: str, other: str) -> bool:
    return _folded(one) == _folded(other)


def _folded(title: str) -> str:
    """A title without accents, case and extra spaces."""
    letters = (letter for letter in normalize("NFKD", title) if not combining(letter))
    return " ".join("".join(letters).casefold().split())
