"""The training command of a shell script: its words, with plain variables put in. Nothing is run.

Read are assignments, `$NAME`, `${NAME:-otherwise}` and sums of numbers. A loop over the script's own options
has none to read, so the values above it hold. What only a shell can tell (the output of a command, what an
`if` chose) stays as it is written, behind a `MARK`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

MARK = "\0"
"""What stands before what only a shell can tell."""
BARE = frozenset({"max_turns", "do_search"})
"""Settings of Search-R1's whose names look like those of variables."""
MAX_WORD = 2**16
"""Characters of one value: a variable that holds itself twice grows without end."""
ECHO = "put echo before the training command, run the script and import what it prints"

_DOLLAR = r"\$\{(?:[^{}]|\{[^{}]*+\})*+\}|\$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)|`[^`]*+`|\$\(|\$\w+"
_QUOTED = rf"'[^']*+'|\"(?:\\.|{_DOLLAR}|[^\"\\])*+\""
_TOKEN = re.compile(
    rf"(?P<space>[ \t\r]+|\\\n|\#[^\n]*)|(?P<redirection>[\d&]?[<>]+&?)|(?P<end>\n|[;&|]+)"
    rf"|(?P<word>(?:{_QUOTED}|{_DOLLAR}|\\.|[^\s;&|<>'\"`\\])++)|(?P<open>\S.*)",
    re.DOTALL,
)
_PIECE = re.compile(rf"(?P<quoted>{_QUOTED})|\\(?P<escaped>.)|{_DOLLAR}", re.DOTALL)
_PIECE_IN_QUOTES = re.compile(rf"(?P<quoted>(?!))|\\(?P<escaped>[$\"`\\])|{_DOLLAR}", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::?-(?P<otherwise>.*))?\})", re.DOTALL)
_SUM = re.compile(r"\$\(\(\s*(\d{1,9}(?:\s*[*+]\s*\d{1,9})*)\s*\)\)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:.*[./])?(main_ppo(?:_\w+)?)(?:\.py)?")
_BLOCKS = {"if": "fi", "case": "esac", "{": "}"} | dict.fromkeys(("for", "while", "until"), "done")
_KEYWORDS = {"then", "else", "elif", "do", "export", "declare", "local", "readonly", "nohup", "time"}


def read_script(text: str) -> tuple[list[str], str]:
    """The words behind the training program of `text`, and its name; of a file without it all words, and "".

    Raises ValueError.
    """
    variables, scripts, other_words = dict[str, str](), list[tuple[list[str], str]](), list[str]()
    for words, doubt in _commands(text):
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])) and assigned[1] not in BARE:
            words = words[1:]
            if doubt == "if":
                variables.pop(assigned[1], None)
            elif not doubt:
                variables[assigned[1]] = _value(assigned[2], variables)
        at = next((n for n, word in enumerate(words) if n and _PROGRAM.fullmatch(word)), 0)
        if at and (words[at - 1] == "-m" or words[at].endswith(".py")):
            scripts.append((_expanded(words[at + 1 :], variables), _PROGRAM.sub(r"\1", words[at])))
        else:
            other_words += _expanded(words, variables)
    if len(scripts) > 1:
        raise ValueError(f"{len(scripts)} training commands; keep one of them")
    return scripts[0] if scripts else (other_words, "")


def _commands(text: str) -> Iterator[tuple[list[str], str]]:
    """`(words, doubt)` of each command, the words as they are written, without comments and redirections.

    `doubt` is `if` where a shell may not get there, and `while` in a loop over the script's own options, of
    which there are none. Raises ValueError.
    """
    blocks, words, after, is_target = list[str](), list[str](), "", False
    for token in _TOKEN.finditer(f"{text}\n"):
        if token["open"]:
            raise ValueError(f"a quote without an end: {token[0][:40]!r}")
        if token["word"]:
            words, is_target = (words if is_target else [*words, token[0]]), False
        elif token["redirection"]:
            is_target = True
        elif token["end"]:
            while words and words[0] in {*_BLOCKS, *_BLOCKS.values(), *_KEYWORDS}:
                first, *words = words
                if first in _BLOCKS:
                    blocks.append(first)
                    words = [f"{words[0]}="] if first == "for" and words else words
                elif first in _BLOCKS.values():
                    del blocks[-1:]
            yield words, "while" if "while" in blocks else "if" if blocks or after in ("&&", "||") else ""
            words, after = [], token[0]


def _expanded(words: list[str], variables: dict[str, str]) -> list[str]:
    """The words with their variables; an unquoted variable of several settings gives several."""
    expanded = list[str]()
    for word in words:
        value = _value(word, variables)
        if word.strip('"') not in ("$@", "$*"):
            expanded += value.split() if _VARIABLE.fullmatch(word) and "=" in value else [value]
    return expanded


def _value(word: str, variables: dict[str, str], pieces: re.Pattern[str] = _PIECE) -> str:
    """The text of a word without its quotes; what only a shell can tell is marked."""

    def text_of(piece: re.Match[str]) -> str:
        whole, quoted = piece[0], piece["quoted"]
        if quoted:
            inner = quoted[1:-1]
            return inner if quoted[0] == "'" else _value(inner, variables, _PIECE_IN_QUOTES)
        if piece["escaped"]:
            return piece["escaped"].strip("\n")
        if numbers := _SUM.fullmatch(whole):
            return str(sum(prod(map(int, term.split("*"))) for term in numbers[1].split("+")))
        variable = _VARIABLE.fullmatch(whole)
        text = variables.get(variable["name"] or variable["plain"]) if variable else None
        if not text and variable and variable["otherwise"] is not None:
            return _value(variable["otherwise"], variables)
        return f"{MARK}{whole}" if text is None else text

    text = pieces.sub(text_of, word)
    if len(text) > MAX_WORD:
        raise ValueError(f"a word of more than {MAX_WORD:,} characters: {text[:60]!r}")
    return text
