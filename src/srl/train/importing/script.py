"""The training command of a shell script: its words, with plain variables put in. Nothing is run.

Read are assignments, `$NAME`, `${NAME:-otherwise}` and sums of numbers. A loop over the script's own options
has none to read, so the values above it hold. What only a shell can tell (the output of a command, what an
`if` chose) stays as it is written, behind a `MARK`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

MARK, DOLLAR = "\0", "\1"
"""What stands before what only a shell can tell, and for a quoted dollar."""
MAX_WORD = 2**16
"""Characters of one value: a variable that holds itself twice grows without end."""
ECHO = "put echo before the training command, run the script and import what it prints"

_OUTPUT = r"\$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)|`[^`]*+`"
_PIECE = re.compile(
    rf"(?P<single>'[^']*+')|(?P<double>\"(?:\\.|{_OUTPUT}|[^\"\\])*+\")|(?P<output>{_OUTPUT})|(?P<dollar>\\\$)"
    r"|\\\n|(?<!\S)\#[^\n]*|(?<=\s)[\d&](?=>)",
    re.DOTALL,
)
_VARIABLE = re.compile(r"\$(?P<plain>\w+)|\$\{(?P<name>\w+)(?::?-(?P<otherwise>(?:[^{}]|\{[^{}]*+\})*+))?\}")
_UNREAD = re.compile(r"\$\{\w+[^\w.}]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SETTING = re.compile(r"[+~]*[A-Za-z_][\w/@-]*(\.[\w/@-]+)+=")
_PROGRAM = re.compile(r"(?:.*[./])?(main_ppo(?:_\w+)?)(?:\.py)?")
_BLOCKS = {"if": "fi", "case": "esac", "{": "}"} | dict.fromkeys(("for", "while", "until"), "done")
_KEYWORDS = {"then", "else", "elif", "do", "export", "declare", "local", "readonly", "nohup", "time"}


@dataclass(frozen=True, slots=True)
class Script:
    """The words behind the training program, or those of a file of settings alone (`program` is empty)."""

    words: list[str]
    program: str = ""
    notes: list[str] = field(default_factory=list)


def read_script(text: str, bare: frozenset[str]) -> Script:
    """The one training command of `text`. `bare` are the keys without a dot that are settings, not variables.

    Raises ValueError.
    """
    variables, scripts, settings, other = dict[str, str](), list[Script](), list[str](), ""
    for words, doubt in _commands(text):
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])) and assigned[1] not in bare:
            words = words[1:]
            if doubt == "if":
                variables.pop(assigned[1], None)
            elif not doubt:
                variables[assigned[1]] = _value(assigned[2], variables)
        at = next((n for n, word in enumerate(words) if n and _PROGRAM.fullmatch(word)), 0)
        if at and (words[at - 1] == "-m" or words[at].endswith(".py")):
            scripts.append(Script(_expanded(words[at + 1 :], variables), _PROGRAM.sub(r"\1", words[at])))
        elif words and (_SETTING.match(words[0]) or words[0].partition("=")[0] in bare):
            settings += _expanded(words, variables)
        elif words and not other:
            other = f"neither a setting nor verl's training command: {words[0]!r:.60}"
    if len(scripts) > 1:
        raise ValueError(f"{len(scripts)} training commands; keep one of them")
    if other and not scripts:
        raise ValueError(other)
    script = scripts[0] if scripts else Script(settings)
    options = [word for word in script.words if word.startswith("-")]
    notes = [f"not read, nor what only their files set: {' '.join(options)}"] if options else []
    return Script([word for word in script.words if word not in options], script.program, notes)


def _commands(text: str) -> Iterator[tuple[list[str], str]]:
    """`(words, doubt)` of each command, without quotes, comments and redirections.

    `doubt` is `if` where a shell may not get there, and `while` in a loop over the script's own options, of
    which there are none.
    """
    lexer = shlex.shlex(_PIECE.sub(_as_word, text), posix=True, punctuation_chars="\n;&|<>")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    blocks, words, unsure, skips = list[str](), list[str](), "", False
    for token in [*lexer, "\n"]:
        if token.strip("\n;&|<>") or not token:
            words, skips = (words if skips else [*words, token]), False
        elif "<" in token or ">" in token:
            skips = True
        else:
            while words and words[0] in {*_BLOCKS, *_BLOCKS.values(), *_KEYWORDS}:
                first, *words = words
                if first in _BLOCKS:
                    blocks.append(first)
                    words = [f"{words[0]}="] if first == "for" and words else words
                elif first in _BLOCKS.values():
                    del blocks[-1:]
            yield words, "while" if "while" in blocks else "if" if blocks else unsure
            words, unsure = [], "if" if token.startswith(("&&", "||")) else ""


def _as_word(piece: re.Match[str]) -> str:
    """A piece of a script so that it is one word for `shlex`, and a quoted dollar no variable."""
    if piece["single"]:
        return piece[0].replace("$", DOLLAR)
    if piece["double"]:
        return re.sub(_OUTPUT, _output, piece[0]).replace("\\$", DOLLAR)
    return _output(piece) if piece["output"] else DOLLAR if piece["dollar"] else ""


def _output(piece: re.Match[str]) -> str:
    """The output of a command, as text behind a mark; a sum of products of numbers."""
    if numbers := re.fullmatch(r"\$\(\(\s*(\d{1,9}(?:\s*[*+]\s*\d{1,9})*)\s*\)\)", piece[0]):
        return str(sum(prod(map(int, term.split("*"))) for term in numbers[1].split("+")))
    return MARK + re.sub(r"[^\w$()]", "_", piece[0])


def _expanded(words: list[str], variables: dict[str, str]) -> list[str]:
    """The words with their variables; a variable of several settings gives several."""
    expanded = list[str]()
    for word in words:
        value = _value(word, variables)
        is_variable = _VARIABLE.fullmatch(word) and "=" in value
        expanded += value.split() if is_variable else [] if word in ("$@", "$*") else [value]
    return expanded


def _value(word: str, variables: dict[str, str]) -> str:
    """The text of a word; what only a shell can tell is marked."""

    def held(name: re.Match[str]) -> str:
        text = variables.get(name["name"] or name["plain"])
        if not text and name["otherwise"] is not None:
            return _value(name["otherwise"], variables)
        return f"{MARK}{name[0]}" if text is None else text

    text = _UNREAD.sub(rf"{MARK}\g<0>", _VARIABLE.sub(held, word)).replace(DOLLAR, "$")
    if len(text) > MAX_WORD:
        raise ValueError(f"a word of more than {MAX_WORD:,} characters: {text[:60]!r}")
    return text
