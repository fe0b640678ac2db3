"""What must be looked up to answer a question, in order: from the supporting facts in its metadata.

Evidence triples (2WikiMultihopQA), a decomposition (MuSiQue), or the titles of the gold passages alone
(HotpotQA; SQuAD's and NQ's questions have one passage).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The lookups of a question. `by_value`: each value is stated, and is a name for the next lookup."""

    lookups: tuple[Lookup, ...]
    by_value: bool = False


def facts_of(question: Question) -> Facts:
    """The supporting facts of a question. Raises NoDemonstration where its metadata have none.

    Triples and decompositions in a form that is not known, and triples that are not one chain, as those of a
    comparison, are passed over: the titles remain.
    """
    metadata = question.metadata
    passages = _Passages(metadata)
    if steps := steps_of(metadata.get("question_decomposition")):
        return Facts(tuple(_step(step, passages) for step in steps), by_value=True)
    if not passages.titles and not passages.all_ids:
        raise NoDemonstration(NO_FACTS)
    if not passages.titles:
        return Facts(tuple(Lookup("", frozenset([name])) for name in passages.all_ids))
    if chain := _chain(triples_of(metadata.get("evidences"))):
        return Facts(
            tuple(
                passages.lookup(_title(triple, place, passages.titles), *triple)
                for place, triple in enumerate(chain)
            ),
            by_value=True,
        )
    return Facts(passages.lookups())


def steps_of(value: object) -> list[Mapping[str, Any]]:
    """The steps of a decomposition, if all have a question and an answer."""
    steps = value if isinstance(value, list) else []
    complete = (
        isinstance(step, dict) and _are_texts(step.get("question"), step.get("answer")) for step in steps
    )
    return steps if all(complete) else []


def triples_of(value: object) -> list[Triple]:
    """The triples in a list, or in the columns `fact`, `relation` and `entity`."""
    if isinstance(value, dict):
        columns = [value.get(name) for name in ("fact", "relation", "entity")]
        same = (
            all(isinstance(column, list) for column in columns) and len({len(c or ()) for c in columns}) == 1
        )
        value = [list(row) for row in zip(*columns, strict=True)] if same else []
    rows = value if isinstance(value, list) else []
    if not all(isinstance(row, list) and len(row) == 3 and _are_texts(*row) for row in rows):
        return []
    return [(row[0], row[1], row[2]) for row in rows]


def _are_texts(*values: object) -> bool:
    return all(isinstance(value, str) and value.strip() for value in values)


class _Passages:
    """The gold passages of a question: titles, ids, and which sentences support."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.titles = [str(title) for title in metadata.get("supporting_titles") or ()]
        self.ids = [str(name) for name in metadata.get("supporting_ids") or ()]
        self.all_ids = dict.fromkeys(self.ids)
        facts = metadata.get("supporting_facts")
        rows = (fact for fact in facts if isinstance(fact, dict)) if isinstance(facts, list) else ()
        self.facts = [fact for fact in rows if _are_texts(fact.get("title"))]
        pairs = list(zip(self.ids, self.titles, strict=True)) if self.are_paired else []
        self.title_of = dict(pairs + [(fact["id"], fact["title"]) for fact in self.facts if fact.get("id")])

    @property
    def are_paired(self) -> bool:
        return len(self.ids) == len(self.titles)

    def lookups(self) -> tuple[Lookup, ...]:
        """A lookup for each title; where there is an id for each, of that passage alone, since two may have
        the same title."""
        lookups = tuple(map(self.lookup, self.titles))
        if not self.are_paired:
            return lookups
        return tuple(
            replace(each, ids=frozenset([name])) for each, name in zip(lookups, self.ids, strict=True)
        )

    def lookup(self, title: str, subject: str = "", relation: str = "", value: str = "") -> Lookup:
        """The lookup of the passage with this title."""
        ids = frozenset(name for name in self.all_ids if self.title_of.get(name) == title)
        texts = tuple(fact["text"] for fact in self.facts if fact["title"] == title and fact.get("text"))
        return Lookup(title, ids or frozenset(self.all_ids), subject, relation, "", value, texts)


def _step(step: Mapping[str, Any], passages: _Passages) -> Lookup:
    """A step of a decomposition: `{question, answer, id}`; the question may be `subject >> relation`.

    An `id` that is no passage's, as those in MuSiQue's own steps, is passed over.
    """
    name = step.get("id")
    ids = frozenset([name] if name in passages.all_ids else passages.all_ids)
    title = passages.title_of.get(name, "") if name in passages.all_ids else ""
    subject, arrow, relation = (part.strip() for part in step["question"].partition(">>"))
    if arrow:
        return Lookup(title, ids, subject, relation, value=step["answer"])
    return Lookup(title, ids, subquestion=step["question"], value=step["answer"])


def _chain(triples: Sequence[Triple]) -> list[Triple]:
    """The triples in the order in which each begins where the one before ends; none where they are not one
    chain."""
    roots = [link for link in triples if not any(_same_name(link[0], other[2]) for other in triples)]
    chain, left = roots[:1], [link for link in triples if link is not roots[0]] if len(roots) == 1 else []
    while left:
        following = next((link for link in left if _same_name(link[0], chain[-1][2])), None)
        if following is None:
            return []
        chain.append(following)
        left.remove(following)
    return chain if len(roots) == 1 else []


def _same_name(subject: str, value: str) -> bool:
    """Whether a triple begins where another ends; `Kanye` and `Kanye West` are one name."""
    first, second = _folded(subject).split(), _folded(value).split()
    return bool(first) and (first == second[: len(first)] or second == first[: len(second)] != [])


def _title(triple: Triple, place: int, titles: Sequence[str]) -> str:
    """The title of the passage that a triple is from: its subject's, else the one in the same place."""
    for title in titles:
        if _same_title(title, triple[0]) or _same_title(Lookup(title).name, triple[0]):
            return title
    if place < len(titles):
        return titles[place]
    raise NoDemonstration("a triple of no gold passage")


def _same_title(a: str, b: str) -> bool:
    return _folded(a) == _folded(b)


def _folded(title: str) -> str:
    """A title without accents, case and extra spaces."""
    letters = (letter for letter in normalize("NFKD", title) if not combining(letter))
    return " ".join("".join(letters).casefold().split())
