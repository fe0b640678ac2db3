"""The training command of a shell script: its words, read as a shell would; nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from srl.errors import UserError, nearest

Kind = Literal["text", "variable", "sum", "array", "dynamic"]
"""Plain text; a variable; arithmetic; `(a b)` after `NAME=`; what only running the script would tell."""

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
    """A part of a word. `text` is the text, the variable's name, the sum, or the source of what is dynamic.

    `otherwise` is what follows the operator (such as `:-`) in `${NAME:-otherwise}`.
    """

    kind: Kind
    text: str
    quoted: bool = False
    operator: str = ""
    otherwise: tuple[Piece, ...] = ()
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Word:
    """What is between two spaces, in line `line`."""

    pieces: tuple[Piece, ...]
    line: int

    @property
    def literal(self) -> str:
        """Its plain text; everything else is left out."""
        return "".join(piece.text for piece in self.pieces if piece.kind == "text")


@dataclass(frozen=True, slots=True)
class Operator:
    """A sign that separates commands or begins a redirection."""

    sign: str
    line: int

    @property
    def redirects(self) -> bool:
        return "<" in self.sign or ">" in self.sign


class Lexer:
    """Splits `text` into words and operators; errors begin with `name` and the line."""

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
        """All of the text as one word, in which spaces and operators are text too."""
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
        """`(a b c)` after `NAME=`, without its comments and line ends."""
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
        raise UserError(f"{self._name}:{line}: the bracket ( opened here is never closed")

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
        """The text up to the next `quote`, without the quotes."""
        end = self._text.find(quote, self._at + 1)
        if end < 0:
            raise UserError(f"{self._name}:{self._line}: the quote {quote} opened here is never closed")
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
        raise UserError(f'{self._name}:{line}: the quote " opened here is never closed')

    def _expansion(self, quoted: bool) -> Piece:
        """What begins with `$`, or is between backquotes."""
        if self._text[self._at] == "`":
            return Piece("dynamic", f"`{self._until('`')}`", quoted)
        follows = self._text[self._at + 1 : self._at + 2]
        if follows in ("(", "{"):
            source = self._balanced(follows)
            if source.startswith("$((") and source.endswith("))"):
                return Piece("sum", source[3:-2], quoted)
            return self._braced(source, quoted) if follows == "{" else Piece("dynamic", source, quoted)
        if not (named := _PLAIN.match(self._text, self._at + 1)):
            return Piece("text", self._take("$"), quoted)
        self._take("$" + named[0])
        return Piece("variable", named[0], quoted)

    def _balanced(self, opening: str) -> str:
        """The source of `$(…)` or `${…}`, with what is nested in it."""
        line, depth, end = self._line, 0, self._at + 1
        while end < len(self._text):
            depth += (self._text[end] == opening) - (self._text[end] == _CLOSING[opening])
            end += 1
            if depth == 0:
                return self._take(self._text[self._at : end])
        raise UserError(f"{self._name}:{line}: the bracket ${opening} opened here is never closed")

    def _braced(self, source: str, quoted: bool) -> Piece:
        """`${NAME}` or `${NAME:-otherwise}`; other operators are dynamic."""
        found = _PARAMETER.fullmatch(source[2:-1])
        if not found:
            return Piece("dynamic", source, quoted)
        name, operator, otherwise = found[1], found[2] or "", found[3] or ""
        pieces = Lexer(otherwise, self._name, self._line).pieces()
        return Piece("variable", name, quoted, operator, pieces)

    def _delimiter(self) -> Word:
        """The word after `<<`, which ends the here-document."""
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


_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_NAME_IN_SUM = re.compile(r"\$\{?(\w+)\}?")
_MAX_SUM = 200
_MAX_EXPANDED = 2**21
"""Characters that all variables together may expand to; one that contains itself twice grows without end."""


class NoValueError(Exception):
    """A word needs variables that have no known value: `causes` maps each to the reason."""

    def __init__(self, causes: Mapping[str, str]) -> None:
        super().__init__(", ".join(causes))
        self.causes = dict(causes)


class Variables:
    """Values by name in the script called `script`; those of `given` win over what it assigns."""

    def __init__(self, given: Mapping[str, str], script: str) -> None:
        self._script = script
        self._given = {name: [value] for name, value in given.items()}
        self._values: dict[str, list[str] | NoValueError] = {"HOME": [str(Path.home())]}
        self._put_in = 0
        self.seen: set[str] = set()
        """Names that the script assigns or uses."""

    def assign(self, word: Word, doubt: str = "") -> None:
        """Carry out `NAME=value`; `doubt` says why the script may not get there."""
        name, adds = assigned(word) or ("", False)
        self.seen.add(name)
        try:
            value = self._assigned_value(word)
        except NoValueError as error:
            where = f"used in line {word.line}"
            self._values[name] = NoValueError({cause: why or where for cause, why in error.causes.items()})
            return
        if doubt:
            self._values[name] = NoValueError({name: doubt})
        else:
            self._values[name] = _added(self.value(name), value, word) if adds else value

    def forget(self, name: str, reason: str) -> None:
        """Only running the script would tell the value of `name`."""
        self.seen.add(name)
        self._values[name] = NoValueError({name: reason})

    def value(self, name: str) -> list[str]:
        """The values of a variable: several for an array, none for `$@`. Raises NoValueError."""
        if name in "@*":
            return []
        self.seen.add(name)
        found = self._given.get(name) or self._values.get(name)
        if found is None:
            raise NoValueError({name: ""})
        if isinstance(found, NoValueError):
            raise found
        self._put_in += sum(map(len, found))
        if self._put_in > _MAX_EXPANDED:
            raise UserError(f"{self._script}: its variables expand to more than {_MAX_EXPANDED:,} characters")
        return found

    def expand(self, word: Word) -> list[str]:
        """The words that a shell makes of `word`: an unquoted value with spaces becomes several."""
        return self._fields(word.pieces, f"line {word.line}")

    def _assigned_value(self, word: Word) -> list[str]:
        name = (assigned(word) or ("", False))[0]
        value = _without_name(word.pieces)
        if value and value[0].kind == "array":
            return [text for item in value[0].words for text in self.expand(item)]
        found = self._all(
            value, lambda source: NoValueError({name: f"line {word.line} takes it from {source}"})
        )
        return ["".join(" ".join(values) for values in found)]

    def _fields(self, pieces: tuple[Piece, ...], where: str) -> list[str]:
        fields: list[str] = []
        found = self._all(pieces, lambda source: NoValueError({source: f"in {where}"}))
        for piece, values in zip(pieces, found, strict=True):
            if piece.kind != "text" and not piece.quoted:
                values = " ".join(values).split()
            if fields and values:
                fields[-1] += values[0]
                fields += values[1:]
            else:
                fields += values
        return fields

    def _all(self, pieces: tuple[Piece, ...], closed: Callable[[str], NoValueError]) -> list[list[str]]:
        """What each piece becomes. Raises one NoValueError for all that have no value."""
        found: list[list[str]] = []
        causes: dict[str, str] = {}
        for piece in pieces:
            try:
                found.append(self._of(piece))
            except _DynamicError as source:
                causes |= closed(source.source).causes
            except NoValueError as error:
                causes |= error.causes
        if causes:
            raise NoValueError(causes)
        return found

    def _of(self, piece: Piece) -> list[str]:
        if piece.kind == "text":
            return [piece.text]
        if piece.kind == "sum":
            return [self._sum(piece.text)]
        if piece.kind != "variable":
            raise _DynamicError(piece.text)
        if not piece.operator:
            return self.value(piece.text)
        return self._or_otherwise(piece)

    def _or_otherwise(self, piece: Piece) -> list[str]:
        """`${NAME-x}`, `${NAME=x}`: x if unset; `${NAME+x}`: x if set. After a colon, empty is unset."""
        operator, is_set = piece.operator[-1], True
        value: list[str] = []
        try:
            value = self.value(piece.text)
        except NoValueError as error:
            if error.causes.get(piece.text) != "" or operator == "?":
                raise
            is_set = False
        has_value = any(value) if piece.operator.startswith(":") else is_set
        if operator == "?":
            return value
        if has_value != (operator == "+"):
            return [""] if operator == "+" else value
        return ["".join("".join(self._of(part)) for part in piece.otherwise)]

    def _sum(self, text: str) -> str:
        """Whole-number arithmetic with + - * / and %, and names of variables."""
        if len(text) > _MAX_SUM:
            raise _DynamicError(f"$(({text}))")
        try:
            tree = ast.parse(_NAME_IN_SUM.sub(r"\1", text).strip(), mode="eval")
            return str(self._number(tree.body))
        except (SyntaxError, ValueError, ZeroDivisionError) as error:
            raise _DynamicError(f"$(({text}))") from error

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
        raise ValueError("not whole-number arithmetic")


class _DynamicError(Exception):
    """Only running the script would tell; `source` is the part of the script."""

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
    raise ValueError("not whole-number arithmetic")


TRAINING = re.compile(r"(?:.*[./])?(main_ppo(?:_\w+)?)(?:\.py)?")
"""The training programs of verl and Search-R1, as a module or as a file."""
_OTHER_MODULE = re.compile(r"(?:verl|recipe)\.[\w.]+")
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(?:[./@:][\w./@:]+)=", re.DOTALL)
"""`a.b=…`: a setting on the command line."""
_EXPORTS = {"export", "declare", "local", "readonly", "typeset"}
_OPENS = {"if", "for", "while", "until", "case", "select", "function", "{"}
_CLOSES = {"fi", "done", "esac", "}"}
_JOINTS = {"then", "else", "elif", "do", "if", "while", "until", "{", "!", "time"}


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command; `around` is the line of the `if` or loop around it, or 0."""

    words: tuple[Word, ...]
    around: int

    @property
    def line(self) -> int:
        return self.words[0].line


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """A command that trains: its program, and the words after it, each with its line.

    `left_behind` are settings that look like part of the command and are not passed to it by a shell.
    """

    program: str
    words: tuple[tuple[str, int], ...]
    line: int
    left_behind: tuple[str, ...] = ()


