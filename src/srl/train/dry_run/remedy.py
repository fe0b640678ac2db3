"""Which key to turn where a run does not fit the memory of its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from srl.config import Config
from srl.train.dry_run.memory import Footprint, longest_episode

Phase = Literal["rollout", "update"]

KEYS: dict[Phase, str] = {
    "rollout": "rollout.max_num_seqs, data.max_response_length",
    "update": "model.gradient_checkpointing, actor.ppo_max_token_len, model.lora_rank",
}
"""What decides the memory of each phase, for a given model."""


def remedy(config: Config, phase: Phase, room: float, footprint_of: Callable[[Config], Footprint]) -> str:
    """What to type so that `phase` fits `room` bytes: the first setting that is enough, else the keys."""
    for settings in _settings(config, phase):
        if getattr(footprint_of(with_settings(config, settings)), phase) <= room:
            return " ".join(f"--set {key}={_said(value)}" for key, value in settings.items())
    return f"no setting of {KEYS[phase]} alone is enough; take a smaller model or shorter episodes"


def _settings(config: Config, phase: Phase) -> Iterator[dict[str, Any]]:
    """Settings to try, the ones that cost least first."""
    if phase == "rollout":
        yield from ({"rollout.max_num_seqs": count} for count in _halves(config.rollout.max_num_seqs, 1))
        return
    longest = longest_episode(config)
    shorter = [{"actor.ppo_max_token_len": n} for n in _halves(config.actor.ppo_max_token_len, longest)]
    checkpointing = {} if config.model.gradient_checkpointing else {"model.gradient_checkpointing": True}
    adapters = {} if config.model.lora_rank else {"model.lora_rank": 32}
    yield from shorter
    for first in (checkpointing, {**checkpointing, **adapters}):
        if first:
            yield from ({**first, **tokens} for tokens in ({}, *shorter))


def _halves(value: int, least: int) -> Iterator[int]:
    """Half of `value`, half of that, … and `least` at the end."""
    while value > least:
        value = max(value // 2, least)
        yield value


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """`config` with other values of `section.key`."""
    for name, value in settings.items():
        section, _, key = name.partition(".")
        changed = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: changed})
    return config
