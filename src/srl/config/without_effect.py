"""Settings that were typed, and that nothing reads in such a run: each is named, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from srl.config.algorithm import Algorithm
from srl.config.key_errors import split_key
from srl.config.keys import Config, plain

TYPED = ("--set", "command line")
"""The origins of values that were typed."""
_SWITCHES = "algorithm.filter_groups", "data.pass_rate_pools", "reward.overlong_buffer"
_OF_VERL = "cluster.", "verl."


def value_of(config: Config, key: str) -> Any:
    """The value of a key; options of plugins are in mappings, and `module:Class` is one part of a key."""
    found: Any = config
    for name in split_key(key):
        found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    return found


def without_effect(config: Config, origins: Mapping[str, str], algorithm: Algorithm) -> Iterator[str]:
    """Settings that were typed, and that nothing reads in such a run."""
    actor = config.actor
    unread = dict(_of_switches(config))  # why, by how such keys begin
    if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        unread["actor.clip_ratio"] = "actor.clip_ratio_low and actor.clip_ratio_high take its place"
    if not actor.use_kl_loss:
        unread["actor.kl_loss_type"] = unread["actor.kl_loss_coef"] = "actor.use_kl_loss is false"
    if not config.algorithm.use_kl_in_reward:
        unread["algorithm.kl_"] = "algorithm.use_kl_in_reward is false"
    elif config.algorithm.kl_ctrl.type == "fixed":
        for key in ("target_kl", "horizon"):
            unread[f"algorithm.kl_ctrl.{key}"] = "algorithm.kl_ctrl.type is fixed"
    if actor.policy_loss.loss_mode != "vanilla":
        unread["actor.clip_ratio_c"] = f"actor.policy_loss.loss_mode is {actor.policy_loss.loss_mode}"
    if actor.loss_agg_mode != "constant":
        unread["actor.loss_agg_constant"] = f"actor.loss_agg_mode is {actor.loss_agg_mode}"
    if not algorithm.needs_critic:
        unread["critic."] = f"{algorithm.name} has no critic"
    if not config.needs_reference:
        unread["ref."] = "there is no KL to a reference policy"
    unread |= _of_the_index(config)
    if config.model.lora_rank == config.critic.lora_rank == 0:
        unread["model.lora_alpha"] = unread["model.lora_target_modules"] = "model.lora_rank is 0"
    for key in ("gamma", "lam"):
        if not _takes(algorithm.estimator, key):
            unread[f"algorithm.{key}"] = f"{algorithm.name} does not use it"
    for key in [key for key, origin in origins.items() if origin in TYPED]:
        for start, why in unread.items():
            if key == start or key.startswith(start if start.endswith(("_", ".")) else f"{start}."):
                yield f"{key} = {plain(value_of(config, key))} has no effect: {why}"


def of_verl_alone(keys: Iterable[str]) -> Iterator[str]:
    """A line that names the `keys` which only `--backend verl` reads, if there are any."""
    if found := [key for key in keys if key.startswith(_OF_VERL)]:
        have = "has" if len(found) == 1 else "have"
        yield f"{', '.join(found)} {have} no effect without --backend verl"


def _of_the_index(config: Config) -> dict[str, str]:
    """The keys of the retriever that were settled when an index was built, or that a server has."""
    if config.search.url is not None:
        return {"retriever.": "the server at search.url has its own"}
    if config.search.index is None:
        return {}
    from srl.plugins import manager
    from srl.plugins.options import runtime_options

    name = config.retriever.name
    model = manager.options_model("retriever", name)
    shaping = set(model.model_fields) - runtime_options(model) if model else set()
    why = "an index keeps what it was built with; build another with `srl index build`"
    keys = [] if manager.is_import_path(name) else ["name"]  # typed, it says that the index's code is trusted
    return {f"retriever.{key}": why for key in (*keys, *(f"{name}.{option}" for option in shaping))}


def _of_switches(config: Config) -> Iterator[tuple[str, str]]:
    """The keys of sections that are switched off, and why they are not read."""
    for section in _SWITCHES:
        if not value_of(config, f"{section}.enable"):
            for key in value_of(config, section).model_dump():
                if key != "enable":
                    yield f"{section}.{key}", f"{section}.enable is false"


def _takes(estimator: Callable[..., object], name: str) -> bool:
    """Whether an estimator has an argument `name`, or others that it may look at (`**_` are not)."""
    from inspect import signature

    taken = signature(estimator).parameters.values()
    return any(one.name == name or (one.kind is one.VAR_KEYWORD and one.name != "_") for one in taken)
