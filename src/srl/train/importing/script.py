"""The training command of a shell script: its words, with plain variables put in. Nothing is run.

Read are assignments, arrays, `$NAME`, `${NAME:-otherwise}`, `"${ARRAY[@]}"` and sums. A loop over the
script's own options has none to read, so the values above it hold. What only a shell can tell (the output of
a command, what an `if` chose) stays as it is written, behind a `MARK`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from srl.errors import UserError

MARK = "\0"
"""Stands before what only a shell can tell."""
MAX_WORD = 2**16
"""Characters of one value: a variable that holds itself twice grows without end."""

_OUTPUT = r"\$\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)|`[^`]*+`"
_BRACED = r"\$\{(?:[^{}]|\$?\{[^{}]*+\})*+\}"
_PIECE = re.compile(
    rf"""'[^']*+'|"(?:\\.|{_BRACED}|{_OUTPUT}|[^"\\])*+"|{_BRACED}|{_OUTPUT}|\\."""
    r"""|(?:[^\s'"\\;|&<>()`$]|\$(?![({]))++|\$""",
    re.DOTALL,
)
_TOKEN = re.compile(
    rf"(?P<space>[ \t\r]+|\\\n|#[^\n]*)|(?P<document><<-?\s*['\"]?(?P<end>[A-Za-z_]\w*)['\"]?)"
    rf"|(?P<redirect>[\d&]?(?:>>|>|<<<|<)(?:&\d)?)|(?P<word>(?:{_PIECE.pattern})+)|(?P<operator>&&|\|\||[\n;|&()])",
    re.DOTALL,
)
_VARIABLE = re.compile(
    r"\\(?P<escaped>[\\\"`$\n])|\$\(\((?P<sum>[\w\s*+]+)\)\)|\$(?P<plain>\w+)"
    r"|\$\{(?P<name>\w+)(?:\[[@*]\])?(?::?-(?P<otherwise>(?:[^{}]|\$?\{[^{}]*+\})*+))?\}"
    rf"|\$\{{\w+[^\w.:}}][^}}]*\}}|{_OUTPUT}"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:.*[./])?(main_ppo(?:_\w+)?)(?:\.py)?")
_BLOCKS = {"if": "fi", "case": "esac", "{": "}"} | dict.fromkeys(("for", "while", "until", "select"), "done")
_KEYWORDS = {"then", "else", "elif", "do", "export", "declare", "local", "readonly", "nohup", "time"}

Variables = dict[str, str | list[str]]


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
    variables: Variables = dict(given)
    scripts: list[Script] = []
    settings: list[str] = []
    behind: list[str] = []
    other = ""
    for line, words, doubt in _commands(text, name):
        rest = _assign(words, variables, given, bare, doubt)
        at = next((n for n, word in enumerate(rest) if n and _PROGRAM.fullmatch(word)), 0)
        if at and (rest[at - 1] == "-m" or rest[at].endswith(".py")):
            program = _PROGRAM.sub(r"\1", rest[at])
            scripts.append(Script(_expanded(rest[at + 1 :], variables, f"{name}:{line}"), program))
        elif rest and _is_setting(rest[0], bare):
            settings += _expanded(rest, variables, f"{name}:{line}")
            behind += rest[:1] if scripts else []
        elif rest and not other:
            other = f"{name}:{line}: neither a setting nor verl's training command: {rest[0]!r:.60}"
    if len(scripts) > 1:
        raise UserError(f"{name}: {len(scripts)} training commands", hint="keep one of them")
    if scripts:
        return Script(scripts[0].words, scripts[0].program, tuple(behind))
    if other:
        raise UserError(other)
    return Script(settings)


def _is_setting(word: str, bare: frozenset[str]) -> bool:
    key = word.lstrip("+~").partition("=")[0]
    return ("=" in word and re.fullmatch(r"[A-Za-z_][\w/@-]*(\.[\w/@-]+)+", key) is not None) or key in bare


