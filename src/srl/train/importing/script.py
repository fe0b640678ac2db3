"""The training command of a shell script: its words, with plain variables put in. Nothing is run.

Read are assignments, `export`, arrays, `$NAME`, `${NAME}`, `${NAME:-otherwise}` and `"${ARRAY[@]}"`. A loop
over the script's own options has none to read, so the values above it hold. What only a shell can tell (the
output of a command, what an `if` chose) stays in a word as it is written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

from srl.errors import UserError

MAX_WORD = 2**16
"""Characters of one word: a variable that holds itself twice grows without end."""
MAX_LINES = 1000
"""Lines of one command, or of one array."""
UNREAD = re.compile(r"\$(?:\{\w+(?:\}|:[-+?=\d]|[^\w.:}])|\(|\w)|`")
"""What is left of a word that only a shell can complete. Hydra's `${a.b}` and `${oc.env:A}` are not it."""

_TRAINING = re.compile(r"(?:.*[./])?(main_ppo(?:_\w+)?)(?:\.py)?")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|(\w+))")
_OUTPUT = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`")
_SUM = re.compile(r"\$\(\(([\w\s*+]{1,99})\)\)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$")
_HERE_DOCUMENT = re.compile(r"<<-?\s*['\"]?([A-Za-z_]\w*)")
_ARRAY = re.compile(r"\s*(?:(?:export|declare|local)\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=\((.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BLOCKS = {
    "if": "fi",
    "case": "esac",
    "{": "}",
    "for": "done",
    "while": "done",
    "until": "done",
    "select": "done",
}
_OPTIONS = "options"
_MAX_NESTED = 10
_KEYWORDS = {
    "then",
    "else",
    "elif",
    "do",
    "export",
    "declare",
    "local",
    "readonly",
    "time",
    *_BLOCKS.values(),
}


@dataclass(frozen=True, slots=True)
class Command:
    """The words of one command, as written. `doubt` says why a shell may not get there."""

    words: list[str]
    line: int
    doubt: str = ""
    is_array: bool = False
    """`NAME=(a b)`: its words are `NAME=`, `a` and `b`."""

    @property
    def program_at(self) -> int:
        """The place of verl's training program among the words, 0 without one."""
        for place, (before, word) in enumerate(zip(self.words, self.words[1:], strict=False), start=1):
            if _TRAINING.fullmatch(word) and (before == "-m" or word.endswith(".py")):
                return place
        return 0


@dataclass(frozen=True, slots=True)
class Script:
    """The words behind the training program, or those of a file of settings alone (`program` is empty).

    `behind` are settings in lines below the command, which a shell does not pass to it.
    """

    words: list[str]
    program: str = ""
    behind: tuple[str, ...] = ()


def read_script(text: str, name: str, given: Mapping[str, str], bare: frozenset[str]) -> Script:
    """The one training command of `text`. `given` are values of variables, which win over the script's.

    `bare` are the keys without a dot that are settings, not variables. Raises UserError with the line.
    """
    commands = list(_commands(text, name))
    training = [command for command in commands if command.program_at]
    if len(training) > 1:
        lines = ", ".join(str(command.line) for command in training)
        raise UserError(
            f"{name}: {len(training)} training commands, in lines {lines}", hint="keep one of them"
        )
    variables = {variable: [value] for variable, value in given.items()}
    settings: list[str] = []
    for number, command in enumerate(commands):
        if command in training:
            at, later = command.program_at, commands[number + 1 :]
            program = _TRAINING.sub(r"\1", command.words[at])
            behind = tuple(other.words[0] for other in later if _is_setting(other.words[0], frozenset()))
            return Script(_expanded(command.words[at + 1 :], variables, name), program, behind)
        rest = _assign(command, variables, given, bare)
        if not training and rest and not _is_setting(rest[0], bare):
            raise UserError(
                f"{name}:{command.line}: neither a setting nor verl's training command: {rest[0]!r:.60}"
            )
        settings += _expanded(rest, variables, name) if not training else []
    return Script(settings)


def _is_setting(word: str, bare: frozenset[str]) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return ("=" in word and re.fullmatch(r"[A-Za-z_][\w/@-]*(\.[\w/@-]+)+", key) is not None) or key in bare


def _commands(text: str, name: str) -> Iterator[Command]:
    """The commands in order, without keywords and redirections."""
    outputs: list[str] = []

    def hidden(found: re.Match[str]) -> str:
        outputs.append(found[0])
        return f"\0{len(outputs) - 1}\0"

    blocks: list[str] = []
    for line, text_of_line in _lines(text, name):
        try:
            array = _ARRAY.fullmatch(text_of_line)
            items = shlex.split(array[3].rstrip().removesuffix(")"), comments=True) if array else []
            lexer = shlex.shlex(_OUTPUT.sub(hidden, text_of_line), posix=True, punctuation_chars=";|&<>")
            lexer.whitespace_split, lexer.commenters = True, ""
            tokens = [] if array else [*lexer, ";"]
        except ValueError as error:
            raise UserError(f"{name}:{line}: a quote opened here is never closed") from error
        if array:
            yield Command([f"{array[1]}{array[2]}=", *items], line, _doubt(blocks), is_array=True)
        words: list[str] = []
        behind = skips = ""
        for token in tokens:
            if token[:1] in ("<", ">"):
                skips, words = token, words[:-1] if words and words[-1].isdigit() else words
            elif token[:1] not in (";", "|", "&"):
                word = re.sub(r"\0(\d+)\0", lambda found: outputs[int(found[1])], token)
                words, skips = (words if skips else [*words, word]), ""
            elif not skips:
                if words := _without_keywords(words, blocks, line):
                    yield Command(words, line, _doubt(blocks) or behind)
                words, behind = [], "" if token in (";", "|") else f"behind {token}"


def _doubt(blocks: list[str]) -> str:
    return _OPTIONS if _OPTIONS in blocks else blocks[-1] if blocks else ""


def _lines(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Each line with its number: joined where a backslash, a quote or an array goes on, without comments and
    here-documents."""
    lines = text.split("\n")
    held, start, end = "", 1, ""
    for number, line in enumerate(lines, 1):
        if end:
            end = "" if line.strip() == end else end
            continue
        start = start if held else number
        held += _COMMENT.sub("", line)
        if held.endswith("\\"):
            held = held[:-1]
            continue
        if _goes_on(held):
            if number - start > MAX_LINES or number == len(lines):
                raise UserError(f"{name}:{start}: the quote or bracket opened here is never closed")
            held += "\n"
            continue
        yield start, held
        document = _HERE_DOCUMENT.search(held)
        end = (
            document[1] if document and any(other.strip() == document[1] for other in lines[number:]) else ""
        )
        held = ""
    if held:
        yield start, held


def _goes_on(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return True
    return _ARRAY.fullmatch(text) is not None and not text.rstrip().endswith(")")


def _without_keywords(words: list[str], blocks: list[str], line: int) -> list[str]:
    """The words without `then`, `export` and the like. Updates `blocks`: of each open one, why what it sets
    is doubtful; a loop over the script's own options, of which there are none, is `options`."""
    words = [word for word in words if word not in ("(", ")")]
    while words and words[0] in {*_BLOCKS, *_KEYWORDS}:
        first, *words = words
        if first in _BLOCKS:
            blocks.append(_OPTIONS if "$#" in words else f"inside the block of line {line}")
        elif first in _BLOCKS.values() and blocks:
            blocks.pop()
        if first == "for":
            return [f"{words[0]}="] if words else []
    return words


def _assign(
    command: Command, variables: dict[str, list[str]], given: Mapping[str, str], bare: frozenset[str]
) -> list[str]:
    """Carry out the assignments that a command begins with; the words after them."""
    words = list(command.words)
    while words and (found := _ASSIGNMENT.fullmatch(words[0])) and found[1] not in bare:
        (name, adds, value), words = found.groups(), words[1:]
        values, words = (words, []) if command.is_array else ([value], words)
        if name in given or command.doubt == _OPTIONS:
            continue
        if command.doubt:
            variables.pop(name, None)
            continue
        values = [text for each in values for text in _expand(each, variables)]
        old = variables.get(name, []) if adds else []
        variables[name] = [*old, *values] if command.is_array else ["".join([*old, *values])]
    return words


def _expanded(words: list[str], variables: Mapping[str, list[str]], name: str) -> list[str]:
    expanded = [text for word in words for text in _expand(word, variables)]
    for text in expanded:
        if len(text) > MAX_WORD:
            raise UserError(f"{name}: a word of more than {MAX_WORD:,} characters: {text!r:.60}")
    return expanded


def _expand(word: str, variables: Mapping[str, list[str]]) -> list[str]:
    """The words that `word` becomes: an array gives several, and so does one variable that holds settings."""
    if word in ("$@", "$*"):
        return []
    whole = _VARIABLE.fullmatch(word)
    values = variables.get(whole[1] or whole[3], []) if whole else []
    if len(values) > 1 or (whole and "[" in word and values):
        return values

    def value(found: re.Match[str]) -> str:
        held, otherwise = variables.get(found[1] or found[3]), found[2]
        if held is None or (otherwise is not None and not any(held)):
            return found[0] if otherwise is None else otherwise
        return " ".join(held)

    text = word
    for _ in range(_MAX_NESTED):
        word, text = text, _VARIABLE.sub(value, text[: MAX_WORD + 1])
        if text == word:
            break
    text = _SUM.sub(partial(_sum, variables), text)
    parts = text.split() if whole else []
    return parts if parts and all("=" in part for part in parts) else [text]


def _sum(variables: Mapping[str, list[str]], found: re.Match[str]) -> str:
    """`$((1024 * 2 + NAME))`, of products and sums alone; what has another part stays as it is."""
    terms = [factors.split("*") for factors in found[1].split("+")]
    numbers = [["".join(variables.get(part.strip(), [part.strip()])) for part in term] for term in terms]
    if not all(part.isdecimal() and len(part) < 10 for term in numbers for part in term):
        return found[0]
    return str(sum(prod(map(int, term)) for term in numbers))
