"""Converts an API's results to hits: plain text, each URL once, in the API's order."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from hashlib import blake2b

from srl.trajectory import Hit, Passage
from srl_web.api import Result

_MARKUP = re.compile(r"</?(?:b|br|em|i|mark|span|strong)(?:\s[^<>]*)?/?>", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def cleaned(results: Iterable[Result]) -> list[Result]:
    """The results as plain text: no markup, entities, control characters or lone surrogates."""
    return [Result(_plain(title), _plain(text), encodable(url).strip()) for title, text, url in results]


def hits_of(results: Iterable[Result], k: int) -> list[Hit]:
    """The first `k` results with different URLs; the score of rank r is 1/r."""
    unique: dict[str, Passage] = {}
    for title, text, url in results:
        contents = f'"{title}"\n{text}'
        name = url or f"web:{blake2b(contents.encode(), digest_size=6).hexdigest()}"
        unique.setdefault(name, Passage(name, contents))
    return [Hit(passage, 1 / rank) for rank, passage in enumerate(list(unique.values())[:k], start=1)]


def encodable(text: str) -> str:
    """`text` with unpaired surrogates, which UTF-8 cannot encode, replaced."""
    return text.encode("utf-8", "replace").decode()


def _plain(text: str) -> str:
    """`text` on one line, without the markup, entities and control characters of snippets."""
    return " ".join(_CONTROL.sub(" ", html.unescape(_MARKUP.sub("", encodable(text)))).split())
