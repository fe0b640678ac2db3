"""Which key to turn where a run does not fit the memory of its device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from srl.config import Config
from srl.train.dry_run.memory import Layout, footprint, gib
from srl.train.dry_run.model_size import Shape, shape_of

USABLE = 0.9
"""Share of a device's memory that a run can plan with; libraries and fragmentation take the rest."""

Phase = Literal["rollout", "logprobs", "update", "checkpoint"]
LOCAL: tuple[Phase, ...] = ("rollout", "logprobs", "update", "checkpoint")
"""The phases of a step on the local backend, with its checkpoint."""

NAMES: dict[Phase, str] = {"logprobs": "log-prob pass"}
KEYS: dict[Phase, tuple[str, ...]] = {
    "rollout": ("rollout.max_num_seqs", "data.max_response_length"),
    "logprobs": ("actor.ppo_max_token_len",),
    "update": (
        "model.gradient_checkpointing", "actor.ppo_max_token_len", "critic.lora_rank", "model.lora_rank",
    ),
    "checkpoint": ("critic.lora_rank", "model.lora_rank"),
}  # fmt: skip
"""What decides the memory of each phase, for a given model."""
LOCAL_ONLY = "critic.lora_rank"
"""verl's critic has no adapter."""

Size = Callable[[Phase, dict[str, Any]], int]
"""The bytes of a phase with some settings changed."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and its memory in bytes where that is known."""

    kind: str
    name: str
    memory: int | None


def memory_warnings(
    config: Config, shape: Shape, path: str | Path, device: Device, layout: Layout,
    phases: Sequence[Phase] = LOCAL,
) -> Iterator[str]:  # fmt: skip
    """A line for each phase that does not fit the device, with the settings that make it fit, as options to
    type; else with the keys to try."""
    if device.memory is None:
        return
    room, size = USABLE * device.memory, sizes(config, shape, path, layout)
    for phase in phases:
        if (needed := size(phase, {})) <= room:
            continue
        is_local = layout.kind == "local"
        keys = [key for key in KEYS[phase] if is_local or key != LOCAL_ONLY]
        advice = f"no setting of {', '.join(keys)} is enough; use a smaller model or shorter episodes"
        candidates = _candidates(config, shape, phase, is_local)
        fitting = next((settings for settings in candidates if size(phase, settings) <= room), None)
        if fitting is not None:
            advice = typed(fitting)
        name = NAMES.get(phase, phase)
        yield f"the {name} needs {gib(needed)}, and {device.name} has {gib(device.memory)}: {advice}"


def sizes(config: Config, shape: Shape, path: str | Path, layout: Layout) -> Size:
    """A function that gives the bytes of a phase with some settings changed. Of these only the ranks of
    adapters change the shape; it is built once for each pair of ranks."""
    shapes = {(config.model.lora_rank, config.critic.lora_rank): shape}

    def size(phase: Phase, settings: dict[str, Any]) -> int:
        changed = config.with_settings(settings)
        ranks = changed.model.lora_rank, changed.critic.lora_rank
        if ranks not in shapes:
            shapes[ranks] = shape_of(changed, path, needs_critic=shape.critic > 0)
        return getattr(footprint(shapes[ranks], changed, layout), phase)

    return size


def settings_that_fit(config: Config, shape: Shape, size: Size, memory: float) -> dict[str, Any] | None:
    """The settings with which every phase of a local run fits `memory` bytes; None if none are enough."""
    room, chosen = USABLE * memory, dict[str, Any]()
    for phase in ("update", "logprobs", "rollout", "checkpoint"):
        fitting = ({}, *_candidates(config.with_settings(chosen), shape, phase))
        found = next((settings for settings in fitting if size(phase, chosen | settings) <= room), None)
        if found is None:
            return None
        chosen |= found
    return chosen


def typed(settings: dict[str, Any]) -> str:
    """Settings as options to type."""
    return " ".join(f"--set {key}={str(value).lower()}" for key, value in settings.items())


def _candidates(
    config: Config, shape: Shape, phase: Phase, is_local: bool = True
) -> Iterator[dict[str, Any]]:
    """Settings to try, the cheapest first: those that leave what is learned as it is, then adapters."""
    many, longest = config.rollout.max_num_seqs, config.data.max_episode_tokens
    limits = {"actor.ppo_max_token_len": config.actor.ppo_max_token_len}
    if shape.critic:
        limits["critic.ppo_max_token_len"] = config.critic.ppo_max_token_len
    halves = _halves(max(limits.values()), longest)
    fewer: dict[Phase, list[dict[str, Any]]] = {
        "rollout": [{"rollout.max_num_seqs": count} for count in _halves(many, 1)],
        "logprobs": [{key: count for key, now in limits.items() if count < now} for count in halves],
        "checkpoint": [],
    }
    fewer["update"] = fewer["logprobs"]
    for more in _less_held(config, shape, phase, is_local):
        yield from (more | less for less in ({}, *fewer[phase]))


def _less_held(config: Config, shape: Shape, phase: Phase, is_local: bool) -> Iterator[dict[str, Any]]:
    """Settings that hold less, each with those before it: none, gradient checkpointing, an adapter for the
    critic, an adapter for the policy."""
    more: dict[str, Any] = {}
    yield more
    if phase == "update" and not config.model.gradient_checkpointing:
        more = more | {"model.gradient_checkpointing": True}
        yield more
    if is_local and shape.critic and not config.critic.lora_rank:
        more = more | {LOCAL_ONLY: 32}
        yield more
    if not config.model.lora_rank:
        yield more | {"model.lora_rank": 32}


def _halves(value: int, least: int) -> Iterator[int]:
    """Half of `value`, half of that, … and `least` at the end."""
    while value > least:
        value = max(value // 2, least)
        yield value