def _commands(text: str, name: str) -> Iterator[tuple[int, list[str], str]]:
    """`(line, words, doubt)` of each command, the words as written and without redirections.

    `doubt` is `if` where a shell may not get there, and `options` in a loop over the script's own options,
    of which there are none. An array `NAME=(a b)` is the words `NAME=(`, `a` and `b`.
    """
    words: list[str] = []
    blocks: list[str] = []
    at, line, skips, in_array, unsure, end = 0, 1, False, False, "", ""
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise UserError(f"{name}:{text.count(chr(10), 0, at) + 1}: a quote opened here is never closed")
        at, kind, word = token.end(), token.lastgroup, token[0]
        if kind == "word":
            line = line if words else text.count("\n", 0, token.start()) + 1
            words, skips = (words if skips else [*words, word]), False
        elif kind in ("end", "document"):
            end = token["end"]
        elif kind == "redirect":
            skips = word[-1] in "<>"
        elif kind != "operator":
            continue
        elif word == "(" and words and words[-1].endswith("=") and not in_array:
            words[-1], in_array = f"{words[-1]}(", True
        elif not in_array or word == ")":
            in_array = False
            if words := _without_keywords(words, blocks):
                doubt = "options" if "options" in blocks else "if" if blocks else unsure
                yield line, words, doubt
            words, unsure = [], "if" if word in ("&&", "||") else ""
        if word == "\n" and end:  # the document that was announced in the line above
            closing = re.compile(rf"^\s*{end}\s*$", re.MULTILINE).search(text, at)
            at, end = closing.end() if closing else at, ""
    if words := _without_keywords(words, blocks):
        yield line, words, "options" if "options" in blocks else "if" if blocks else unsure


def _without_keywords(words: list[str], blocks: list[str]) -> list[str]:
    """The words without `then`, `export` and the like; `blocks` are those that are open."""
    while words and words[0] in {*_BLOCKS, *_BLOCKS.values(), *_KEYWORDS}:
        first, *words = words
        if first in _BLOCKS:
            loops = _BLOCKS[first] == "done"
            own = loops and any(word.strip('"') in ("$#", "$@", "$*", "getopts") for word in words)
            blocks.append("options" if own else first)
            if first in ("for", "select") and words:
                return [f"{words[0]}="]
        elif first in _BLOCKS.values() and blocks:
            blocks.pop()
        words = words[1:] if words and first in ("declare", "local") and words[0][0] == "-" else words
    return words


def _assign(
    words: list[str], variables: Variables, given: Mapping[str, str], bare: frozenset[str], doubt: str
) -> list[str]:
    """Carry out the assignments that a command begins with; the words after them."""
    while words and (found := _ASSIGNMENT.fullmatch(words[0])) and found[1] not in bare:
        (name, adds, value), words = found.groups(), words[1:]
        is_array, old = value == "(", variables.get(name, [] if value == "(" else "")
        new: str | list[str] = _expanded(words, variables, name) if is_array else _value(value, variables)
        words = [] if is_array else words
        if name in given or doubt == "options":
            continue
        if doubt or len(new) > MAX_WORD:
            variables.pop(name, None)
        elif adds and isinstance(old, list):
            variables[name] = [*old, *(new if isinstance(new, list) else [new])]
        else:
            variables[name] = f"{old}{new}" if adds else new
    return words


def _expanded(words: list[str], variables: Variables, name: str) -> list[str]:
    """The words with their variables: an array gives several, and so does one variable of settings."""
    expanded: list[str] = []
    for word in words:
        whole = _VARIABLE.fullmatch(word.strip('"'))
        held = variables.get(whole["name"] or whole["plain"] or "") if whole else None
        if isinstance(held, list):
            expanded += held
        elif isinstance(held, str) and "=" in held and word[0] != '"':
            expanded += held.split()
        elif word.strip('"') not in ("$@", "$*"):
            expanded.append(_value(word, variables))
        if expanded and len(expanded[-1]) > MAX_WORD:
            raise UserError(f"{name}: a word of more than {MAX_WORD:,} characters")
    return expanded


def _value(word: str, variables: Variables) -> str:
    """The text of a word; text in single quotes stays as it is."""
    texts: list[str] = []
    for piece in _PIECE.findall(word):
        if piece[0] == "'":
            texts.append(piece[1:-1])
        elif piece[0] == "\\":
            texts.append(piece[1].strip("\n"))
        else:
            bare = piece[1:-1] if piece[0] == '"' else piece
            texts.append(_VARIABLE.sub(lambda found: _held(found, variables), bare))
    return "".join(texts)


def _held(found: re.Match[str], variables: Variables) -> str:
    """What stands for a variable or a sum; what only a shell can tell is marked."""
    if found["escaped"]:
        return found["escaped"].strip("\n")
    if found["sum"]:  # of products and sums alone
        terms = [
            [str(variables.get(part.strip(), part.strip())) for part in term.split("*")]
            for term in found["sum"].split("+")
        ]
        is_plain = all(part.isdecimal() and len(part) < 10 for term in terms for part in term)
        return str(sum(prod(map(int, term)) for term in terms)) if is_plain else f"{MARK}{found[0]}"
    held, otherwise = variables.get(found["name"] or found["plain"] or ""), found["otherwise"]
    if otherwise is not None and not held:
        return _value(otherwise, variables)
    if held is None:
        return f"{MARK}{found[0]}"
    return held if isinstance(held, str) else " ".join(held)