def read_script(text: str, name: str, given: Mapping[str, str], bare: frozenset[str]) -> TrainingCommand:
    """The one training command in `text`, or all settings of a file of nothing but settings.

    `given` are the values of `--define`, `bare` the keys without a dot that are settings, not variables.
    Raises UserError with `name` and the line.
    """
    commands = list(_commands(Lexer(text, name).tokens()))
    variables = Variables(given, name)
    training = [command for command in commands if _program(command)]
    if len(training) > 1:
        lines = ", ".join(str(command.line) for command in training)
        raise UserError(
            f"{name}: expected one training command, found {len(training)} (lines {lines}); "
            "keep the one to import in a file of its own"
        )
    if training:
        found = _of_command(commands, training[0], variables, name)
    else:
        found = _of_list(commands, variables, name, bare)
    _check_given(given, variables, name)
    return found


def _commands(tokens: Iterable[Word | Operator]) -> Iterator[Command]:
    """The simple commands in order, without their redirections."""
    words: list[Word] = []
    around: list[int] = []
    skips, doubt = False, 0
    for token in tokens:
        if isinstance(token, Operator):
            skips = token.redirects
            if not skips and words:
                yield from _command(words, around, doubt)
                doubt = token.line if _decides(token.sign, words) else 0
                words = []
        elif not skips:
            words.append(token)
        else:
            skips = False
    if words:
        yield from _command(words, around, doubt)


