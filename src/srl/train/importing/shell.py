"""The training command of a shell script, read without running anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from srl.errors import UserError, nearest
from srl.train.importing.lexing import Lexer, Operator, Word
from srl.train.importing.variables import Unknown, Variables, assigned

TRAINING = re.compile(r"(?:.*[./])?(main_ppo(?:_\w+)?)(?:\.py)?")
"""verl's and Search-R1's programs that train, as a module or as a file."""
_OTHER_MODULE = re.compile(r"(?:verl|recipe)\.[\w.]+")
_SETTING = re.compile(r"[+~]{0,2}[A-Za-z_]\w*(?:[./@:][\w./@:]+)=", re.DOTALL)
"""`a.b=…`: what stands in a command's line and nowhere else in a script."""
_EXPORTS = {"export", "declare", "local", "readonly", "typeset"}
_OPENS = {"if", "for", "while", "until", "case", "select", "function", "{"}
_CLOSES = {"fi", "done", "esac", "}"}
_JOINTS = {"then", "else", "elif", "do", "if", "while", "until", "{", "!", "time"}


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command; `around` is the line of the `if` or loop that it stands in, or 0."""

    words: tuple[Word, ...]
    around: int

    @property
    def line(self) -> int:
        return self.words[0].line


@dataclass(frozen=True, slots=True)
class Training:
    """A command that trains: its program, its words after that with the line of each, and what a shell
    does not pass to it although it looks so."""

    program: str
    words: tuple[tuple[str, int], ...]
    line: int
    left_behind: tuple[str, ...] = ()


def read_script(text: str, name: str, given: Mapping[str, str], bare: frozenset[str]) -> Training:
    """The one training command in `text`, or all settings of a file that holds settings only.

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
    """The simple commands in order, redirections left out."""
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
    """Whether it depends on the command before if the next one is run: `[ … ] &&`, and any `||`."""
    return sign == "||" or (sign == "&&" and words[0].literal in ("[", "[[", "test"))


def _command(words: list[Word], around: list[int], doubt: int) -> Iterator[Command]:
    """The command without `then`, `do` and their like; `around` is where it stands afterwards."""
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
    """The program that trains, where the command runs one."""
    texts = [word.literal for word in command.words]
    for before, text in zip(["", *texts], texts, strict=False):
        found = TRAINING.fullmatch(text)
        if found and (before == "-m" or text.endswith(".py")):
            return found[1]
    return ""


def _of_command(
    commands: list[Command], command: Command, variables: Variables, name: str
) -> Training:  # fmt: skip
    position = commands.index(command)
    for earlier in commands[:position]:
        _remember(earlier, variables)
    start = next(i for i, word in enumerate(command.words) if TRAINING.fullmatch(word.literal)) + 1
    words = _expanded(command.words[start:], variables, name)
    behind = [word for later in commands[position + 1 :] for word in later.words[:1]]
    left = tuple(f"line {word.line}: {word.literal}" for word in behind if _SETTING.match(word.literal))
    return Training(_program(command), words, command.line, left)


def _of_list(commands: list[Command], variables: Variables, name: str, bare: frozenset[str]) -> Training:
    """All the settings of a file that holds nothing else but variables."""
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
    return Training("", _expanded(words, variables, name), words[0].line)


def _is_setting(word: Word, bare: frozenset[str]) -> bool:
    literal = word.literal
    return bool(_SETTING.match(literal)) or literal.lstrip("+~").partition("=")[0] in bare


def _no_command(commands: list[Command]) -> str:
    expected = "expected a command as python3 -m verl.trainer.main_ppo KEY=VALUE …, or lines of KEY=VALUE"
    texts = [word.literal for command in commands for word in command.words]
    others = [text for text in texts if _OTHER_MODULE.fullmatch(text)]
    return f"{expected}; found {others[0]}" if others else expected


def _remember(command: Command, variables: Variables) -> None:
    """Carry out the assignments of a command, and those only."""
    words = list(command.words)
    doubt = f"line {command.line} sets it only inside what begins in line {command.around}"
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
    """The words with the values of their variables. Raises UserError naming all that have none."""
    found: list[tuple[str, int]] = []
    causes: dict[str, str] = {}
    for word in words:
        try:
            found += [(text, word.line) for text in variables.expand(word)]
        except Unknown as unknown:
            if word.literal.startswith("-"):
                found.append((word.literal, word.line))
                continue
            asked = f"asked for in line {word.line}"
            for cause, why in unknown.causes.items():
                causes.setdefault(cause, why or asked)
    if causes:
        raise UserError(_undefined(causes, name))
    return tuple(found)


def _undefined(causes: Mapping[str, str], name: str) -> str:
    names = [cause for cause in causes if re.fullmatch(r"\w+", cause)]
    said = ", ".join(f"{cause} ({why})" for cause, why in causes.items())
    if not names:
        return f"{name}: nothing is run, so there is no value for {said}; write the value there"
    define = " ".join(f"--define {cause}=VALUE" for cause in names)
    return f"{name}: no value for {said}; type: {define}"


def _check_given(given: Mapping[str, str], variables: Variables, name: str) -> None:
    for variable in given:
        if variable not in variables.seen:
            known = sorted(variables.seen)
            raise UserError(f"--define {variable}: {name} has no such variable{nearest(variable, known)}")
