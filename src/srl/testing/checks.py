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


def expect(condition: object, detail: str) -> None:
    """Fail the running check with `detail`, what was found, unless `condition` holds."""
    if not condition:
        raise AssertionError(detail)


def run(checks: Sequence[Callable[[T], None]], subject: T) -> list[Check]:
    """Run each check on `subject`; one that raises any exception has failed."""
    outcomes = []
    for check in checks:
        detail = ""
        try:
            check(subject)
        except AssertionError as error:
            detail = str(error) or "an assertion"
        except Exception as error:
            detail = f"raised {type(error).__name__}: {error}".partition("\n")[0]
        outcomes.append(Check(check.__name__.strip("_").replace("_", " "), not detail, detail))
    return outcomes
