"""Untrusted text and secrets: control characters are escaped, and errors and logs hold no secret.

Results are never altered to hide a secret; `safe`, `one_line` and `safe_json` are for them. Errors and logs
go through `safe_message`, and what another program said through `quoted`, which reads only its beginning.

A secret is the value of an environment variable that srl reads as one: SRL_SEARCH_TOKEN, HF_TOKEN, and those
passed to `keep_secret`. Values of fewer than eight characters are not hidden.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import unicodedata
from collections.abc import Iterable
from urllib.parse import quote, urlsplit

from srl.errors import UserError

HIDDEN = "[hidden]"
"""Replaces a secret."""
LONGEST = 500
"""Characters of foreign text that an error or a log line quotes, at most."""

_ACTS = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of control, format, surrogate and private characters, and of line separators."""
_KEEP = {"\n", "\t", "\u200c", "\u200d"}
"""Line ends, tabs, and the joiners of scripts and emoji."""
_SHORTEST_SECRET = 8
_variables = {"SRL_SEARCH_TOKEN", "HF_TOKEN"}


def safe(text: str) -> str:
    """`text` with control and format characters (colours, cursor, right-to-left overrides) as escapes:
    `\\x1b[31m`, `\\u202e`."""
    if text.isascii() and text.isprintable():
        return text
    text = text.replace("\r\n", "\n")
    return "".join(letter.encode("unicode_escape").decode() if _acts(letter) else letter for letter in text)


def safe_json(text: str) -> str:
    """JSON `text` with control and format characters as JSON escapes; line ends are kept."""
    if text.isprintable():
        return text
    return "".join(json.dumps(letter)[1:-1] if _acts(letter) else letter for letter in text)


def one_line(text: str, width: int | None = None) -> str:
    """`text` made safe, on one line, truncated to `width` characters with an ellipsis."""
    line = " ".join(text.split())
    line = safe(line if width is None else line[: width + 1])
    return line if width is None or len(line) <= width else line[: width - 1].rstrip() + "…"


def safe_message(text: str) -> str:
    """An error or log line: safe, and without secrets."""
    return safe(hidden(text))


def quoted(message: str | bytes, width: int = LONGEST) -> str:
    """The beginning of what another program said, for an error or a log: safe, on one line, without secrets.

    `width` is in characters. Of a longer text nothing but the beginning is looked at.
    """
    beginning = message[: 4 * width]
    text = beginning if isinstance(beginning, str) else beginning.decode("utf-8", "replace")
    return one_line(hidden(text), width)


def refusal(status: int, message: str | bytes, width: int = LONGEST) -> str:
    """`HTTP 500: what the server said`, quoted; the status alone where it said nothing."""
    return f"HTTP {status}" + (f": {text}" if (text := quoted(message, width)) else "")


def hidden(text: str) -> str:
    """`text` with each secret replaced, also as it stands in a URL."""
    secrets = {os.environ.get(name, "").strip() for name in _variables}
    for secret in sorted(secrets, key=len, reverse=True):  # one may begin with another
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, HIDDEN).replace(quote(secret, safe="", errors="replace"), HIDDEN)
    return text


def keep_secret(variables: Iterable[str]) -> None:
    """Hide the values of these environment variables from now on, in errors and logs."""
    _variables.update(variables)


def header_secret(*variables: str) -> str:
    """The value of the first of these environment variables that is set, else an empty string.

    From now on it is hidden in errors and logs. Raises UserError where an HTTP header cannot hold it.
    """
    keep_secret(variables)
    values = ((name, os.environ.get(name, "").strip()) for name in variables)
    name, value = next((pair for pair in values if pair[1]), ("", ""))
    if not all("!" <= letter <= "~" for letter in value):
        raise UserError(f"{name} is not a valid token: it has characters that HTTP headers forbid")
    return value


def refuse_credentials(what: str, url: str, variable: str = "SRL_SEARCH_TOKEN") -> None:
    """Raise UserError if the URL of a server has more than scheme, host, port and path.

    URLs are saved, logged and shown, and a user name, password, query or fragment may be a secret; the error
    does not repeat it, and names the environment `variable` for the key.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError
    except ValueError:  # whose text repeats what is in it
        raise UserError(f"{what}: expected http://HOST:PORT/PATH, with a port up to 65535") from None
    if parts.username or parts.password or parts.query or parts.fragment or ";" in parts.path:
        raise UserError(
            f"{what} for {parts.hostname} has more than http://HOST:PORT/PATH, which is saved and shown",
            hint=f"put the server's key into the environment: export {variable}=…",
        )


def log_to_stderr(everything: int, of_srl: int) -> None:
    """Log to stderr: from level `everything`, and for `srl` from level `of_srl`."""
    handle_logs()
    logging.getLogger().setLevel(everything)
    logging.getLogger("srl").setLevel(of_srl)


def handle_logs() -> None:
    """Write the logs of this process to stderr, unless the root logger already has handlers."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(Stderr())
        handler.setFormatter(SafeFormatter("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(handler)


class SafeFormatter(logging.Formatter):
    """Formats a record and its traceback as safe text."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_message(super().format(record))


class Stderr(io.TextIOBase):
    """The current `sys.stderr` at each write; a progress bar replaces it while it is shown."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def _acts(letter: str) -> bool:
    return letter not in _KEEP and unicodedata.category(letter) in _ACTS
