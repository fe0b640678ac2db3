"""Makes untrusted text safe to show: without secrets, and without control characters.

Everything that is printed, logged or raised goes through these functions.

A secret is the value of an environment variable whose name ends in TOKEN, KEY, SECRET, PASSWORD, PASSWD or
PASSPHRASE, or that was passed to `keep_secret`. Values shorter than eight characters are hidden only if
passed to `keep_secret`, and only as whole words. Values shorter than four characters and file paths are not
hidden.
"""

from __future__ import annotations

import os
import re
import unicodedata
from base64 import b64encode
from collections.abc import Iterable
from functools import lru_cache

from srl.errors import UserError

HIDDEN = "[hidden]"
"""Replaces a secret."""

_ACTS = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of control, format, surrogate and private characters, and of line separators."""
_JOINERS = {"\u200c", "\u200d"}
_KEEP = {"\n", "\t"} | _JOINERS

_LONG, _SHORT = 8, 4
_URL_ALPHABET = str.maketrans("+/", "-_")
_SECRET_NAMES = {"TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE"}
_PATHS = ("/", "~", "./", "../")
_named = {"SRL_SEARCH_TOKEN"}

# Plain strings: `re` compiles them on first use, which most commands never reach.
_USER = r"(?i)\b([a-z][a-z0-9+.-]*://)[^\s/?#'\"<>]*@"
_QUERY = r"(?i)\b([a-z][a-z0-9+.-]*://[^\s?#'\"<>]*)\?[\w.%~-][^\s'\"<>)]*"
_HEADER = r"(?i)(authorization\W{1,4}(?:bearer|basic)\s+)[\w.~+/=-]{4,}"


def safe(text: str, found: tuple[str, ...] | None = None) -> str:
    """`text` without secrets, and with control characters as escapes: `\\x1b[31m`, `\\u202e`.

    Control and format characters (colours, cursor, titles, right-to-left overrides) are escaped; line ends,
    tabs and the joiners of scripts and emoji are kept. `found` is the result of `secrets()`, to be reused for
    many texts.
    """
    text = hidden(text, found)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(letter) for letter in text.replace("\r\n", "\n"))


def one_line(text: str, width: int | None = None, found: tuple[str, ...] | None = None) -> str:
    """`text` made safe, on one line, truncated to `width` characters with an ellipsis."""
    line = re.sub(r"\s+", " ", safe(text, found)).strip()
    return line if width is None or len(line) <= width else line[: width - 1].rstrip() + "…"


def safe_message(text: str) -> str:
    """An error or log line made safe, also without credentials in URLs and headers."""
    return safe(redacted(text))


def quoted(said: str | bytes, width: int | None = None) -> str:
    """Output of another program for a message: made safe, on one line, then truncated to `width`
    characters."""
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    return one_line(redacted(text), width)


def redacted(text: str) -> str:
    """`text` without secrets, user names and queries in URLs, and values of Authorization headers."""
    if "://" in text:
        text = re.sub(_QUERY, rf"\1?{HIDDEN}", re.sub(_USER, rf"\1{HIDDEN}@", text))
    return re.sub(_HEADER, rf"\1{HIDDEN}", hidden(text))


def hidden(text: str, found: tuple[str, ...] | None = None) -> str:
    """`text` with each secret replaced, also if percent-encoded, escaped or in base64."""
    found = secrets() if found is None else found
    if not found or len(text) < _SHORT:
        return text
    plain, escaped = _patterns(found)
    text = plain.sub(HIDDEN, text)
    return escaped.sub(HIDDEN, text) if any(sign in text for sign in "%\\&") else text


def secrets() -> tuple[str, ...]:
    """The secrets in the environment, longest first."""
    values = {value for name in _named if len(value := os.environ.get(name, "").strip()) >= _SHORT}
    for name in filter(_names_a_secret, os.environ):
        value = os.environ[name].strip()
        if len(value) >= _LONG and not value.startswith(_PATHS):
            values.add(value)
    return tuple(sorted(values, key=lambda value: (-len(value), value)))


def keep_secret(variables: Iterable[str]) -> None:
    """Hide the values of these environment variables from now on, whatever their names."""
    _named.update(variables)


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


@lru_cache(1024)
def _names_a_secret(name: str) -> bool:
    return name.upper().rpartition("_")[2] in _SECRET_NAMES


@lru_cache(16)
def _patterns(found: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns for secrets in plain text and base64, and for quoted and escaped forms."""
    plain = [form for secret in found for form in (_whole(secret, re.escape(secret)), *_base64(secret))]
    escaped = [_whole(secret, "".join(map(_in_any_form, secret))) for secret in found]
    return re.compile("|".join(plain)), re.compile("|".join(escaped))


def _whole(secret: str, pattern: str) -> str:
    return pattern if len(secret) >= _LONG else rf"(?<!\w){pattern}(?!\w)"


def _in_any_form(letter: str) -> str:
    """A pattern for `letter`: plain, after a backslash, percent-encoded, or escaped as in JSON or HTML."""
    code = ord(letter)
    encoded = "".join(f"%(?i:{byte:02x})" for byte in letter.encode("utf-8", "surrogatepass"))
    slashed = "" if letter.isalnum() else r"\\?"
    return rf"(?:{slashed}{re.escape(letter)}|{encoded}|\\u(?i:{code:04x})|&#(?:0*{code}|(?i:x0*{code:x}));)"


def _base64(secret: str) -> list[str]:
    """The base64 forms of `secret` at each offset in the encoded text, in both alphabets."""
    forms: list[str] = []
    for before in range(3 if len(secret) >= _LONG else 0):
        raw = b"\0" * before + secret.encode("utf-8", "surrogatepass")
        sure = b64encode(raw).decode()[(before * 8 + 5) // 6 : len(raw) * 8 // 6]
        forms += {re.escape(one) + r"[\w+/-]?=*" for one in (sure, sure.translate(_URL_ALPHABET))}
    return forms
