"""Splitting long passages at sentence ends, so that a passage has at most so many words.

A short passage costs the policy fewer tokens to read. The parts of `ID` are `ID#1`, `ID#2`, … with the same
title. A question whose gold passage was split names one part in its place: that with the most of its
supporting sentences, then of the values in its evidence and the titles of its other gold passages, then with
a golden answer; the first of equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from semantic_text_splitter import TextSplitter

from srl.answers import findable, normalise_answer
from srl.data.merge import renamed, texts
from srl.data.supporting_facts import steps_of, triples_of
from srl.trajectory import Passage, Question, contents_of


class Splitter:
    """Splits passages of more than `words` words; the words of the title do not count.

    A passage of one line has no title: its line is the text.
    A part ends where a sentence does (Unicode's sentences, UAX #29), or inside a sentence that is longer than
    `words` itself. It has as many sentences as fit.
    """

    def __init__(self, words: int) -> None:
        self.words = words
        self._splitter = TextSplitter.from_callback(_words, words)

    def split(self, passage: Passage) -> Sequence[Passage]:
        """The parts of a long passage, else the passage alone."""
        text = passage.text or passage.contents
        if _words(text) <= self.words:
            return (passage,)
        return [
            replace(
                passage,
                id=f"{passage.id}#{number}",
                contents=contents_of(passage.title, part) if passage.text else part,
            )
            for number, part in enumerate(self._splitter.chunks(text), start=1)
        ]


def _words(text: str) -> int:
    return len(text.split())


def name_parts(question: Question, parts: Mapping[str, Sequence[Passage]]) -> Question:
    """The question with a part in place of each gold passage that has `parts`, by its id."""
    names = [name for name in texts(question.metadata.get("supporting_ids")) if name in parts]
    if not names:
        return question
    stated = _Stated(question)
    return renamed(question, {name: max(parts[name], key=stated.in_part).id for name in names})


class _Stated:
    """What the gold passages of a question state, as far as its metadata tell; all normalised."""

    def __init__(self, question: Question) -> None:
        metadata = question.metadata
        facts = metadata.get("supporting_facts")
        rows = [fact for fact in facts if isinstance(fact, dict)] if isinstance(facts, list) else []
        objects = [value for _, _, value in triples_of(metadata.get("evidences"))]
        answers = [step["answer"] for step in steps_of(metadata.get("question_decomposition"))]
        self._sentences = _normal(str(fact["text"]) for fact in rows if fact.get("text"))
        self._values = _normal([*objects, *answers, *texts(metadata.get("supporting_titles"))])
        self._answers = findable(question.golden_answers)

    def in_part(self, part: Passage) -> tuple[int, int, bool]:
        """How much of it a part has, what counts most first; its own title tells nothing."""
        title = normalise_answer(part.title) if part.text else ""
        text = f" {normalise_answer(part.text or part.contents)} "
        return (
            sum(f" {sentence} " in text for sentence in self._sentences),
            sum(f" {value} " in text for value in self._values - {title}),
            any(f" {answer} " in text for answer in self._answers),
        )


def _normal(values: Iterable[str]) -> frozenset[str]:
    return frozenset(map(normalise_answer, values)) - {""}
