"""Merging corpora: which passages are the same, and which of them are gold for a question.

Two passages are the same if their titles are and their texts are, ignoring white space, the form of
quotation marks (curly, ``…'') and how Unicode composes letters (NFC). Case and all other characters count:
the data sets cut the same Wikipedia pages differently, and only copies may become one.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from srl.data.corpus import title_key
from srl.trajectory import Passage, Question

_STRAIGHT = str.maketrans("“”„‘’", '"""\'\'')


def passage_key(passage: Passage) -> bytes:
    """16 bytes that are equal for passages that are the same."""
    return blake2b(f"{_plain(passage.title)}\0{_plain(passage.text)}".encode(), digest_size=16).digest()


def _plain(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).translate(_STRAIGHT)
    return "".join(text.split()).replace("``", '"').replace("''", '"')


class _Gold(NamedTuple):
    """A gold passage: its key, its title as `title_key` has it, and as it is written."""

    key: bytes
    title: str
    heading: str


class GoldPassages:
    """Finds the gold passages of questions in a corpus whose passages go by once.

    A gold passage is found by its own text. Where the corpus lacks the text, or a question names only titles,
    it is found by its title: the one passage with this title or, if there are several, the one from the
    question's own data source. 2WikiMultihopQA's evidence triples stand in for titles: their subjects are
    titles. Memory depends on the questions, not on the corpus.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        self.names: set[str] = set()
        """The ids that questions name gold passages with."""
        self._gold: dict[str, _Gold] = {}  # by id
        self._gold_keys: set[bytes] = set()
        self._titles: set[str] = set()
        self._ids: set[str] = set()
        self._by_key: dict[bytes, str] = {}
        self._by_title: dict[str, list[str]] = {}
        for question in questions:
            self.names.update(_ids(question))
            self._titles.update(map(title_key, _titles(question)))

    def know(self, passage: Passage) -> None:
        """Remember what a gold passage says, from wherever it is published."""
        if passage.id in self.names:
            self._gold[passage.id] = _Gold(passage_key(passage), title_key(passage.title), passage.title)
            self._gold_keys.add(self._gold[passage.id].key)
            self._titles.add(self._gold[passage.id].title)

    @property
    def unknown(self) -> set[str]:
        """The ids of gold passages whose text is not known."""
        return self.names - self._gold.keys()

    def see(self, passage: Passage, key: bytes) -> bool:
        """Remember a passage of the corpus if it may be gold, and return whether it may."""
        if by_id := passage.id in self.names:
            self._ids.add(passage.id)
        if by_text := key in self._gold_keys:
            self._by_key.setdefault(key, passage.id)
        if by_title := (title := title_key(passage.title)) in self._titles:
            self._by_title.setdefault(title, []).append(passage.id)
        return by_id or by_text or by_title

    def resolve(self, question: Question) -> Question:
        """The question with the ids that its gold passages have in the corpus.

        The id of a passage that the corpus lacks stays as it is. Titles become ids if all of them are found,
        and a question that has ids alone gets their titles.
        """
        if names := _ids(question):
            new_ids = {name: self._by_text(name) or self._by_title_of(name, question) for name in names}
            question = renamed(question, {name: new for name, new in new_ids.items() if new is not None})
            return self._with_titles(question, names)
        titles = _titles(question)
        ids = [self._titled(title_key(title), question.data_source) for title in titles]
        if None in ids or not titles:
            return question
        gold = {"supporting_titles": titles, "supporting_ids": list(dict.fromkeys(ids))}
        return replace(question, metadata={**question.metadata, **gold})

    def _with_titles(self, question: Question, names: Sequence[str]) -> Question:
        """The question with the titles of its gold passages `names`, if nothing else tells of them."""
        titles = [self._gold[name].heading for name in names if name in self._gold]
        fields = {"supporting_titles", "supporting_facts", "question_decomposition", "evidences"}
        if not all(titles) or len(titles) < len(names) or not fields.isdisjoint(question.metadata):
            return question
        return replace(question, metadata={**question.metadata, "supporting_titles": titles})

    def _by_text(self, name: str) -> str | None:
        """The id in the corpus of the gold passage `name`, by its text."""
        if name in self._ids:
            return name
        return self._by_key.get(self._gold[name].key) if name in self._gold else None

    def _by_title_of(self, name: str, question: Question) -> str | None:
        return self._titled(self._gold[name].title, question.data_source) if name in self._gold else None

    def _titled(self, title: str, source: str) -> str | None:
        """The one passage with this title; of several, the one from `source`."""
        several = self._by_title.get(title, [])
        ids = several if len(several) == 1 else [name for name in several if name.startswith(f"{source}/")]
        return ids[0] if len(ids) == 1 else None


def _ids(question: Question) -> list[str]:
    return texts(question.metadata.get("supporting_ids"))


def _titles(question: Question) -> list[str]:
    """The titles that a question names, or else the subjects of its evidence."""
    titles = texts(question.metadata.get("supporting_titles"))
    evidences = question.metadata.get("evidences")
    if titles or not isinstance(evidences, list):
        return titles
    subjects = [triple[0] for triple in evidences if isinstance(triple, list) and triple]
    return list(dict.fromkeys(texts(subjects)))


def texts(value: object) -> list[str]:
    """The items of a list as texts; none of anything else."""
    return [str(part) for part in value] if isinstance(value, list) else []


def renamed(question: Question, names: Mapping[str, str]) -> Question:
    """The question with `names` in place of ids, also in its facts and the steps of its decomposition."""
    if all(old == new for old, new in names.items()):
        return question
    metadata = dict(question.metadata)
    metadata["supporting_ids"] = list(dict.fromkeys(names.get(name, name) for name in _ids(question)))
    for key in ("supporting_facts", "question_decomposition"):
        if isinstance(rows := metadata.get(key), list):
            metadata[key] = [_with_id(row, names) for row in rows]
    return replace(question, metadata=metadata)


def _with_id(row: Any, names: Mapping[str, str]) -> Any:
    return {**row, "id": names[row["id"]]} if isinstance(row, dict) and row.get("id") in names else row


class Merging:
    """Which passages of several files become the corpus: each once, and the gold ones are remembered.

    `split` gives the parts that are written in place of a passage (`srl.data.split_passages`).
    """

    def __init__(
        self, gold: GoldPassages, split: Callable[[Passage], Sequence[Passage]] | None = None
    ) -> None:
        self.gold, self.merged, self.split = gold, 0, 0
        self.gold_parts: dict[str, Sequence[Passage]] = {}
        """The parts of passages that may be gold and were split, by the id of the passage."""
        self._keys: set[bytes] = set()
        self._split = split

    def written(self, passage: Passage) -> Sequence[Passage]:
        """What is written of a passage: itself, or its parts; nothing if an earlier one is the same.

        `merged` counts those of which nothing is written, and `split` those that are written in parts.
        """
        key = passage_key(passage)
        if key in self._keys:
            self.merged += 1
            return ()
        self._keys.add(key)
        may_be_gold = self.gold.see(passage, key)
        parts = (passage,) if self._split is None else self._split(passage)
        if len(parts) > 1:
            self.split += 1
            if may_be_gold:
                self.gold_parts[passage.id] = parts
        return parts
