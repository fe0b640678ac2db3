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
_PARTS = {"[": "]", "{": "}", "(": ")", '"': '"', "'": "'"}
"""How a text begins and ends that may be a value in JSON or Python."""
_LONGEST = 20_000
"""Characters of a text that is read as Python."""
_NUMBERS = re.compile(r"[\s\d.,e+\-()\[\]{}]+")
"""An interval as `[0, 1]`, or several, which are one answer where they stand in a list of answers."""
_UNCLEAR = re.compile(
    # a list, an object or a tuple that is cut, or of another language
    r"""\A["']?[\[{]\s*(?:[\[{(]\s*){0,3}\\?(?:(?:None|nan|True|False|-?\d[\d.]*)[\s,]+|[bu])?['"‘“]"""
    r"""|\A\(\s*['"‘“](?:[^'"’”]*['"’”]\s*,|.*['"’”][\s,]*\)\Z)"""
    r"|\A[\[{(]?\s*[\w.]{1,40}\(\s*[\[{]\s*(?:['\"‘“({[\-]|\d)"  # a call, as `array([…])`
    r"|\A\[\s*-?\d[\d.e+-]*(?:\s+(?:nan|-?\d[\d.e+-]*))+\s*\]\Z"  # numpy's numbers
    r"|(?<=.)(?:[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]|\|\|\||<br ?/?>|\[(?:SEP|OR)\]|</s>|<OR>"
    r"|<[a-z_]{0,20}(?:split|sep)[a-z_]{0,20}>|<\|[a-z_]{1,30}\|>)(?=.)",
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
    elif isinstance(value, list) and depth < 4:  # pyarrow's maps are lists of tuples
        for part in value:
            yield from _answers(part, depth + 1)
    elif isinstance(value, Mapping) and depth < 4:
        parts = [part for name, part in value.items() if str(name).lower() in _FIELDS]
        if not parts:
            raise UnclearAnswers
        for part in parts:
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
    text = text.strip()
    parsed = _parsed(text)
    is_interval = len(parsed or ()) > 1 and _NUMBERS.fullmatch(text) and (depth or isinstance(parsed, tuple))
    if parsed and not is_interval:
        yield from _answers(list(parsed) if isinstance(parsed, tuple) else parsed, depth + 1)
    elif parsed is None and _UNCLEAR.search(text):
        raise UnclearAnswers
    elif parsed != []:
        yield text


def _parsed(text: str) -> list[Any] | tuple[Any, ...] | dict[Any, Any] | None:
    """The list, tuple, set (as a tuple) or object that `text` is in JSON, Python or numpy, quoted or not."""
    if len(text) < 2 or _PARTS.get(text[0]) != text[-1]:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _python(text)
    if isinstance(value, str):
        return _parsed(value.strip())
    return value if isinstance(value, list | tuple | dict) and text[0] in "[{(" else None


def _python(text: str) -> Any:
    """The value of a literal; None where it is none, or Python would join texts that numpy lists."""
    if _LIST.fullmatch(text):
        values = [_python(literal) for literal in re.findall(_STRING, text, re.DOTALL)]
        return None if None in values else values
    if len(text) > _LONGEST:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of `\d` and the like
        try:
            tree = ast.parse(text, mode="eval").body
            value = ast.literal_eval(ast.Tuple(tree.elts) if isinstance(tree, ast.Set) else tree)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    return None if re.search(r"_\s*[bu]?_", re.sub(_STRING, "_", text, flags=re.DOTALL)) else value
