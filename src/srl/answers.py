"""Is this answer right? Exact match, F1 and containment, as SQuAD v1.1's evaluation script has them.

A gold answer of which normalising leaves nothing ("The The", "A", "!!!") is compared as it is written,
but for case and spaces: the script takes any such prediction for it, so that "a" answers "the".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 where the prediction equals any gold answer, normalised; None (no answer) equals none."""
    return float(prediction is not None and any(_same(prediction, gold) for gold in golds))


def cover_exact_match(prediction: str | None, golds: Iterable[str]) -> float:
    """1.0 where the prediction contains any gold answer as whole words, both normalised ("cover-EM").

    A gold answer of which normalising leaves nothing must be equal, as in `exact_match`.
    """
    if prediction is None:
        return 0.0
    words = f" {normalise_answer(prediction)} "
    return float(any(_covers(prediction, words, gold) for gold in golds))


def f1(prediction: str | None, golds: Iterable[str]) -> float:
    """The best overlap in words with any gold answer: 2·P·R / (P + R) over bags of normalised words."""
    if prediction is None:
        return 0.0
    words = normalise_answer(prediction).split()
    return max((_f1(prediction, words, gold) for gold in golds), default=0.0)


def contains_answer(text: str, golds: Iterable[str]) -> bool:
    """Whether `text` holds any gold answer as whole words, both normalised."""
    words = _words(text)
    return any(f" {gold} " in words for gold in map(normalise_answer, golds) if gold)


@lru_cache(4096)
def _words(text: str) -> str:
    """`text` normalised, between spaces. The last ones are kept: many episodes read the same passages."""
    return f" {normalise_answer(text)} "


def findable(golds: Iterable[str]) -> frozenset[str]:
    """The answers to look for in a text, normalised; not yes and no, which prove nothing there."""
    return frozenset(map(normalise_answer, golds)) - {"", "yes", "no"}


def _same(prediction: str, gold: str) -> bool:
    normal = normalise_answer(gold)
    if normal:
        return normalise_answer(prediction) == normal
    return bool(gold.strip()) and prediction.lower().split() == gold.lower().split()


def _covers(prediction: str, words: str, gold: str) -> bool:
    normal = normalise_answer(gold)
    return f" {normal} " in words if normal else _same(prediction, gold)


def _f1(prediction: str, words: list[str], gold: str) -> float:
    gold_words = normalise_answer(gold).split()
    if not gold_words:
        return float(_same(prediction, gold))
    same = (Counter(words) & Counter(gold_words)).total()
    return 2 * same / (len(words) + len(gold_words))
