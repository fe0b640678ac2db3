"""The conformance kit: checks that every plugin of a kind must pass, in three lines of its tests.

    from srl.testing import check_reward

    def test_reward_conforms():
        check_reward("em")

Built-in plugins pass the same checks. `srl plugins check NAME` shows them one by one.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from srl.errors import CheckFailed, UserError
from srl.plugins import manager
from srl.plugins.import_path import options_model_of
from srl.plugins.options import validated

__all__ = ["Check", "check_algorithm", "check_retriever", "check_reward", "check_tool", "checks", "conclude"]
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
    """Run each check on `subject`; one that raises any exception has failed.

    A refusal and a time-out are the last outcome: the checks after it would meet the same.
    """
    outcomes = []
    for check in checks:
        detail, goes_on = "", True
        try:
            check(subject)
        except AssertionError as error:
            detail = str(error) or "an assertion"
        except (Exception, CancelledError, SystemExit) as error:  # a plugin may raise anything
            detail = f"raised {type(error).__name__}: {error}".partition("\n")[0]
            goes_on = not isinstance(error, UserError | TimeoutError)
        outcomes.append(Check(check.__name__.strip("_").replace("_", " "), not detail, detail))
        if not goes_on:
            break
    return outcomes


def _check(kind: str, plugin: Any, options: Mapping[str, Any] | None = None) -> list[Check]:
    """Check a plugin: the name of an installed one, a class, or an object (used as it is).

    Returns what was checked. Raises CheckFailed, naming the checks that failed.
    """
    name = repr(plugin) if isinstance(plugin, str) else getattr(plugin, "__name__", type(plugin).__name__)
    return conclude(f"{kind} {name}", checks(kind, plugin, options))


check_retriever = partial(_check, "retriever")
check_reward = partial(_check, "reward")
check_algorithm = partial(_check, "algorithm")
check_tool = partial(_check, "tool")


def checks(kind: str, plugin: Any, options: Mapping[str, Any] | None = None) -> list[Check]:
    """The outcome of every check of `kind`, passed or not. Raises UserError for an unknown name."""
    make = partial(_make, kind, plugin, options or {})
    make()
    run: Callable[[Callable[[], Any]], list[Check]] = import_module(f"srl.testing.{kind}s").checks
    return run(make)


def _make(kind: str, plugin: Any, options: Mapping[str, Any]) -> Any:
    """The plugin's object, made as a run makes it."""
    if isinstance(plugin, str):
        return manager.load(kind, plugin, options)
    if not isinstance(plugin, type):
        return plugin
    model = options_model_of(plugin.__name__, plugin)
    return plugin(**options) if model is None else plugin(validated(plugin.__name__, model, options))


def conclude(label: str, outcomes: list[Check]) -> list[Check]:
    """Return `outcomes` if all passed. Raises CheckFailed naming what failed and what was found."""
    failed = [check for check in outcomes if not check.passed]
    if failed:
        what = "; ".join(f"{check.name} ({check.detail})" for check in failed)
        raise CheckFailed(f"{label} fails {len(failed)} of {len(outcomes)} checks: {what}")
    return outcomes
