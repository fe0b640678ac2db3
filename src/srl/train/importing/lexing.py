"""The words of a shell script, with what a shell would put into each; nothing is run or looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from srl.errors import UserError

Kind = Literal["text", "variable", "sum", "array", "closed"]
"""Text as it stands; a variable; arithmetic; `(a b)` after `NAME=`; what only a shell could find out."""

_OPERATOR = re.compile(r"\d*(?:&>>?|>>|>&|>\||<<<|<<-?|<&|<>|<|>)|&&|\|\||\|&|;;|[;|&()\n]")
_ENDS_WORD = " \t\n;|&()<>"
_RUN = re.compile(r"[^ \t\n;|&()<>'\"\\$`]+")
_QUOTED_RUN = re.compile(r"[^\"\\$`]+")
_PARAMETER = re.compile(r"(\w+|[@*#?$!-])(?:\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a word. `text` is the text, the variable's name, the sum, or the source of what is closed.

    `otherwise` is what stands after the operator, `:-`, of `${NAME:-otherwise}`.
    """

    kind: Kind
    text: str
    quoted: bool = False
    operator: str = ""
    otherwise: tuple[Piece, ...] = ()
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Word:
    """What stands between two spaces, in line `line`."""

    pieces: tuple[Piece, ...]
    line: int

    @property
    def literal(self) -> str:
        """Its text where it is all text, with nothing for the rest."""
        return "".join(piece.text for piece in self.pieces if piece.kind == "text")


@dataclass(frozen=True, slots=True)
class Operator:
    """What separates commands, or begins a redirection."""

    sign: str
    line: int

    @property
    def redirects(self) -> bool:
        return "<" in self.sign or ">" in self.sign


