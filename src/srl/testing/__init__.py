"""The conformance kit: checks that every plugin of a kind must pass, in three lines of its tests.

    from srl.testing import check_reward

    def test_reward_conforms():
        check_reward("em")

Built-in plugins pass the same checks. `srl plugins check NAME` shows them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from srl.errors import CheckFailed
from srl.plugins import manager
from srl.plugins.import_path import options_model_of
from srl.plugins.options import validated
from srl.testing.checks import Check

__all__ = [
    "Check",
    "check_algorithm",
    "check_provider",
    "check_retriever",
    "check_reward",
    "checks",
    "conclude",
]


def check_retriever(given: Any, options: Mapping[str, Any] | None = None) -> list[Check]:
    """Check a retriever: the name of an installed one, a class, or an object (used as it is).

    Returns what was checked. Raises CheckFailed, naming the checks that failed.
    """
    return conclude(f"retriever {_label(given)}", checks("retriever", given, options))


def check_reward(given: Any, options: Mapping[str, Any] | None = None) -> list[Check]:
    """The same for a reward."""
    return conclude(f"reward {_label(given)}", checks("reward", given, options))


def check_algorithm(given: Any, options: Mapping[str, Any] | None = None) -> list[Check]:
    """The same for an algorithm: the name of an installed one, or an `Algorithm`."""
    return conclude(f"algorithm {_label(given)}", checks("algorithm", given, options))


def check_provider(given: Any, options: Mapping[str, Any] | None = None) -> list[Check]:
    """The same for a web provider: the name of an installed one, or an `Api`."""
    return conclude(f"provider {_label(given)}", checks("provider", given, options))


def checks(kind: str, given: Any, options: Mapping[str, Any] | None = None) -> list[Check]:
    """The outcome of every check of `kind`, passed or not. Raises UserError for an unknown name."""
    make = _maker(kind, given, options or {})
    make()
    return import_module(f"srl.testing.{kind}s").checks(make)


def conclude(label: str, outcomes: list[Check]) -> list[Check]:
    """Return `outcomes` if all passed. Raises CheckFailed naming what failed and what was found."""
    failed = [check for check in outcomes if not check.passed]
    if failed:
        what = "; ".join(f"{check.name} ({check.detail})" for check in failed)
        raise CheckFailed(f"{label} fails {len(failed)} of {len(outcomes)} checks: {what}")
    return outcomes


def _maker(kind: str, given: Any, options: Mapping[str, Any]) -> Callable[[], Any]:
    if isinstance(given, str):
        return lambda: manager.load(kind, given, options)
    if not isinstance(given, type):
        return lambda: given
    model = options_model_of(given.__name__, given)
    if model is None:
        return lambda: given(**options)
    return lambda: given(validated(given.__name__, model, options))


def _label(given: Any) -> str:
    return repr(given) if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
