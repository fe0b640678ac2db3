"""Which key to turn where a run does not fit the memory of its device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from srl.config import Config
from srl.train.dry_run.memory import Layout, footprint, gib
from srl.train.dry_run.model_size import Shape, shape_of

USABLE = 0.9
"""Share of a device's memory that a run can plan with; libraries and fragmentation take the rest."""

Phase = Literal["rollout", "update"]

KEYS: dict[Phase, str] = {
    "rollout": "rollout.max_num_seqs, data.max_response_length",
    "update": "model.gradient_checkpointing, actor.ppo_max_token_len, model.lora_rank",
}
"""What decides the memory of each phase, for a given model."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and its memory in bytes where that is known."""

    kind: str
    name: str
    memory: int | None


def memory_warnings(
    config: Config, shape: Shape, path: str | Path, device: Device, layout: Layout,
    phases: Sequence[Phase] = ("rollout", "update"),
) -> Iterator[str]:  # fmt: skip
    """A line for each phase that does not fit the device, with the settings that make it fit, as options to
    type; else with the keys to try."""
    if device.memory is None:
        return
    room = USABLE * device.memory

    def size(phase: Phase, settings: dict[str, Any]) -> int:
        changed, other = config.with_settings(settings), shape
        if "model.lora_rank" in settings:
            other = shape_of(changed, path, needs_critic=shape.critic > 0)
        return getattr(footprint(other, changed, layout), phase)

    for phase in phases:
        if (needed := size(phase, {})) <= room:
            continue
        advice = f"no setting of {KEYS[phase]} is enough; use a smaller model or shorter episodes"
        for settings in _candidates(config, phase):
            if size(phase, settings) <= room:
                advice = " ".join(f"--set {key}={str(value).lower()}" for key, value in settings.items())
                break
        yield f"the {phase} needs {gib(needed)}, and {device.name} has {gib(device.memory)}: {advice}"


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
