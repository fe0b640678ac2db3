"""The training command of a shell script: its words, with variables expanded; nothing is run."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from srl.errors import UserError, nearest

_EXPANSION = r"""
    \$\( (?: [^()] | \( (?: [^()] | \( [^()]*+ \) )*+ \) )*+ \)      # $(command) and $((sum))
  | \$\{ (?: [^{}] | \{ (?: [^{}] | \{ [^{}]*+ \} )*+ \} )*+ \}      # ${NAME} and ${NAME:-otherwise}
  | ` [^`]*+ `
  | \$ (?: [A-Za-z_]\w* | [0-9@*#?$!-] )
"""
_QUOTED = rf"""
    (?P<expansion> {_EXPANSION})
  | ' (?P<single> [^']*+ ) '
  | " (?P<double> (?: {_EXPANSION} | \\. | \$ (?![({{]) | [^"\\$`] )*+ ) "
  | \\ (?P<escaped> . | \Z )
"""
_UNNAMED = re.sub(r"\?P<\w+>", "?:", _QUOTED)
_FLAGS = re.VERBOSE | re.DOTALL
_TOKEN = re.compile(
    rf"""
    (?P<blank> [ \t\r]+ | \\\n | \#[^\n]* )
  | (?P<array> [A-Za-z_]\w*\+?= (?=\() )
  | (?P<operator> \d*(?: &>>? | >> | >& | >\| | <<< | <<-? | <& | <> | [<>] ) | && | \|\| | [;|&()\n] )
  | (?P<word> (?: {_UNNAMED} | \$ (?![({{]) | [^\s;|&()<>'"\\$`] )++ )
    """,
    _FLAGS,
)
_IN_WORD = re.compile(rf"{_QUOTED} | (?P<text> [^'\"\\$`]+ | . )", _FLAGS)
_IN_QUOTES = re.compile(
    rf"(?P<expansion> {_EXPANSION}) | \\ (?P<escaped> [\"\\$`\n] ) | (?P<text> [^\\$`]+ | . )", _FLAGS
)
_NOT_LITERAL = re.compile(rf"{_EXPANSION} | ['\"\\]", _FLAGS)
_PARAMETER = re.compile(r"\$ (?: (\w+|[@*#?$!-]) | \{ (\w+|[@*]) (?:\[[@*]\])? (?: :- (.*) )? \} )", _FLAGS)
_HERE_DOCUMENT = re.compile(r"[^#]*?(?<!<)<<-?[ \t]*['\"]?([A-Za-z_]\w*)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"\w+")
_NAME_IN_SUM = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_SUM = re.compile(r"[\d\s()+*/%-]{1,200}")
_SUM_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: math.fmod,
}
_MAX_EXPANDED = 2**21
"""Characters that all variables together may expand to; one that contains itself twice grows without end."""


@dataclass(frozen=True, slots=True)
class Word:
    """What is between two spaces, as written, in line `line`; of `NAME=(a b)` also the words in brackets."""

    source: str
    line: int
    items: tuple[Word, ...] | None = None

    @property
    def literal(self) -> str:
        """Its text without quotes; variables and the like are left out."""
        return _NOT_LITERAL.sub("", self.source)


def tokens(text: str, name: str) -> Iterator[Word | str]:
    """The words and operators of a script. Raises UserError naming the line of what is not closed."""
    text = _without_here_documents(text)
    at, line = 0, 1
    array: tuple[Word, list[Word]] | None = None
    while at < len(text):
        found = _TOKEN.match(text, at)
        if not found:
            raise _not_closed(text[at : at + 2], name, line)
        if found["array"]:
            array = Word(found[0], line), []
        elif array and found[0] == ")":
            yield Word(array[0].source, array[0].line, tuple(array[1]))
            array = None
        elif array and found["word"]:
            array[1].append(Word(found[0], line))
        elif not array and not found["blank"]:
            yield Word(found[0], line) if found["word"] else found[0]
        at = found.end()
        line += found[0].count("\n")
    if array:
        raise _not_closed("(", name, array[0].line)


def _without_here_documents(text: str) -> str:
    """The text with the lines after `<<END`, up to and with the line `END`, made empty."""
    lines, end = text.split("\n"), ""
    for place, line in enumerate(lines):
        if end:
            lines[place] = ""
            end = end if line.strip() != end else ""
        elif found := _HERE_DOCUMENT.match(line):
            end = found[1]
    return "\n".join(lines)


def _not_closed(opening: str, name: str, line: int) -> UserError:
    kind, sign = ("bracket", opening) if opening[0] in "$(" else ("quote", opening[0])
    return UserError(f"{name}:{line}: the {kind} {sign} opened here is never closed, or nested too deeply")


class Variables:
    """Values by name in the script called `script`; those of `given` win over what it assigns."""

    def __init__(self, given: Mapping[str, str], script: str) -> None:
        self._given, self._script = given, script
        self._values = {name: [value] for name, value in {"HOME": str(Path.home()), **given}.items()}
        self._unknown: dict[str, dict[str, str]] = {}
        self._put_in = 0
        self.seen: set[str] = set()
        """Names that the script assigns or uses."""

    def assign(self, word: Word, doubt: str = "") -> None:
        """Carry out `NAME=value`; `doubt` says why the script may not get there."""
        name, plus, value = _ASSIGNMENT.split(word.source, maxsplit=1)[1:]
        self.seen.add(name)
        if name in self._given:
            return
        missing: dict[str, str] = {}
        if word.items is None:
            new = ["".join(" ".join(part) for part in self._parts(value, missing, _IN_WORD, splits=False))]
        else:
            new = [text for item in word.items for text in self.expand(item, missing)]
        if missing or doubt:
            self._unknown[name] = _of_assignment(name, missing, word.line) or {name: doubt}
        elif not plus:
            self._unknown.pop(name, None)
            self._values[name] = new
        else:
            old = self._values.get(name, [""] if word.items is None else [])
            self._values[name] = [old[0] + new[0], *old[1:]] if word.items is None else old + new

    def forget(self, name: str, reason: str) -> None:
        """Only running the script would tell the value of `name`."""
        self.seen.add(name)
        if name not in self._given:
            self._unknown[name] = {name: reason}

    def expand(self, word: Word, missing: dict[str, str]) -> list[str]:
        """The words that a shell makes of `word`: an unquoted value with spaces becomes several.

        What has no value is added to `missing`, with the reason if it is known.
        """
        fields: list[str] = []
        for values in self._parts(word.source, missing, _IN_WORD, splits=True):
            if fields and values:
                fields[-1] += values[0]
                values = values[1:]
            fields += values
        return fields

    def _parts(
        self, source: str, missing: dict[str, str], pattern: re.Pattern[str], *, splits: bool
    ) -> Iterator[list[str]]:
        """What each part of a word becomes; with `splits` a value is split at its spaces."""
        for part in pattern.finditer(source):
            kind = part.lastgroup or ""
            if kind == "expansion":
                values = self._expansion(part[kind], missing)
                yield " ".join(values).split() if splits else values
            elif kind == "double" and part[kind]:
                yield from self._parts(part[kind], missing, _IN_QUOTES, splits=False)
            else:
                yield [part[kind].replace("\n", "") if kind == "escaped" else part[kind]]

    def _expansion(self, source: str, missing: dict[str, str]) -> list[str]:
        """The values of `$NAME`, `${NAME:-otherwise}` and the like; `$@` has none."""
        if source.startswith("$((") and source.endswith("))"):
            return [self._sum(source, missing)]
        if not (found := _PARAMETER.fullmatch(source)):
            missing[source] = ""
            return [""]
        name, otherwise = found[1] or found[2], found[3]
        if name in "@*":
            return []
        if otherwise is None or name in self._unknown or any(self._values.get(name, ())):
            return self._value(name, missing)
        self.seen.add(name)
        parts = self._parts(otherwise, missing, _IN_WORD, splits=False)
        return ["".join(text for part in parts for text in part)]

    def _value(self, name: str, missing: dict[str, str]) -> list[str]:
        self.seen.add(name)
        if name in self._unknown or name not in self._values:
            missing |= self._unknown.get(name, {name: ""})
            return [""]
        self._put_in += sum(map(len, self._values[name]))
        if self._put_in > _MAX_EXPANDED:
            raise UserError(f"{self._script}: its variables expand to more than {_MAX_EXPANDED:,} characters")
        return self._values[name]

    def _sum(self, source: str, missing: dict[str, str]) -> str:
        """Whole-number arithmetic with + - * / and %, and names of variables."""
        unknown: dict[str, str] = {}
        text = _NAME_IN_SUM.sub(lambda name: f"({''.join(self._value(name[1], unknown))})", source[3:-2])
        missing |= unknown
        try:
            if unknown or not _SUM.fullmatch(text):
                raise ValueError("not whole-number arithmetic")
            return str(_number(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            missing |= {} if unknown else {source: ""}
            return ""


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUM_OPERATORS:
            return int(_SUM_OPERATORS[type(op)](_number(left), _number(right)))
    raise ValueError("not whole-number arithmetic")


def _of_assignment(name: str, missing: Mapping[str, str], line: int) -> dict[str, str]:
    """What an assignment to `name` lacks: other variables, or what only a shell would tell about `name`."""
    found: dict[str, str] = {}
    for cause, why in missing.items():
        if _NAME.fullmatch(cause):
            found[cause] = why or f"used in line {line}"
        else:
            found[name] = f"line {line} takes it from {cause}"
    return found


_TRAINING = re.compile(r"(?:.*[./])?(main_ppo(?:_\w+)?)(?:\.py)?")
"""The training programs of verl and Search-R1, as a module or as a file."""
_OTHER_MODULE = re.compile(r"(?:verl|recipe)\.[\w.]+")
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(?:[./@:][\w./@:]+)=")
"""`a.b=…`: a setting on the command line."""
_EXPORTS = {"export", "declare", "local", "readonly", "typeset"}
_OPENS = {"if", "for", "while", "until", "case", "select", "function", "{"}
_CLOSES = {"fi", "done", "esac", "}"}
_JOINTS = {"then", "else", "elif", "do", "if", "while", "until", "{", "!", "time"}


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command; `around` is the line of the `if` or loop around it, or 0."""

    words: list[Word]
    around: int

    @property
    def line(self) -> int:
        return self.words[0].line

    @property
    def training_at(self) -> int:
        """The place of its training program among the words, 0 without one."""
        before = ""
        for place, word in enumerate(self.words):
            text = word.literal
            if place and _TRAINING.fullmatch(text) and (before == "-m" or text.endswith(".py")):
                return place
            before = text
        return 0


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """A command that trains: its program, and the words after it, each with its line.

    `left_behind` are settings that look like part of the command and are not passed to it by a shell.
    """

    program: str
    words: list[tuple[str, int]]
    left_behind: tuple[str, ...] = ()


def read_script(text: str, name: str, given: Mapping[str, str], bare: frozenset[str]) -> TrainingCommand:
    """The one training command in `text`, or all settings of a file of nothing but settings.

    `given` are the values of `--define`, `bare` the keys without a dot that are settings, not variables.
    Raises UserError with `name` and the line.
    """
    commands = list(_commands(tokens(text, name)))
    variables = Variables(given, name)
    training = [command for command in commands if command.training_at]
    if len(training) > 1:
        lines = ", ".join(str(command.line) for command in training)
        raise UserError(
            f"{name}: expected one training command, found {len(training)} (lines {lines}); "
            "keep the one to import in a file of its own"
        )
    if training:
        found = _of_command(commands, commands.index(training[0]), variables, name)
    else:
        found = _of_list(commands, variables, name, bare)
    for variable in given:
        if variable not in variables.seen:
            hint = nearest(variable, sorted(variables.seen))
            raise UserError(f"--define {variable}: {name} has no such variable{hint}")
    return found


def _commands(found: Iterable[Word | str]) -> Iterator[Command]:
    """The simple commands in order, without their redirections."""
    words: list[Word] = []
    around: list[int] = []
    skips, doubt = False, 0
    for token in [*found, "\n"]:
        if isinstance(token, Word):
            words += [] if skips else [token]
            skips = False
            continue
        skips = "<" in token or ">" in token
        if words and not skips:
            line = words[0].line
            tests = words[0].literal in ("[", "[[", "test")
            if kept := _without_keywords(words, around):
                yield Command(kept, around[-1] if around else doubt)
            doubt = line if token == "||" or (token == "&&" and tests) else 0
            words = []


def _without_keywords(words: list[Word], around: list[int]) -> list[Word]:
    """The words without `then`, `do` and the like; updates `around`, the lines of the open blocks."""
    while words and (first := words[0].literal) in _OPENS | _CLOSES | _JOINTS:
        if first in _OPENS and not (first == "function" and all(one.literal != "{" for one in words)):
            around.append(words[0].line)  # the `{` of `function name() {` opens the block itself
        elif first in _CLOSES and around:
            around.pop()
        if first in ("for", "select", "case", "function"):
            break
        words = words[1:]
    return words


def _of_command(commands: list[Command], position: int, variables: Variables, name: str) -> TrainingCommand:
    command, start = commands[position], commands[position].training_at
    for earlier in commands[:position]:
        _remember(earlier, variables)
    words = _expanded(command.words[start + 1 :], variables, name)
    behind = [later.words[0] for later in commands[position + 1 :]]
    left = tuple(f"line {word.line}: {word.literal}" for word in behind if _SETTING.match(word.literal))
    program = _TRAINING.sub(r"\1", command.words[start].literal)
    return TrainingCommand(program, words, left)


def _of_list(
    commands: list[Command], variables: Variables, name: str, bare: frozenset[str]
) -> TrainingCommand:
    """All settings of a file that holds only settings and variables."""
    words: list[Word] = []
    for command in commands:
        first = command.words[0]
        if all(_is_setting(word.literal, bare) for word in command.words):
            words += command.words
        elif _ASSIGNMENT.match(first.source) or first.literal in _EXPORTS | {"set"}:
            _remember(command, variables)
        else:
            raise UserError(f"{name}:{command.line}: {_no_command(commands)}")
    if not words:
        raise UserError(f"{name}: {_no_command(commands)}")
    return TrainingCommand("", _expanded(words, variables, name))


def _is_setting(literal: str, bare: frozenset[str]) -> bool:
    return bool(_SETTING.match(literal)) or literal.lstrip("+~").partition("=")[0] in bare


def _no_command(commands: list[Command]) -> str:
    expected = "expected a command as python3 -m verl.trainer.main_ppo KEY=VALUE …, or lines of KEY=VALUE"
    texts = [word.literal for command in commands for word in command.words]
    others = [text for text in texts if _OTHER_MODULE.fullmatch(text)]
    return f"{expected}; found {others[0]}" if others else expected


def _remember(command: Command, variables: Variables) -> None:
    """Carry out the assignments of a command, and nothing else."""
    words = command.words
    if words[0].literal in ("for", "select") and len(words) > 1:
        variables.forget(words[1].literal, f"line {command.line} loops over it")
        return
    assignments = [word for word in words if _ASSIGNMENT.match(word.source)]
    doubt = f"line {command.line} sets it only inside the block that begins in line {command.around}"
    if words[0].literal in _EXPORTS or assignments == words:
        for word in assignments:
            variables.assign(word, doubt if command.around else "")


def _expanded(words: Iterable[Word], variables: Variables, name: str) -> list[tuple[str, int]]:
    """The words with their variables expanded. Raises UserError naming all that have no value."""
    found: list[tuple[str, int]] = []
    causes: dict[str, str] = {}
    for word in words:
        missing: dict[str, str] = {}
        texts = variables.expand(word, missing)
        if missing and word.literal.startswith("-"):
            texts = [word.literal]
        else:
            for cause, why in missing.items():
                causes.setdefault(cause, why or f"used in line {word.line}")
        found += [(text, word.line) for text in texts]
    if causes:
        raise UserError(_undefined(causes, name))
    return found


def _undefined(causes: Mapping[str, str], name: str) -> str:
    names = [cause for cause in causes if _NAME.fullmatch(cause)]
    said = ", ".join(f"{cause} ({why})" for cause, why in causes.items())
    if not names:
        return f"{name}: nothing is run, so the value of {said} is unknown; write the value there"
    define = " ".join(f"--define {cause}=VALUE" for cause in names)
    return f"{name}: no value for {said}; type: {define}"
