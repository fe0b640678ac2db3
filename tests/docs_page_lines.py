"""The commands, programs and settings that the pages tell a reader to type."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    path
    for pattern in ("*.md", "docs/*.md", "plugins/*/*/README.md", "src/srl/plugins/template/**/README.md.txt")
    for path in sorted(ROOT.glob(pattern))
]

_COMMAND = re.compile(r"(srl|make|pip|pytest|python|source|hf|curl|git|export|[A-Z_]+=\S+)( \S|$)")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(rf"{_FENCED.pattern}|(?:^(?: {{4}}[^\n]*)?\n)+", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Line:
    """A command of a page, continuation lines joined, the comment behind it left out."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def lines_of(page: str, text: str) -> Iterator[Line]:
    """The commands of a page, in order: lines of `sh`, those after `$ ` in `console`, and those of other
    blocks that begin like a command."""
    for block in _BLOCK.finditer(text):
        language, fenced = block[1], block[2]
        body = re.sub(r"^ {4}", "", block[0], flags=re.MULTILINE) if fenced is None else fenced
        body = re.sub(r"\\\n\s*", "", body)
        if language == "console":
            body = re.sub(r"^(?!\$ ).*\n|^\$ ", "", body, flags=re.MULTILINE)
        for line in body.splitlines():
            command = re.sub(r" {2,}", " ", re.sub(r"(^|\s+)#(\s.*|$)", "", line)).strip()
            if command and (language in ("sh", "console") or (not language and _COMMAND.match(command))):
                yield Line(page, command)


def blocks_of(text: str, language: str) -> list[str]:
    """The fenced blocks of a page in a language, such as `python` or `yaml`."""
    return [body for name, body in _FENCED.findall(text) if name == language]


def all_lines() -> list[Line]:
    """Every command of every page, each once."""
    return [
        *dict.fromkeys(
            line
            for path in PAGES
            for line in lines_of(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        )
    ]
