"""Errors shown to the user, and the exit codes of commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

EXIT_OK = 0
EXIT_CHECK_FAILED = 1
EXIT_USER = 2
EXIT_BUG = 70
EXIT_SIGNAL = 128
"""Added to the number of the signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for a closed terminal."""


class SrlError(Exception):
    """What is wrong and where; `key` is the setting it is about, `hint` what to do where that is not obvious.

    The text of the error is `what; hint`. Code and tests read `key`, never the text.
    """

    exit_code = EXIT_USER

    def __init__(self, what: object = "", *, key: str | None = None, hint: str = "") -> None:
        stop = "" if str(what).endswith("?") else ";"
        super().__init__(f"{what}{stop} {hint}" if hint else str(what))
        self.what, self.key = str(what), key


class UserError(SrlError):
    """An error in the input or the environment; exit code 2."""


class CheckFailed(SrlError):  # noqa: N818 - named in the public interface
    """A requested check failed; exit code 1."""

    exit_code = EXIT_CHECK_FAILED


INPUT_ERRORS = (OSError, ValueError, TypeError, LookupError, RuntimeError, ArithmeticError)
"""What Python and libraries raise on an input that they cannot read."""


@contextmanager
def parsing(what: object) -> Iterator[None]:
    """A border at which input of the user is parsed: what libraries raise on it is a UserError that names it.

    Outside of these borders such an error is a bug of ours.
    """
    try:
        yield
    except INPUT_ERRORS as error:
        raise UserError(f"{what}: {error_line(error)}") from error


def error_line(error: BaseException) -> str:
    """What an error says, in one line, without the file that it is about.

    Of several lines it is the first, or the second if the first only introduces it.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"expected text in UTF-8: {error.reason} at byte {error.start}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[1] if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return f"no {line}" if isinstance(error, KeyError) else re.sub(r"^\w+Error: ", "", line)


def expected(error: Mapping[str, Any]) -> str:
    """`expected a valid integer`: pydantic's message for one error; a plugin's own message as it is."""
    message = re.sub(r" or instance of \w+| after validation", "", str(error["msg"]))
    return (
        message.removeprefix("Value error, ").replace("Input should be", "expected").replace("tuple", "list")
    )


def nearest(name: str, names: list[str] | tuple[str, ...]) -> str:
    """`did you mean X?` for a mistyped name, or an empty string."""
    from difflib import get_close_matches

    match = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU has no memory left: PyTorch's error, which is not imported here."""
    return type(error).__name__ == "OutOfMemoryError"


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not blank; the name of its class where there is none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def with_notes(error: BaseException, message: object = None) -> str:
    """What is `message` of an error, by default its message, and its notes, such as how to resume."""
    return "; ".join([str(error if message is None else message), *getattr(error, "__notes__", [])])
