"""What must be looked up to answer a question, in order: from the supporting facts in its metadata.

These are the titles of the gold passages, or their ids where they have no titles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import combining, normalize

from srl.trajectory import Passage, Question

Triple = tuple[str, str, str]
"""Subject, relation and object."""


NO_FACTS = "no supporting facts"
"""The reason of a question whose data set has no gold passages."""


class NoDemonstration(Exception):  # noqa: N818  # not an error of the program: an outcome
    """Why a question gets no demonstration, in a few words."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """One passage to find.

    `ids` are those of the passage; where only the question's are known, all of them, and `title` tells which.
    An empty title stands for any of them. `sentences` are the supporting ones.
    """

    title: str
    ids: frozenset[str] = frozenset()
    sentences: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The title without the note in parentheses that tells it from others."""
        before, _, end = self.title.rpartition(")")
        start = before.find("(", before.rfind(")") + 1)
        return self.title if start < 0 or end.strip() else before[:start].rstrip() or self.title

    def is_in(self, passage: Passage) -> bool:
        """Whether `passage` is the one to find."""
        named = bool(self.title) and _folded(passage.title) == _folded(self.title)
        if not self.ids:
            return named
        return passage.id in self.ids and (named or not self.title)


def lookups_of(question: Question) -> tuple[Lookup, ...]:
    """The passages that a question needs. Raises NoDemonstration where its metadata have none."""
    passages = _Passages(question.metadata)
    if passages.titles:
        return passages.lookups()
    if not passages.all_ids:
        raise NoDemonstration(NO_FACTS)
    return tuple(Lookup("", frozenset([name])) for name in passages.all_ids)


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

    def lookup(self, title: str) -> Lookup:
        """The lookup of the passage with this title."""
        ids = frozenset(name for name in self.all_ids if self.title_of.get(name) == title)
        texts = tuple(fact["text"] for fact in self.facts if fact["title"] == title and fact.get("text"))
        return Lookup(title, ids or frozenset(self.all_ids), texts)


def _folded(title: str) -> str:
    """A title without accents, case and extra spaces."""
    letters = (letter for letter in normalize("NFKD", title) if not combining(letter))
    return " ".join("".join(letters).casefold().split())
