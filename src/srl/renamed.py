"""Renamed keys, options, columns and fields: old names, which are still read, and current ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Names = Mapping[str, str]

KEYS: Names = {
    "search.engines": "search.retrievers",
    "rollout.logprobs": "algorithm.rollout_correction.rollout_is",
    "rollout.sampler_is_cap": "algorithm.rollout_correction.rollout_is_threshold",
}
"""Keys of the configuration."""

VALUES: Mapping[str, Names] = {"rollout.logprobs": {"sampler": "token", "trainer": "off"}}
"""Values, by old key."""

OPTIONS: Mapping[str, Names] = {
    "srl train": {"--engine": "--backend"},
    "srl index build": {"--force": "--overwrite"},
    "srl index import": {"--force": "--overwrite"},
}
"""Options, by command."""

FIELDS: Mapping[str, Names] = {
    "run": {"engine": "backend", "engine_digests": "retriever_digests"},
    "cassette": {"engine": "retriever", "engines": "retrievers"},
}
"""Fields of JSON files, by kind: `run` is a run's `run.json` and a model's `srl.json`."""

COLUMNS: Mapping[str, Names] = {"searches": {"engine": "retriever"}}
"""Columns of the log, by table."""

METRICS: Names = {"/engine=": "/retriever="}
"""Parts of metrics' names."""


def current_fields(kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """`found`, a JSON object of `kind`, with current names."""
    return {FIELDS[kind].get(name, name): value for name, value in found.items()}


def renamed(old: str, new: str) -> str:
    """The warning for an old name."""
    return f"{old} is now {new}; write {new}"