class Lexer:
    """Reads `text` from its beginning; `name` and the line are what errors begin with."""

    def __init__(self, text: str, name: str, line: int = 1) -> None:
        self._text, self._name, self._line, self._at = text, name, line, 0
        self._documents: list[str] = []

    def tokens(self) -> Iterator[Word | Operator]:
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            if not (found := _OPERATOR.match(self._text, self._at)):
                yield self._word()
                continue
            yield Operator(found[0], self._line)
            self._take(found[0])
            if found[0].endswith(("<<", "<<-")):
                yield self._delimiter()
            elif found[0] == "\n" and self._documents:
                self._skip_documents()

    def pieces(self) -> tuple[Piece, ...]:
        """All of the text as one word, in which spaces and signs are text too."""
        found: list[Piece] = []
        while self._at < len(self._text):
            found += self._next_piece()
        return tuple(found)

    def _skip_blank(self) -> bool:
        rest = self._text[self._at : self._at + 2]
        if rest == "\\\n" or rest[0] in " \t\r":
            self._take(rest if rest == "\\\n" else rest[0])
            return True
        if rest[0] == "#":
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
            return True
        return False

    def _take(self, text: str) -> str:
        self._at += len(text)
        self._line += text.count("\n")
        return text

    def _word(self) -> Word:
        line, found = self._line, list[Piece]()
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "(" and _is_array(found):
                found.append(self._array())
                break
            if char in _ENDS_WORD:
                break
            found += self._next_piece()
        return Word(tuple(found), line)

    def _array(self) -> Piece:
        """`(a b c)` behind `NAME=`, comments and line ends in it left out."""
        line = self._line
        self._take("(")
        words: list[Word] = []
        while self._at < len(self._text):
            if self._skip_blank():
                continue
            if self._text[self._at] == ")":
                self._take(")")
                return Piece("array", "", words=tuple(words))
            if found := _OPERATOR.match(self._text, self._at):
                self._take(found[0])
            else:
                words.append(self._word())
        raise UserError(f"{self._name}:{line}: the bracket ( that opens here is never closed")

    def _next_piece(self) -> list[Piece]:
        char = self._text[self._at]
        if char == "'":
            return [Piece("text", self._until("'"), quoted=True)]
        if char == '"':
            return self._double()
        if char == "\\":
            escaped = self._take(self._text[self._at : self._at + 2])[1:]
            return [Piece("text", escaped.replace("\n", ""), quoted=True)]
        if char in "$`":
            return [self._expansion(quoted=False)]
        run = _RUN.match(self._text, self._at)
        return [Piece("text", self._take(run[0] if run else char))]

    def _until(self, quote: str) -> str:
        """What stands between here and the next `quote`, without the two."""
        end = self._text.find(quote, self._at + 1)
        if end < 0:
            raise UserError(f"{self._name}:{self._line}: the quote {quote} that opens here is never closed")
        return self._take(self._text[self._at : end + 1])[1:-1]

    def _double(self) -> list[Piece]:
        line = self._line
        self._take('"')
        found: list[Piece] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == '"':
                self._take(char)
                return found or [Piece("text", "", quoted=True)]
            if char == "\\":
                pair = self._take(self._text[self._at : self._at + 2])
                kept = pair[1:] if pair[1:] in ('"', "\\", "$", "`") else pair.replace("\\\n", "")
                found.append(Piece("text", kept, quoted=True))
            elif char in "$`":
                found.append(self._expansion(quoted=True))
            elif run := _QUOTED_RUN.match(self._text, self._at):
                found.append(Piece("text", self._take(run[0]), quoted=True))
        raise UserError(f'{self._name}:{line}: the quote " that opens here is never closed')

    def _expansion(self, quoted: bool) -> Piece:
        """What begins with `$` or is between backquotes."""
        if self._text[self._at] == "`":
            return Piece("closed", f"`{self._until('`')}`", quoted)
        follows = self._text[self._at + 1 : self._at + 2]
        if follows in ("(", "{"):
            source = self._balanced(follows)
            if source.startswith("$((") and source.endswith("))"):
                return Piece("sum", source[3:-2], quoted)
            return self._braced(source, quoted) if follows == "{" else Piece("closed", source, quoted)
        if not (named := _PLAIN.match(self._text, self._at + 1)):
            return Piece("text", self._take("$"), quoted)
        self._take("$" + named[0])
        return Piece("variable", named[0], quoted)

    def _balanced(self, opening: str) -> str:
        """`$(…)` or `${…}` as it stands, with what is nested in it."""
        line, depth, end = self._line, 0, self._at + 1
        while end < len(self._text):
            depth += (self._text[end] == opening) - (self._text[end] == _CLOSING[opening])
            end += 1
            if depth == 0:
                return self._take(self._text[self._at : end])
        raise UserError(f"{self._name}:{line}: the bracket ${opening} that opens here is never closed")

    def _braced(self, source: str, quoted: bool) -> Piece:
        """`${NAME}` and `${NAME:-otherwise}`; other operators need a shell."""
        found = _PARAMETER.fullmatch(source[2:-1])
        if not found:
            return Piece("closed", source, quoted)
        name, operator, otherwise = found[1], found[2] or "", found[3] or ""
        pieces = Lexer(otherwise, self._name, self._line).pieces()
        return Piece("variable", name, quoted, operator, pieces)

    def _delimiter(self) -> Word:
        """The word behind `<<`, at which the lines that follow end."""
        while self._text[self._at : self._at + 1] in (" ", "\t"):
            self._at += 1
        word = self._word()
        self._documents.append(word.literal)
        return word

    def _skip_documents(self) -> None:
        for delimiter in self._documents:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                line = self._text[self._at : end + 1 if end >= 0 else len(self._text)]
                if self._take(line).strip() == delimiter:
                    break
        self._documents.clear()


def _is_array(found: list[Piece]) -> bool:
    text = "".join(piece.text for piece in found)
    return all(piece.kind == "text" for piece in found) and bool(_ARRAY.fullmatch(text))
