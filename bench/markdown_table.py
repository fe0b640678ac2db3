"""A table as Markdown, for the modules whose tables `bench/readme.py` writes into the pages."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The lines of the table; the first column is aligned to the left, the others to the right."""
    lines = [headers, ["---"] + ["--:"] * (len(headers) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
