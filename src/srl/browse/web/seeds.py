"""Runs that differ in their seed alone, drawn together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from srl.browse.curve import Series
from srl.browse.svg import Band, band

_SEED = "trainer.seed"
_MOST = 3


def bands(series: Sequence[Series], runs: Mapping[str, Mapping[str, Any]]) -> list[Band]:
    """`series` of one metric, those of runs whose `config` is equal but for the seed in one band.

    A band's label is the name of its run without date, or without seed and number for several. Of bands
    that would be called alike, each also says the keys that differ. A run that is not in `runs` is alone.
    """
    flat = {run_id: _settings(json.loads(row["config"])) for run_id, row in runs.items()}
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in series:
        config = {key: value for key, value in flat.get(one.run_id, {}).items() if key != _SEED}
        same = json.dumps(config, sort_keys=True) if config else one.run_id
        groups.setdefault((same, one.phase), []).append(one)
    labels = [_label(some) for some in groups.values()]
    configs = [flat.get(some[0].run_id, {}) for some in groups.values()]
    return [
        band(label + _differences(place, labels, configs), some)
        for place, (label, some) in enumerate(zip(labels, groups.values(), strict=True))
    ]


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, without when a resumed run changed them."""
    return _flat({key: value for key, value in config.items() if key not in ("changed", "extended")})


def _label(runs: Sequence[Series]) -> str:
    if len(runs) == 1:
        return runs[0].label
    name, _, rest = runs[0].label.partition(" ")
    return f"{name.rsplit('-s', 1)[0]}, {len(runs)} seeds{f' {rest}' if rest else ''}"


def _differences(place: int, labels: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> str:
    """The keys in which a band differs from those that are called alike, in brackets."""
    alike = [config for label, config in zip(labels, configs, strict=True) if label == labels[place]]
    keys = {key for config in alike for key in config if key != _SEED}
    differ = sorted(key for key in keys if len({repr(config.get(key)) for config in alike}) > 1)
    said = ", ".join(f"{key.rpartition('.')[2]} {configs[place].get(key)}" for key in differ[:_MOST])
    return f" ({said})" if said else ""


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value
    return flat
