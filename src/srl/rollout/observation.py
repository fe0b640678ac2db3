"""What the model sees of a search: the passages as text between tags, cut to a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from srl.protocol import render_information, render_passage
from srl.rollout.codec import Codec
from srl.trajectory import Hit

_CHARS_A_TOKEN = 100
"""Text beyond this many characters per available token is not even encoded."""


def fit_information(hits: Sequence[Hit], budget: int, codec: Codec) -> tuple[str, list[int]] | None:
    """The observation in at most `budget` tokens, as text and ids; None if not even one word fits.

    Whole passages are dropped from the end; the last one left is cut in its middle. The closing tag is
    always kept.
    """
    passages = [render_passage(position, hit) for position, hit in enumerate(hits, start=1)]
    for kept in range(len(passages), 0, -1):
        if sum(map(len, passages[:kept])) > budget * _CHARS_A_TOKEN:
            continue
        fitted = _encode_information(passages[:kept], codec)
        if len(fitted[1]) <= budget:
            return fitted
    if not passages:
        fitted = _encode_information([], codec)
        return fitted if len(fitted[1]) <= budget else None
    return _cut_middle(passages[0], budget, codec)


def _encode_information(passages: Sequence[str], codec: Codec) -> tuple[str, list[int]]:
    text = render_information(passages)
    return text, codec.encode_text(text)


def _cut_middle(passage: str, budget: int, codec: Codec) -> tuple[str, list[int]] | None:
    """`passage` without the smallest middle part that makes it fit, found by bisection."""
    low, high, best = 0, min(len(passage) - 1, budget * _CHARS_A_TOKEN), None
    while low <= high:
        kept = (low + high) // 2
        head = passage[: kept - kept // 3]
        tail = passage[len(passage) - kept // 3 :] if kept // 3 else ""
        fitted = _encode_information([f"{head} … {tail}".strip()], codec)
        if len(fitted[1]) <= budget:
            best, low = fitted, kept + 1
        else:
            high = kept - 1
    return best
