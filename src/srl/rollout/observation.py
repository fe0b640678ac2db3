"""What the model sees of a search: the passages as text between tags, cut to a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from srl.protocol import escape, render_information, render_passage
from srl.rollout.codec import Codec
from srl.trajectory import Hit, Search

_CHARS_A_TOKEN = 100
"""Text beyond this many characters per available token is not even encoded."""
_LABEL = "Doc 1(Title: "
"""What a rendered passage begins with, and the passage does not."""

LEAST_INFORMATION = render_information([f"{_LABEL}Encyclopaedia …"])
"""A short observation, which a prompt that is made of what was retrieved must have room for."""


class Information(NamedTuple):
    """An observation, as text and ids; it holds the first `shown` hits, none if only a label has room.

    `cut`: what is left of the only one, in whole words, where its middle was left out; else None.
    """

    text: str
    token_ids: list[int]
    shown: int
    cut: str | None = None

    def of(self, search: Search) -> Search:
        """The search with what of it is shown here."""
        return replace(search, shown=self.shown, cut=self.cut)


def fit_information(
    hits: Sequence[Hit], budget: int, codec: Codec, after: Sequence[int] | None = None
) -> Information | None:
    """The observation in at most `budget` tokens; None if not even a stub of the first passage fits.

    Whole passages are dropped from the end; the last one left is cut in its middle. The closing tag is
    always kept. `after` are the ids that it follows (`Codec.encode_text`).
    """

    def encode(passages: Sequence[str]) -> tuple[str, list[int]]:
        text = render_information(passages)
        return text, codec.encode_text(text, after)

    return _fit([render_passage(*each) for each in enumerate(hits, start=1)], budget, encode, len(_LABEL))


Encode = Callable[[Sequence[str]], tuple[str, list[int]]]
"""Rendered passages → the text that they are shown as, and its ids."""


def fit_result(search: Search, budget: int, encode: Encode, with_ids: bool) -> Information | None:
    """What `encode` makes of what a tool returned, in the way of `fit_information`.

    A search's hits are passages, with their ids where another tool takes them; another tool's are its text.
    """
    if search.tool != "search":
        return _fit([escape(hit.passage.contents) for hit in search.hits], budget, encode, label=0)
    passages = [render_passage(rank, hit, with_ids) for rank, hit in enumerate(search.hits, start=1)]
    return _fit(passages, budget, encode, len(_LABEL))


def _fit(passages: Sequence[str], budget: int, encode: Encode, label: int) -> Information | None:
    """As many `passages` as `budget` tokens hold; the first `label` characters of each are not its own."""
    for count in range(len(passages), 0, -1):
        if sum(map(len, passages[:count])) > budget * _CHARS_A_TOKEN:
            continue
        text, ids = encode(passages[:count])
        if len(ids) <= budget:
            return Information(text, ids, count)
    if not passages:
        text, ids = encode([])
        return Information(text, ids, 0) if len(ids) <= budget else None
    return _cut_middle(passages[0], budget, encode, label)


def _cut_middle(passage: str, budget: int, encode: Encode, label: int) -> Information | None:
    """`passage` without the smallest middle part that makes it fit, found by bisection."""
    low, high, best = 0, min(len(passage) - 1, budget * _CHARS_A_TOKEN), None
    while low <= high:
        length = (low + high) // 2
        start, stop = length - length // 3, len(passage) - length // 3
        text, ids = encode([_joined(passage[:start], passage[stop:])])
        if len(ids) > budget:
            high = length - 1
            continue
        low, is_there = length + 1, start > label  # else it is the label alone
        cut = _words_left(passage, start, stop, label) if is_there else None
        best = Information(text, ids, int(is_there), cut)
    return best


def _joined(head: str, tail: str) -> str:
    return f"{head} … {tail}".strip()


def _words_left(passage: str, start: int, stop: int, label: int) -> str:
    """`passage` without its middle from `start` to `stop`, nor the words that are cut in two there."""
    while start > 0 and not (passage[start - 1].isspace() or passage[start].isspace()):
        start -= 1
    while stop < len(passage) and not (passage[stop - 1].isspace() or passage[stop].isspace()):
        stop += 1
    return _joined(passage[label:start], passage[stop:])
