"""The commands and programs that pages and helps tell a reader to type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLLOWED = "docs/real-data.md"
"""Its commands run on published data: tests/test_real_data.py and bench/real_data.py follow it."""
GENERATED = ("docs/config.md",)
PAGES = [
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "plugins/*/*/README.md",
        "src/srl/plugins/template/common/README.md.txt",
    )
    for path in sorted(ROOT.glob(pattern))
    if path.relative_to(ROOT).as_posix() not in (FOLLOWED, *GENERATED)
]
SHELL = ("sh", "bash", "console")
"""Languages of fenced blocks that hold commands, and output below those that begin with `$ `."""

_COMMAND = re.compile(r"(srl|make|pip|pytest|python|source|hf|curl|git|export|[A-Z_]+=\S+)( \S|$)")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^(?: {4}[^\n]*)?\n)+", re.MULTILINE)
_INLINE = re.compile(r"`(srl [^`\n]*(?:\n[^`\n]+)?)`")
_HELP = re.compile(r"^  Example:\n((?:    .*\n)+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Line:
    """One command of a page, continuation lines joined, the comment behind it left out."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def lines_of(page: str, text: str) -> Iterator[Line]:
    """The commands in the blocks of a page, in their order."""
    for block, all_commands in _blocks(page, text):
        for line in _logical(block):
            if all_commands or _COMMAND.match(line):
                yield Line(page, line)


def programs_of(text: str) -> list[str]:
    """The Python in the fenced blocks of a page."""
    return [block for language, block in _FENCED.findall(text) if language == "python"]


def settings_of(text: str) -> list[str]:
    """The configurations in the fenced blocks of a page: its YAML without manifests, which have a format."""
    blocks = [block for language, block in _FENCED.findall(text) if language == "yaml"]
    return [block for block in blocks if not block.startswith("format:")]


def mentions_of(text: str) -> list[str]:
    """The `srl …` that stand in running text."""
    return [" ".join(found.split()) for found in _INLINE.findall(_FENCED.sub("", text))]


def _blocks(page: str, text: str) -> Iterator[tuple[str, bool]]:
    """Text of each block, and whether all of its lines are commands."""
    if page == "docs/cli.md":
        yield from ((found, False) for found in _HELP.findall(text))
        return
    for found in re.finditer(rf"{_FENCED.pattern}|{_INDENTED.pattern}", text, re.DOTALL | re.MULTILINE):
        language, fenced = found[1], found[2]
        if fenced is None:
            yield re.sub(r"^ {4}", "", found[0], flags=re.MULTILINE), False
        elif language == "console":
            yield re.sub(r"^(?!\$ ).*\n|^\$ ", "", fenced.replace("\\\n", " "), flags=re.MULTILINE), True
        elif language in ("", *SHELL):
            yield fenced, language in SHELL


def _logical(block: str) -> Iterator[str]:
    """The lines of a block, continued ones joined, without comments."""
    waiting = ""
    for line in block.splitlines():
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
        elif _is_open(waiting):
            waiting += "\n"
        else:
            text = re.sub(r"\s+#\s.*$", "", waiting) if "\n" not in waiting else waiting
            if text.strip() and not text.lstrip().startswith("#"):
                yield re.sub(r" {2,}", " ", text).strip() if "\n" not in text else text
            waiting = ""


def _is_open(text: str) -> bool:
    """Whether a command of several lines has a quotation that is still open."""
    return text.split(maxsplit=1)[:1] == ["python"] and text.count('"') % 2 == 1


def all_lines() -> list[Line]:
    """Every command of every page, each once."""
    found = {}
    for path in PAGES:
        page = path.relative_to(ROOT).as_posix()
        found.update(dict.fromkeys(lines_of(page, path.read_text(encoding="utf-8"))))
    return list(found)
