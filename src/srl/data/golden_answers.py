"""What a field of golden answers may be: one answer or several, in each form that published files have."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import isfinite, isnan
from typing import Any

JOINT = "<|answer_split|>"
"""Joins several answers to one text in DeepResearcher's files."""
_FIELDS = (
    *("target", "ground_truth", "golden_answers", "answers", "answer"),
    *("value", "aliases", "humananswers"),  # TriviaQA's
    "text",  # SQuAD's
)
"""The fields of an object that have answers, in lower case."""
_STRING = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_LIST = re.compile(rf"\[\s*{_STRING}(?:[\s,]+{_STRING})*[\s,]*\]", re.DOTALL)
"""A list of texts as Python or numpy writes it; numpy has no commas."""
_OBJECT = re.compile(r"""\{\s*['"](?:target|ground_truth)['"]\s*:(.*)\}""", re.DOTALL)
_UNCLEAR = re.compile(
    r"""\A(?:[\[{]\s*['"]|array\()"""  # a list or an object that is cut, or of another language
    r"|(?<=.)(?:\t|\|\|\||\[SEP\]|<\|?[a-z_]{0,20}(?:split|sep)[a-z_]{0,20}\|?>)(?=.)",
    re.DOTALL | re.IGNORECASE,
)


class UnclearAnswers(ValueError):  # noqa: N818  # what is wrong with a value
    """A value that looks like several answers in one text, or is none."""


def golden_answers(value: object) -> tuple[str, ...]:
    """The accepted answers in `value`, stripped, each once; none where there are none.

    `value` is a text, a number, a truth value, or a list (also numpy's), or an object of them such as
    `{"target": …}`; or a text that is one of these in JSON or Python, or joined by `<|answer_split|>`. Other
    signs, as in `9/11` and `Tom & Jerry`, belong to an answer. Raises UnclearAnswers.
    """
    return tuple(dict.fromkeys(text.strip() for text in _answers(value) if text.strip()))


def _answers(value: Any, depth: int = 0) -> Iterator[str]:
    if hasattr(value, "tolist"):  # numpy's arrays and numbers
        value = value.tolist()
    if isinstance(value, str):
        yield from _in_text(value, depth)
    elif isinstance(value, bool):
        yield from ("yes", "true") if value else ("no", "false")
    elif isinstance(value, int | float | Decimal):
        yield from _number(value)
    elif isinstance(value, list | tuple) and depth < 4:
        for part in value:
            yield from _answers(part, depth + 1)
    elif isinstance(value, Mapping) and depth < 4:
        named = [part for name, part in value.items() if str(name).lower() in _FIELDS]
        if not named:
            raise UnclearAnswers
        for part in named:
            yield from _answers(part, depth + 1)
    elif value is not None:
        raise UnclearAnswers


def _number(value: int | float | Decimal) -> Iterator[str]:
    """1912.0 is 1912, as pandas writes whole numbers beside missing ones, which are NaN."""
    if isnan(value):
        return
    if not isfinite(value):
        raise UnclearAnswers
    yield str(int(value)) if value == int(value) else str(value)


def _in_text(text: str, depth: int) -> Iterator[str]:
    if JOINT in text:
        for part in text.split(JOINT):
            yield from _in_text(part, depth)
        return
    try:
        parsed = json.loads(text) if text.lstrip()[:1] in ("[", "{") else None
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict | list) and not (depth and _is_interval(parsed)):
        yield from _answers(parsed, depth + 1)
    elif _LIST.fullmatch(text.strip()):
        yield from map(_unquoted, re.findall(_STRING, text, re.DOTALL))
    elif found := _OBJECT.fullmatch(text.strip()):
        inner = found[1].strip()
        inner = inner if inner.startswith("[") else f"[{inner}]"
        if not _LIST.fullmatch(inner):
            raise UnclearAnswers
        yield from _in_text(inner, depth)
    elif _UNCLEAR.search(text.strip()):
        raise UnclearAnswers
    else:
        yield text


def _is_interval(parsed: object) -> bool:
    """Whether it is one answer, as `[0, 1]`, where it stands in a list of answers."""
    return isinstance(parsed, list) and len(parsed) > 1 and all(type(x) in (int, float) for x in parsed)


def _unquoted(literal: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of `\d` and the like
        try:
            return str(ast.literal_eval(literal))
        except (SyntaxError, ValueError):
            raise UnclearAnswers from None