def _decides(sign: str, words: list[Word]) -> bool:
    """Whether the command before decides if the next one runs: `[ … ] &&`, and any `||`."""
    return sign == "||" or (sign == "&&" and words[0].literal in ("[", "[[", "test"))


def _command(words: list[Word], around: list[int], doubt: int) -> Iterator[Command]:
    """The command without `then`, `do` and the like; updates `around`, the lines of the open blocks."""
    while words and (first := words[0].literal) in _OPENS | _CLOSES | _JOINTS:
        if first in _OPENS:
            around.append(words[0].line)
        elif first in _CLOSES and around:
            around.pop()
        if first in ("for", "select", "case", "function"):
            yield Command(tuple(words), around[-1])
            return
        words = words[1:]
    if words:
        yield Command(tuple(words), around[-1] if around else doubt)


def _program(command: Command) -> str:
    """The training program that the command runs, or nothing."""
    texts = [word.literal for word in command.words]
    for before, text in zip(["", *texts], texts, strict=False):
        found = TRAINING.fullmatch(text)
        if found and (before == "-m" or text.endswith(".py")):
            return found[1]
    return ""


def _of_command(
    commands: list[Command], command: Command, variables: Variables, name: str
) -> TrainingCommand:  # fmt: skip
    position = commands.index(command)
    for earlier in commands[:position]:
        _remember(earlier, variables)
    start = next(i for i, word in enumerate(command.words) if TRAINING.fullmatch(word.literal)) + 1
    words = _expanded(command.words[start:], variables, name)
    behind = [word for later in commands[position + 1 :] for word in later.words[:1]]
    left = tuple(f"line {word.line}: {word.literal}" for word in behind if _SETTING.match(word.literal))
    return TrainingCommand(_program(command), words, command.line, left)


