"""Splits: guessing them from file names, holding out questions without overlap, the same question twice."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from srl.errors import UserError, nearest
from srl.trajectory import Question

SPLITS = ("train", "validation", "test")
ALIASES = {"dev": "validation", "val": "validation", "valid": "validation"}
_IN_NAME = re.compile(r"(?<![a-z])(train|dev|val|valid|validation|test)(?![a-z])")


def canonical_split(name: str) -> str:
    """`train`, `validation` or `test`; `dev`, `val` and `valid` mean validation."""
    split = ALIASES.get(name, name)
    if split not in SPLITS:
        hint = nearest(name, [*SPLITS, *ALIASES])
        raise UserError(f"no split {name!r}: there are {', '.join(SPLITS)} (dev means validation){hint}")
    return split


def guess_split(path: Path) -> str | None:
    """The split in a file's name, or None where it names none or several."""
    splits = {ALIASES.get(name, name) for name in _IN_NAME.findall(path.name.lower())}
    return splits.pop() if len(splits) == 1 else None


def parse_amounts(texts: Sequence[str]) -> float | dict[str, float]:
    """An amount of questions: `["0.1"]` for all data sources, or `["nq=60", "squad=0.1"]` for each by name;
    else raises UserError."""
    amounts: dict[str, float] = {}
    for text in texts:
        source, _, number = text.rpartition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = math.nan
        if not 0 <= amount < math.inf:
            raise UserError(f"--val {text}: expected a share (below 1), a number, or SOURCE=NUMBER")
        if source in amounts:
            raise UserError(f"--val {text}: there is another amount for {source or 'all sources'}")
        amounts[source] = amount
    if "" in amounts and len(amounts) > 1:
        raise UserError("--val takes one amount for all sources, or SOURCE=NUMBER for each; not both")
    return amounts.get("", amounts or 0.0)


def split_off(
    questions: Sequence[Question], amount: float | Mapping[str, float]
) -> tuple[list[Question], list[Question]]:
    """`(rest, held out)`: hold out a number of questions, or a share (below 1) of them rounded to a number.

    `amount` is of all questions, or of each data source by name; one that is not named gives none. An amount
    of all is divided among the data sources in proportion to their questions, and a hash chooses them.
    Questions about the same single paragraph stay together, so the two sets share no paragraph, and a source
    may give a few more than its part.
    """
    by_source: dict[str, Counter[str]] = defaultdict(Counter)
    for question in questions:
        by_source[question.data_source][_key(question)] += 1
    sizes = {source: keys.total() for source, keys in by_source.items()}
    if isinstance(amount, Mapping):
        check_sources(amount, sizes)
        parts = {name: _number(amount.get(name, 0.0), size) for name, size in sizes.items()}
    else:
        parts = proportional(sizes, _number(amount, len(questions)))
    keys = {key for source, part in parts.items() for key in _held_out_keys(by_source[source], part)}
    validation = [replace(question, split="validation") for question in questions if _key(question) in keys]
    training = [question for question in questions if _key(question) not in keys]
    if not validation or not training:
        what = "leaves none for training" if validation else "sets none aside"
        raise UserError(
            f"a validation set of {sum(parts.values())} out of {len(questions)} questions {what} "
            "(those about one paragraph stay together)",
            hint="choose another size, or name a file of validation questions",
        )
    return training, validation


def _number(amount: float, size: int) -> int:
    """A number of questions, or a share (below 1) of `size` questions."""
    return round(amount * size if amount < 1 else amount)


def check_sources(amounts: Iterable[str], sizes: Iterable[str]) -> None:
    """Raises UserError for a data source of `--val` that the questions, of the sources `sizes`, lack."""
    if unknown := [name for name in amounts if name not in sizes]:
        raise UserError(
            f"--val {unknown[0]}=…: no question has this data source; there are {', '.join(sorted(sizes))}"
            f"{nearest(unknown[0], list(sizes))}"
        )


def proportional(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` divided in proportion to `sizes`: each share is rounded down or up, the largest remainders up
    (Hamilton's method); equal remainders by name. Where `total` is smaller, a share may be 0."""
    everything = sum(sizes.values())
    shares = {name: size * total // everything for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: (-(sizes[name] * total % everything), name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _key(question: Question) -> str:
    """What the two sets must not share: the question's paragraph if it has exactly one, else the question."""
    support = question.metadata.get("supporting_ids")
    return str(support[0]) if isinstance(support, list) and len(support) == 1 else question.id


def _held_out_keys(keys: Counter[str], amount: int) -> set[str]:
    """Keys with `amount` questions or a few more; a hash, the same on every machine, orders them."""
    held_out: set[str] = set()
    total = 0
    for key in sorted(keys, key=lambda key: blake2b(key.encode(), digest_size=7).digest()):
        if total >= amount:
            break
        held_out.add(key)
        total += keys[key]
    return held_out


def without_repeats(questions: Iterable[Question], others: Iterable[Question]) -> list[Question]:
    """The questions that are not among `others`: neither in the same words nor with the same id of a file.

    Words are compared without case, punctuation and the form of letters. An id that is a row number says
    nothing.
    """
    keys: set[tuple[str, ...]] = set()
    for question in others:
        keys |= {_words(question), _own_id(question)}
    return [question for question in questions if keys.isdisjoint((_words(question), _own_id(question)))]


def _words(question: Question) -> tuple[str, ...]:
    """The words of a question; the text itself if it has none."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", question.text).casefold())
    return tuple(words) or (question.text,)


def _own_id(question: Question) -> tuple[str, ...]:
    """The data source and the id in its file; unlike any other question's for a row number."""
    name = question.id.removeprefix(f"{question.data_source}/")
    split, _, rest = name.partition("/")
    name = rest if split in SPLITS else name  # not that of the question: one held out has its id of training
    is_row = name.isdecimal() and len(name) < 10
    return ("", question.id) if is_row else ("", question.data_source, name)
