"""What every web provider must do, checked without asking anybody: it describes an API, and holds no key."""

from __future__ import annotations

import json
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from srl.testing.checks import Check, expect, run


def checks(make: Callable[[], Any]) -> list[Check]:
    """The outcome of every check."""
    return run(CHECKS, make())


def _describes_an_api(api: Any) -> None:
    expect(type(api).__name__ == "Api", f"{api!r:.60} is no srl_web.api.Api")


def _asks_over_https(api: Any) -> None:
    """An address of this machine or the local network may be http."""
    host = urlsplit(api.url).hostname or ""
    try:
        is_near = ip_address(host).is_private
    except ValueError:
        is_near = host == "localhost"
    is_safe = api.url.startswith("https://") or is_near
    expect(is_safe, f"the url is {api.url}: the key and the queries travel in the open")


def _sends_the_query(api: Any) -> None:
    expect("{query}" in _sent(api), "{query} is in none of params and body")


def _names_the_variable_of_its_key(api: Any) -> None:
    sends_key = "{key}" in _sent(api, "headers")
    expect(sends_key == bool(api.key_env), f"{{key}} is sent: {sends_key}; key_env is {api.key_env!r}")


def _sent(api: Any, *more: str) -> str:
    saved = api.model_dump(mode="json")
    return json.dumps([saved[part] for part in ("params", "body", *more)])


CHECKS = [
    _describes_an_api,
    _asks_over_https,
    _sends_the_query,
    _names_the_variable_of_its_key,
]
