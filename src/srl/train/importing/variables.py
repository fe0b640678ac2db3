"""The variables of a shell script: what it assigns, and what each word becomes with them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from srl.errors import UserError
from srl.train.importing.lexing import Piece, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_NAME_IN_SUM = re.compile(r"\$\{?(\w+)\}?")
_LONGEST_SUM = 200
_MOST = 2**21
"""Characters that variables may stand for, all together: one that is put into itself grows without end."""


class Unknown(Exception):  # noqa: N818 - a finding, not a failure of ours
    """A word that needs variables whose values stand nowhere: `causes` maps each to the reason."""

    def __init__(self, causes: Mapping[str, str]) -> None:
        super().__init__(", ".join(causes))
        self.causes = dict(causes)


class Variables:
    """Values by name, in the script called `script`. Those of `given` stand whatever it assigns."""

    def __init__(self, given: Mapping[str, str], script: str) -> None:
        self._script = script
        self._given = {name: [value] for name, value in given.items()}
        self._values: dict[str, list[str] | Unknown] = {"HOME": [str(Path.home())]}
        self._put_in = 0
        self.seen: set[str] = set()
        """Names that the script assigns or asks for."""

    def assign(self, word: Word, doubt: str = "") -> None:
        """Carry out `NAME=value`; with a `doubt` it is not known whether the script gets there."""
        name, adds = assigned(word) or ("", False)
        self.seen.add(name)
        try:
            value = self._assigned_value(word)
        except Unknown as unknown:
            asked = f"asked for in line {word.line}"
            self._values[name] = Unknown({cause: why or asked for cause, why in unknown.causes.items()})
            return
        if doubt:
            self._values[name] = Unknown({name: doubt})
        else:
            self._values[name] = _added(self.value(name), value, word) if adds else value

    def forget(self, name: str, reason: str) -> None:
        """`name` has a value that only running the script would tell."""
        self.seen.add(name)
        self._values[name] = Unknown({name: reason})

    def value(self, name: str) -> list[str]:
        """The values of a variable: several of an array, none of the script's arguments. Raises Unknown."""
        if name in "@*":
            return []
        self.seen.add(name)
        found = self._given.get(name) or self._values.get(name)
        if found is None:
            raise Unknown({name: ""})
        if isinstance(found, Unknown):
            raise found
        self._put_in += sum(map(len, found))
        if self._put_in > _MOST:
            raise UserError(
                f"{self._script}: what its variables stand for is longer than {_MOST:,} characters"
            )
        return found

    def expand(self, word: Word) -> list[str]:
        """The words that a shell makes of `word`: without quotes a value with spaces is several."""
        return self._fields(word.pieces, f"line {word.line}")

    def _assigned_value(self, word: Word) -> list[str]:
        name = (assigned(word) or ("", False))[0]
        value = _without_name(word.pieces)
        if value and value[0].kind == "array":
            return [text for item in value[0].words for text in self.expand(item)]
        found = self._all(value, lambda source: Unknown({name: f"line {word.line} takes it from {source}"}))
        return ["".join(" ".join(values) for values in found)]

    def _fields(self, pieces: tuple[Piece, ...], where: str) -> list[str]:
        fields: list[str] = []
        found = self._all(pieces, lambda source: Unknown({source: f"in {where}"}))
        for piece, values in zip(pieces, found, strict=True):
            if piece.kind != "text" and not piece.quoted:
                values = " ".join(values).split()
            if fields and values:
                fields[-1] += values[0]
                fields += values[1:]
            else:
                fields += values
        return fields

    def _all(self, pieces: tuple[Piece, ...], closed: Callable[[str], Unknown]) -> list[list[str]]:
        """What each piece becomes; one Unknown for all that have no value."""
        found: list[list[str]] = []
        causes: dict[str, str] = {}
        for piece in pieces:
            try:
                found.append(self._of(piece))
            except _Closed as source:
                causes |= closed(source.source).causes
            except Unknown as unknown:
                causes |= unknown.causes
        if causes:
            raise Unknown(causes)
        return found

    def _of(self, piece: Piece) -> list[str]:
        if piece.kind == "text":
            return [piece.text]
        if piece.kind == "sum":
            return [self._sum(piece.text)]
        if piece.kind != "variable":
            raise _Closed(piece.text)
        if not piece.operator:
            return self.value(piece.text)
        return self._or_otherwise(piece)

    def _or_otherwise(self, piece: Piece) -> list[str]:
        """`${NAME-x}` and `${NAME=x}`: x where there is no value; `${NAME+x}`: where there is one.

        With a colon an empty value counts as none.
        """
        operator, is_set = piece.operator[-1], True
        value: list[str] = []
        try:
            value = self.value(piece.text)
        except Unknown as unknown:
            if unknown.causes.get(piece.text) != "" or operator == "?":
                raise
            is_set = False
        has_value = any(value) if piece.operator.startswith(":") else is_set
        if operator == "?":
            return value
        if has_value != (operator == "+"):
            return [""] if operator == "+" else value
        return ["".join("".join(self._of(part)) for part in piece.otherwise)]

    def _sum(self, text: str) -> str:
        """Whole numbers with + - * / and %, names for variables."""
        if len(text) > _LONGEST_SUM:
            raise _Closed(f"$(({text}))")
        try:
            tree = ast.parse(_NAME_IN_SUM.sub(r"\1", text).strip(), mode="eval")
            return str(self._number(tree.body))
        except (SyntaxError, ValueError, ZeroDivisionError) as error:
            raise _Closed(f"$(({text}))") from error

    def _number(self, node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(value)):
                return value
            case ast.Name(id=name):
                return int("".join(self.value(name)))
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -self._number(inner)
            case ast.BinOp(left=left, op=op, right=right):
                return _applied(op, self._number(left), self._number(right))
        raise ValueError("not a sum of whole numbers")


class _Closed(Exception):  # noqa: N818 - as above
    """Something that only a shell could find out; `source` is how it stands in the script."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


def assigned(word: Word) -> tuple[str, bool] | None:
    """The name that `NAME=value` assigns to, and whether it is `NAME+=value`."""
    first = word.pieces[0] if word.pieces else None
    if first is None or first.kind != "text" or first.quoted:
        return None
    found = _ASSIGNMENT.match(first.text)
    return (found[1], found[2] == "+") if found else None


def _without_name(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    rest = pieces[0].text.partition("=")[2]
    return (Piece("text", rest), *pieces[1:]) if rest else pieces[1:]


def _added(old: list[str], new: list[str], word: Word) -> list[str]:
    """What `NAME+=new` makes of `old`: more words of an array, or a longer text."""
    if any(piece.kind == "array" for piece in word.pieces):
        return old + new
    return [old[0] + "".join(new), *old[1:]] if old else new


def _applied(op: ast.operator, left: int, right: int) -> int:
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return int(left / right)
        case ast.Mod():
            return left - right * int(left / right)
    raise ValueError("not a sum of whole numbers")
