"""What every web provider must do, checked without asking anybody: it describes an API, and holds no key."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from srl.testing.checks import Check, expect, run


@dataclass
class Trial:
    """A provider under test."""

    make: Callable[[], Any]

    def description(self) -> dict[str, Any]:
        """What an index saves of it."""
        return self.make().model_dump(mode="json")


def checks(make: Callable[[], Any]) -> list[Check]:
    """The outcome of every check."""
    return run(CHECKS, Trial(make))


def _describes_an_api(trial: Trial) -> None:
    made = trial.make()
    expect(type(made).__name__ == "Api", f"{made!r:.60} is no srl_web.api.Api")


def _asks_over_https(trial: Trial) -> None:
    """An address of this machine or the local network may be http."""
    url = trial.description()["url"]
    is_safe = url.startswith("https://") or _is_near(urlsplit(url).hostname or "")
    expect(is_safe, f"the url is {url}: the key and the queries travel in the open")


def _is_near(host: str) -> bool:
    try:
        return ip_address(host).is_private
    except ValueError:
        return host == "localhost"


def _sends_the_query(trial: Trial) -> None:
    _expect_sent(trial, "{query}", "params", "body")


def _names_the_variable_of_its_key(trial: Trial) -> None:
    found = trial.description()
    if found["key_env"]:
        _expect_sent(trial, "{key}", "params", "body", "headers")
    else:
        expect("{key}" not in json.dumps(found), "{key} is sent, and key_env names no environment variable")


def _is_the_same_after_saving(trial: Trial) -> None:
    made = trial.make()
    expect(type(made).model_validate(trial.description()) == made, "it differs after saving and reading")


def _expect_sent(trial: Trial, placeholder: str, *parts: str) -> None:
    found = trial.description()
    sent = json.dumps([found[part] for part in parts])
    expect(placeholder in sent, f"{placeholder} is in none of {', '.join(parts)}")


CHECKS = [
    _describes_an_api,
    _asks_over_https,
    _sends_the_query,
    _names_the_variable_of_its_key,
    _is_the_same_after_saving,
]
