"""Splits: guessing them from file names, and holding out questions without overlap."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from srl.errors import UserError, nearest
from srl.trajectory import Question

SPLITS = ("train", "validation", "test")
_ALIASES = {"dev": "validation", "val": "validation", "valid": "validation"}
_IN_NAME = re.compile(r"(?<![a-z])(train|dev|val|valid|validation|test)(?![a-z])")


def canonical_split(name: str) -> str:
    """`train`, `validation` or `test`; `dev`, `val` and `valid` mean validation."""
    split = _ALIASES.get(name, name)
    if split not in SPLITS:
        hint = nearest(name, [*SPLITS, *_ALIASES])
        raise UserError(f"no split {name!r}: there are {', '.join(SPLITS)} (dev means validation){hint}")
    return split


def guess_split(path: Path) -> str | None:
    """The split in a file's name, or None where it names none or several."""
    found = {_ALIASES.get(name, name) for name in _IN_NAME.findall(path.name.lower())}
    return found.pop() if len(found) == 1 else None


def split_off(questions: Sequence[Question], amount: float) -> tuple[list[Question], list[Question]]:
    """`(rest, held out)`: hold out a share (below 1) or a number of questions, by a fixed hash.

    Questions about the same single paragraph stay together, so the two sets share no paragraph. A share is
    approximate, since each question is decided by its own hash.
    """
    keys = _held_out_keys(Counter(map(_key, questions)), amount)
    held = [replace(question, split="validation") for question in questions if _key(question) in keys]
    rest = [question for question in questions if _key(question) not in keys]
    if not held or not rest:
        what = "leaves none for training" if held else "sets none aside"
        raise UserError(
            f"a validation set of {amount:g} out of {len(questions)} questions {what}; choose another size"
        )
    return rest, held


def _key(question: Question) -> str:
    """What the two sets must not share: the question's paragraph if it has exactly one, else the question."""
    support = question.metadata.get("supporting_ids")
    return str(support[0]) if isinstance(support, list) and len(support) == 1 else question.id


def _held_out_keys(keys: Counter[str], amount: float) -> set[str]:
    if amount < 1:
        return {key for key in keys if _unit(key) < amount}
    held: set[str] = set()
    total = 0
    for key in sorted(keys, key=_unit):
        if total >= amount:
            break
        held.add(key)
        total += keys[key]
    return held


def _unit(key: str) -> float:
    """A hash in [0, 1), the same on every machine."""
    return int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "big") / 2**56


def without_repeats(questions: Iterable[Question], others: Iterable[Question]) -> list[Question]:
    """The questions that `others` does not ask in the same words (ignoring case and spaces)."""
    asked = {_words(question) for question in others}
    return [question for question in questions if _words(question) not in asked]


def _words(question: Question) -> str:
    return " ".join(question.text.casefold().split()).rstrip(" ?.")
