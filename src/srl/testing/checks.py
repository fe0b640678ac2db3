"""Runs checks and collects their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `detail` says what was found where it failed."""

    name: str
    passed: bool
    detail: str = ""


def expect(condition: object, found: str) -> None:
    """Fail the running check with the message `found` unless `condition` holds."""
    if not condition:
        raise AssertionError(found)


def run(checks: Sequence[Callable[[T], None]], subject: T) -> list[Check]:
    """Run each check on `subject`; one that raises any exception has failed."""
    return [_outcome(check, subject) for check in checks]


def _outcome(check: Callable[[T], None], subject: T) -> Check:
    name = check.__name__.strip("_").replace("_", " ")
    try:
        check(subject)
    except AssertionError as error:
        return Check(name, False, str(error))
    except Exception as error:
        return Check(name, False, f"raised {type(error).__name__}: {error}".partition("\n")[0])
    return Check(name, True)
