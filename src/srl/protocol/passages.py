"""What the policy reads of a search: passages as text, in which our tags are escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence

from srl.trajectory import Hit

TAGS = ("think", "search", "information", "answer")
NO_RESULTS = "No results found."

_TAG_START = re.compile(rf"<(?=\s*(?:/\s*)?(?:{'|'.join(TAGS)})\b)", re.IGNORECASE)


def escape(text: str) -> str:
    """`text` with every `<` of one of our tags escaped (`<answer>` → `&lt;answer>`)."""
    return _TAG_START.sub("&lt;", text)


def render_passage(position: int, hit: Hit, with_id: bool = False) -> str:
    """`Doc 1(Title: …) text`, or `Doc 1(Title: …, id: …) text`, escaped; `position` counts from 1."""
    id_part = f", id: {hit.passage.id}" if with_id else ""
    return escape(f"Doc {position}(Title: {hit.passage.heading}{id_part}) {hit.passage.text}")


def render_information(passages: Sequence[str]) -> str:
    """The observation after a search: the rendered passages between the information tags."""
    body = "\n".join(passages).strip() or NO_RESULTS
    return f"\n\n<information>{body}</information>\n\n"


NO_INFORMATION = render_information([])
"""The observation after a search that found nothing."""
