"""Search-R1's tags as text: the actions in what the policy writes.

Pure text in, text out (arXiv 2503.09516, table 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

STOP_STRINGS = ("</search>", "</answer>")

ENGINE = r"""\s+engine\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s"'<>=]+)\s*"""
"""A pattern, without groups, of what may stand in a search tag after its name: ` engine="web"`."""

_OPENING = re.compile(rf"<(search|answer)(?P<engine>(?<=search){ENGINE})?>")


@dataclass(frozen=True, slots=True)
class Action:
    """What a turn asks for: a search, with the default retriever or a named one, or the end."""

    kind: Literal["search", "answer"]
    content: str
    retriever: str = ""


def parse_action(text: str) -> Action | None:
    """The first complete action in one turn's text, or None.

    A search tag may name a retriever: `<search engine="web">`, with or without quotes and spaces.
    """
    last = {"search": text.rfind("</search>"), "answer": text.rfind("</answer>")}
    opening = next((tag for tag in _OPENING.finditer(text) if tag.end() <= last[tag[1]]), None)
    if opening is None:
        return None
    content = text[opening.end() : text.index(f"</{opening[1]}>", opening.end())]
    retriever = (opening["engine"] or "").partition("=")[2].strip().strip("\"'").strip()
    return Action("search" if opening[1] == "search" else "answer", content.strip(), retriever)


def search_tag(name: str) -> str:
    """The opening tag of a search with the retriever `name`; an empty name is the default one."""
    return f'<search engine="{name}">' if name else "<search>"


def list_retrievers(retrievers: Mapping[str, str]) -> str:
    """The sentence by which a prompt tells of the retrievers: how each is asked, and what it is."""
    descriptions = [
        f"{search_tag(name)} query </search>" + (f" ({description})" if description else "")
        for name, description in retrievers.items()
    ]
    return f"Besides the default search engine you can call others by name: {_series(descriptions)}."


def unknown_retriever(name: str, retrievers: Iterable[str]) -> str:
    """What is said of a search with a retriever that there is not."""
    names = ", ".join(retrievers)
    there_is = f"there are {names}" if names else "there is only the default"
    return f"no search engine {name!r:.80}: {there_is}"


def _series(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