def _of_list(
    commands: list[Command], variables: Variables, name: str, bare: frozenset[str]
) -> TrainingCommand:
    """All settings of a file that holds only settings and variables."""
    words: list[Word] = []
    for command in commands:
        first = command.words[0]
        if all(_is_setting(word, bare) for word in command.words):
            words += command.words
        elif assigned(first) or first.literal in _EXPORTS | {"set"}:
            _remember(command, variables)
        else:
            raise UserError(f"{name}:{command.line}: {_no_command(commands)}")
    if not words:
        raise UserError(f"{name}: {_no_command(commands)}")
    return TrainingCommand("", _expanded(words, variables, name), words[0].line)


def _is_setting(word: Word, bare: frozenset[str]) -> bool:
    literal = word.literal
    return bool(_SETTING.match(literal)) or literal.lstrip("+~").partition("=")[0] in bare


def _no_command(commands: list[Command]) -> str:
    expected = "expected a command as python3 -m verl.trainer.main_ppo KEY=VALUE …, or lines of KEY=VALUE"
    texts = [word.literal for command in commands for word in command.words]
    others = [text for text in texts if _OTHER_MODULE.fullmatch(text)]
    return f"{expected}; found {others[0]}" if others else expected


def _remember(command: Command, variables: Variables) -> None:
    """Carry out the assignments of a command, and nothing else."""
    words = list(command.words)
    doubt = f"line {command.line} sets it only inside the block that begins in line {command.around}"
    if words[0].literal in ("for", "select") and len(words) > 1:
        variables.forget(words[1].literal, f"line {command.line} loops over it")
        return
    if words[0].literal in _EXPORTS:
        words = [word for word in words[1:] if assigned(word)]
    elif not all(assigned(word) for word in words):
        return
    for word in words:
        variables.assign(word, doubt if command.around else "")


def _expanded(words: Iterable[Word], variables: Variables, name: str) -> tuple[tuple[str, int], ...]:
    """The words with their variables expanded. Raises UserError naming all that have no value."""
    found: list[tuple[str, int]] = []
    causes: dict[str, str] = {}
    for word in words:
        try:
            found += [(text, word.line) for text in variables.expand(word)]
        except NoValueError as error:
            if word.literal.startswith("-"):
                found.append((word.literal, word.line))
                continue
            where = f"used in line {word.line}"
            for cause, why in error.causes.items():
                causes.setdefault(cause, why or where)
    if causes:
        raise UserError(_undefined(causes, name))
    return tuple(found)


def _undefined(causes: Mapping[str, str], name: str) -> str:
    names = [cause for cause in causes if re.fullmatch(r"\w+", cause)]
    said = ", ".join(f"{cause} ({why})" for cause, why in causes.items())
    if not names:
        return f"{name}: nothing is run, so the value of {said} is unknown; write the value there"
    define = " ".join(f"--define {cause}=VALUE" for cause in names)
    return f"{name}: no value for {said}; type: {define}"


def _check_given(given: Mapping[str, str], variables: Variables, name: str) -> None:
    for variable in given:
        if variable not in variables.seen:
            known = sorted(variables.seen)
            raise UserError(f"--define {variable}: {name} has no such variable{nearest(variable, known)}")
