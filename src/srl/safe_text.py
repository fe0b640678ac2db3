"""Makes untrusted text safe to show: control characters are escaped, and errors and logs hold no secret.

Results are never altered to hide a secret; `safe`, `one_line` and `safe_json` are for them. Errors and logs
go through `safe_message`, and what another program said through `quoted`, which reads only its beginning.

A secret is the value of an environment variable that srl reads as one: SRL_SEARCH_TOKEN, HF_TOKEN, and those
passed to `keep_secret`.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

from srl.errors import UserError

HIDDEN = "[hidden]"
"""Replaces a secret."""
LONGEST = 500
"""Characters of foreign text that an error or a log line quotes, at most."""

_ACTS = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of control, format, surrogate and private characters, and of line separators."""
_JOINERS = {"\u200c", "\u200d"}
_KEEP = {"\n", "\t"} | _JOINERS

_LONG, _SHORT = 8, 4
_variables = {"SRL_SEARCH_TOKEN", "HF_TOKEN"}


def safe(text: str) -> str:
    """`text` with control characters as escapes: `\\x1b[31m`, `\\u202e`.

    Control and format characters (colours, cursor, titles, right-to-left overrides) are escaped; line ends,
    tabs and the joiners of scripts and emoji are kept.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(letter) for letter in text.replace("\r\n", "\n"))


def one_line(text: str, width: int | None = None) -> str:
    """`text` made safe, on one line, truncated to `width` characters with an ellipsis."""
    line = " ".join(text.split())
    line = safe(line if width is None else line[: width + 1])
    return line if width is None or len(line) <= width else line[: width - 1].rstrip() + "…"


def safe_message(text: str) -> str:
    """An error or log line: safe, and without secrets."""
    return safe(hidden(text))


def quoted(said: str | bytes, width: int = LONGEST) -> str:
    """The beginning of what another program said, for an error or a log: safe, on one line, without secrets.

    `width` is in characters. Of a longer text nothing but the beginning is looked at.
    """
    beginning = said[: 4 * width]
    text = beginning if isinstance(beginning, str) else beginning.decode("utf-8", "replace")
    return one_line(hidden(text), width)


def refusal(status: int, said: str | bytes, width: int = LONGEST) -> str:
    """`HTTP 500: what the server said`, quoted; the status alone where it said nothing."""
    return f"HTTP {status}" + (f": {text}" if (text := quoted(said, width)) else "")


def hidden(text: str) -> str:
    """`text` with each secret replaced, also if it is quoted as in a URL.

    Values shorter than eight characters are hidden as whole words only, those shorter than four not at all.
    """
    values = {os.environ.get(name, "").strip() for name in _variables}
    secrets = tuple(sorted(value for value in values if len(value) >= _SHORT))
    return _pattern(secrets).sub(HIDDEN, text) if secrets else text


def keep_secret(variables: Iterable[str]) -> None:
    """Hide the values of these environment variables from now on, in errors and logs."""
    _variables.update(variables)


def header_secret(*variables: str) -> str:
    """The value of the first of these environment variables that is set, else an empty string.

    From now on it is hidden in errors and logs. Raises UserError where an HTTP header cannot hold it.
    """
    keep_secret(variables)
    for name in variables:
        value = os.environ.get(name, "").strip()
        if not all("!" <= letter <= "~" for letter in value):
            raise UserError(f"{name} is not a valid token: it has characters that HTTP headers forbid")
        if value:
            return value
    return ""


def safe_json(text: str) -> str:
    """JSON `text` with control characters as JSON escapes; line ends are kept."""
    return text if text.isprintable() else "".join(map(_json_visible, text))


def refuse_credentials(what: str, url: str, variable: str = "SRL_SEARCH_TOKEN") -> None:
    """Raise UserError if the URL of a server contains more than scheme, host, port and path.

    A user name, password, path parameter (`;…`), query or fragment may be a secret, and URLs are saved,
    logged and shown. The message does not repeat it, and names the environment `variable` for the key.
    """
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError as error:
        raise UserError(f"{what} is not a URL ({error}); expected http://HOST:PORT/retrieve") from None
    held = {
        "password": parts.password, "user name": parts.username, "path parameter": ";" in parts.path,
        "query": parts.query, "fragment": parts.fragment,
    }  # fmt: skip
    found = next((name for name, value in held.items() if value), None)
    if found:
        named = f"{what} for {host}" if host else what
        raise UserError(
            f"{named} has a {found}, which would be saved and shown; give only http://HOST:PORT/PATH, and "
            f"the server's key in the environment: export {variable}=…"
        )


def _visible(letter: str) -> str:
    if letter in _KEEP or unicodedata.category(letter) not in _ACTS:
        return letter
    code = ord(letter)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _json_visible(letter: str) -> str:
    if letter in _KEEP or unicodedata.category(letter) not in _ACTS:
        return letter
    code = ord(letter)
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"


@lru_cache(16)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of literal texts: each secret as it is and as in a URL, the longest first."""
    forms = {
        form
        for value in secrets
        for form in (value, *(quote(value, safe, errors="replace") for safe in ("/", "")))
    }
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    return re.compile("|".join(map(_whole, longest_first)))


def _whole(form: str) -> str:
    return re.escape(form) if len(form) >= _LONG else rf"(?<!\w){re.escape(form)}(?!\w)"
