"""`--set KEY=VALUE`: the options of one plugin."""

from __future__ import annotations

from typing import Any

from srl.errors import UserError


def read_settings(plugin: str, settings: list[str], kind: str = "retriever") -> dict[str, Any]:
    """`k1=.9` or `retriever.bm25.k1=.9` as options of a plugin; values are read as YAML. Raises UserError.

    `retrievers.e5.model=DIR` goes into the options inside: `{"retrievers": {"e5": {"model": "DIR"}}}`.
    """
    from srl.config.yaml12 import parse

    options: dict[str, Any] = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set {setting}: expected KEY=VALUE, as in --set k1=0.9")
        *outer, last = key.strip().removeprefix(f"{kind}.{plugin}.").split(".")
        place = options
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise UserError(f"--set {setting}: {name} has a value already and holds no keys")
        place[last] = parse(value, f"--set {setting}")
    return options
