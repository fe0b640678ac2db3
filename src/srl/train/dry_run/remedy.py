"""Which key to turn where a run does not fit the memory of its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from srl.config import Config
from srl.train.dry_run.memory import Footprint

Phase = Literal["rollout", "update"]

KEYS: dict[Phase, str] = {
    "rollout": "rollout.max_num_seqs, data.max_response_length",
    "update": "model.gradient_checkpointing, actor.ppo_max_token_len, model.lora_rank",
}
"""What decides the memory of each phase, for a given model."""


def remedy(config: Config, phase: Phase, room: float, footprint_of: Callable[[Config], Footprint]) -> str:
    """The first settings with which `phase` fits `room` bytes, as options to type; else the keys to try."""
    for settings in _candidates(config, phase):
        if getattr(footprint_of(with_settings(config, settings)), phase) <= room:
            return " ".join(f"--set {key}={str(value).lower()}" for key, value in settings.items())
    return f"no setting of {KEYS[phase]} is enough; use a smaller model or shorter episodes"


def _candidates(config: Config, phase: Phase) -> Iterator[dict[str, Any]]:
    """Settings to try, the cheapest first."""
    if phase == "rollout":
        yield from ({"rollout.max_num_seqs": count} for count in _halves(config.rollout.max_num_seqs, 1))
        return
    halves = _halves(config.actor.ppo_max_token_len, config.data.max_episode_tokens)
    tokens = [{}, *({"actor.ppo_max_token_len": count} for count in halves)]
    checkpointing = {} if config.model.gradient_checkpointing else {"model.gradient_checkpointing": True}
    adapter = {} if config.model.lora_rank else {"model.lora_rank": 32}
    for more in ({}, checkpointing, checkpointing | adapter):
        yield from (more | shorter for shorter in tokens)


def _halves(value: int, least: int) -> Iterator[int]:
    """Half of `value`, half of that, … and `least` at the end."""
    while value > least:
        value = max(value // 2, least)
        yield value


def with_settings(config: Config, settings: dict[str, Any]) -> Config:
    """`config` with other values of `section.key`."""
    for name, value in settings.items():
        section, _, key = name.partition(".")
        changed = getattr(config, section).model_copy(update={key: value})
        config = config.model_copy(update={section: changed})
    return config
