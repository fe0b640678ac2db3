"""Checks that involve several keys, and the options of plugins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

from srl.config.keys import Config, KeyPath, flat, plain, value_of
from srl.errors import UserError
from srl.safe import quoted, refuse_credentials


class Algorithm(Protocol):
    """What the configuration needs of an algorithm plugin, an `srl.advantage.Algorithm`."""

    @property
    def name(self) -> str: ...
    @property
    def needs_critic(self) -> bool: ...
    @property
    def defaults(self) -> Mapping[str, object]: ...
    @property
    def requires(self) -> Mapping[str, tuple[object, ...]]: ...
    @property
    def estimator(self) -> Callable[..., object]: ...


def algorithm_plugin(name: str) -> Algorithm:
    """The algorithm plugin called `name`. Raises UserError when it is not installed."""
    from srl.plugins import manager

    return cast(Algorithm, manager.load("algorithm", name))


def check_context(config: Config, context: int | None) -> None:
    """Raises UserError where the longest episode exceeds the model's context of `context` tokens."""
    if context is not None and config.data.max_episode_tokens > context:
        raise UserError(
            f"data.max_prompt_length + data.max_response_length = {config.data.max_episode_tokens:,} tokens, "
            f"and this model's context is {context:,}", key="data.max_response_length",
            hint="lower one of them",
        )  # fmt: skip


def is_truncated(config: Config) -> bool:
    """Whether what top_p leaves is sampled, and nothing corrects vLLM's log-probs for it: they are those of
    what it left. The other engines give those of the whole distribution."""
    return config.rollout.top_p < 1 and config.algorithm.rollout_correction.rollout_is == "off"


def check_truncation(config: Config, engine: str) -> None:
    """Raises UserError where `engine` is vLLM and `is_truncated`."""
    if engine == "vllm" and is_truncated(config):
        raise UserError(
            f"rollout.top_p = {config.rollout.top_p}: vLLM renormalises what is left, which only importance "
            "weights correct", key="rollout.top_p",
            hint="set rollout.top_p=1.0 or algorithm.rollout_correction.rollout_is=token",
        )  # fmt: skip


def check_plugins(config: Config, origins: Mapping[str, str]) -> dict[KeyPath, Any]:
    """Check that every plugin that is named is installed, and that its options are valid.

    Returns every option of the plugins in use, defaults included, and every key of the named retrievers, so
    that a saved run has them all. Raises UserError that names the key, and its origin from `origins`.
    """
    from srl.plugins import manager

    in_use = {  # with the key that names each
        ("algorithm", config.algorithm.name): "algorithm.name",
        **{("reward", name): f"reward.weights.{name}" for name in config.reward.weights},
        **{("tool", name): "rollout.tools" for name in config.rollout.tool_plugins},
    }
    if config.rollout.search and config.search.url is None and not config.search.replays:
        in_use["retriever", config.retriever.name] = "retriever.name"
    for (kind, name), key in in_use.items():
        with _origin(origins, key):
            manager.find(kind, name)
    options = dict[KeyPath, Any]()
    sections = [(kind, name) for kind in manager.KINDS for name in getattr(config, kind).model_extra]
    for kind, name in dict.fromkeys([*in_use, *sections]):
        with _origin(origins, f"{kind}.{name}"):
            valid = _options(f"{kind}.{name}", kind, name, getattr(config, kind).options(name))
        options |= dict(flat(valid, (kind, name))) if (kind, name) in in_use else {}
    for name, entry in config.search.retrievers.items():
        where, whole = f"search.retrievers.{name}", entry.model_dump()
        if entry.retriever is not None and not config.search.replays:
            with _origin(origins, where):
                manager.find("retriever", entry.retriever)
                whole["options"] = _options(f"{where}.options", "retriever", entry.retriever, entry.options)
        options |= dict(flat(whole, ("search", "retrievers", name)))
    return options


def _options(where: str, kind: str, plugin: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a plugin, with defaults. Raises UserError."""
    from srl.plugins import manager
    from srl.plugins.options import validated

    model = manager.options_model(kind, plugin)
    if model is None and options:
        raise UserError(f"the {kind} {plugin!r} takes no options", key=where, hint=f"remove {where}")
    return validated(where, model, options).model_dump(mode="json") if model else {}


@contextmanager
def _origin(origins: Mapping[str, str], start: str) -> Iterator[None]:
    """Prefix a UserError with the origin of its key, or of the first one at or below `start`."""
    try:
        yield
    except UserError as error:
        below = [origin for key, origin in origins.items() if key == start or key.startswith(f"{start}.")]
        origin = origins.get(error.key or "") or next(iter(below), "")
        raise UserError(f"{origin}: {error}" if origin else error, key=error.key or start) from error


def cross_check(config: Config, origins: Mapping[str, str], algorithm: Algorithm) -> list[str]:
    """Warnings about settings that are probably mistakes. Raises UserError for contradictions."""
    with _origin(origins, ""):
        _check_addresses(config)  # first, since what follows shows values
    _refuse(config, origins, _contradictions(config, algorithm))
    return list(_warnings(config, algorithm))


Contradiction = tuple[object, tuple[str, ...], str, str]
"""Whether there is one, the keys that do not go together, why, and what to do."""


def _refuse(config: Config, origins: Mapping[str, str], rows: Iterable[Contradiction]) -> None:
    """Raises UserError for the first contradiction, with the values and origins of its keys."""
    for is_one, keys, why, hint in rows:
        if is_one:
            parts = [
                f"{key} = {plain(value_of(config, key))} ({origins.get(key, 'default')})" for key in keys
            ]
            raise UserError(f"{' and '.join(parts)}: {why}", key=keys[0], hint=hint)


def _contradictions(config: Config, algorithm: Algorithm) -> Iterator[Contradiction]:
    data, rollout, search = config.data, config.rollout, config.search
    groups, buffer = config.algorithm.filter_groups, config.reward.overlong_buffer
    for key, values in algorithm.requires.items():
        choices = " or ".join(f"{key}={plain(value)}" for value in values)
        why = f"{algorithm.name} needs another value"
        yield value_of(config, key) not in values, (key,), why, f"set {choices}"
    batch = data.train_batch_size
    for who in ("actor", "critic") if algorithm.needs_critic else ("actor",):
        key, size = f"{who}.ppo_mini_batch_size", getattr(config, who).ppo_mini_batch_size
        fits = max(part for part in range(1, size + 1) if batch % part == 0)
        keys = (key, "data.train_batch_size")
        yield size < batch and fits < size, keys, "the first must divide the second", f"set {key}={fits}"
    parts = ["reward", *config.reward.weights, *(["overlong"] if buffer.enable else [])]
    tested = {os.path.realpath(file) for file in data.test_files or ()}
    shares = any(os.path.realpath(file) in tested for file in data.val_files or ())  # they choose
    longer = "the first must not exceed the second"
    yield from [
        (rollout.max_turn_tokens > data.max_response_length,
         ("rollout.max_turn_tokens", "data.max_response_length"), longer, ""),
        (buffer.enable and buffer.len > data.max_response_length,
         ("reward.overlong_buffer.len", "data.max_response_length"), longer, ""),
        (rollout.deterministic and rollout.engine not in ("auto", "torch"),
         ("rollout.deterministic", "rollout.engine"), "only the torch engine repeats a run",
         "set rollout.engine=torch or rollout.deterministic=false"),
        (groups.enable and rollout.n < 2, ("algorithm.filter_groups.enable", "rollout.n"),
         "the episodes of one question are compared", "set rollout.n=5"),
        (groups.enable and not any(f"{groups.metric}/".startswith(f"{name}/") for name in parts),
         ("algorithm.filter_groups.metric",), "no part of the reward", f"use one of {', '.join(parts)}"),
        (rollout.engine == "openai" and rollout.openai.url is None, ("rollout.engine",),
         "it needs a server", "--set rollout.openai.url=http://HOST:PORT/v1"),
        ("search" not in rollout.tools or len(set(rollout.tools)) < len(rollout.tools), ("rollout.tools",),
         "expected search among them, and each tool once", "such as [search, open, find]"),
        (rollout.tool_plugins and search.cassette is not None, ("rollout.tools", "search.cassette"),
         "a cassette has no calls of tool plugins", "set one of them to its default"),
        (search.url and search.index, ("search.url", "search.index"), "one of them searches",
         "set the other to null"),
        (shares, ("data.val_files", "data.test_files"), "they share questions",
         "validate on other questions"),
    ]  # fmt: skip


def check_training(config: Config, kind: str, backend: str, origins: Mapping[str, str]) -> None:
    """Raises UserError for what a training run of this `kind` (rl, sft or rft) cannot do."""
    is_local = backend == "local"
    _refuse(config, origins, [
        (kind in ("sft", "rft") and config.sft.steps == 0, ("sft.steps",), "nothing to fine-tune", ""),
        (is_local and config.model.dtype == "float16", ("model.dtype",),
         "the local backend does not scale the loss", "set bfloat16 or float32"),
        (is_local and config.rollout.engine == "openai", ("rollout.engine",),
         "the weights of a server cannot be changed",
         "set torch, or fine-tune on what `srl data demonstrations` has the server write"),
    ])  # fmt: skip


def _check_addresses(config: Config) -> None:
    """URLs are such, without secrets in them; a named retriever has one source and a name to be called by."""
    openai, key = config.rollout.openai, "rollout.openai.url"
    if openai.url is not None:
        refuse_credentials(key, openai.url, openai.key_variable or "OPENAI_API_KEY")
        if not re.fullmatch(r"https?://[^/]+(/.*)?", openai.url):
            raise UserError(f"{key} = {quoted(openai.url, 80)} is not a URL", key=key)
    for name in config.reward.weights:
        options = config.reward.options(name)
        if isinstance(url := options.get("url"), str):
            refuse_credentials(f"reward.{name}.url", url, options.get("key_variable") or "OPENAI_API_KEY")
    for url in config.search.url or ():
        refuse_credentials("search.url", url)
    for name, entry in config.search.retrievers.items():
        key = f"search.retrievers.{name}"
        if not re.fullmatch(r"[a-z0-9_-]+", name):
            raise UserError(f"{key}: expected a name of a-z, 0-9, - and _, such as web", key=key)
        if sum(source is not None for source in (entry.url, entry.index, entry.retriever)) != 1:
            raise UserError(f"{key}: give one of url, index and retriever", key=key)
        if entry.url and entry.options:
            raise UserError(f"{key}.options: the server has its own", key=f"{key}.options")
        for url in entry.url or ():
            refuse_credentials(f"{key}.url", url)


def _warnings(config: Config, algorithm: Algorithm) -> Iterator[str]:
    weights, first = config.reward.weights, config.trainer.critic_warmup
    steps, usual = config.trainer.total_training_steps, algorithm.defaults.get("rollout.n", 1)
    rows = [
        (config.algorithm.use_kl_in_reward and config.actor.use_kl_loss,
         "the KL counts twice: algorithm.use_kl_in_reward and actor.use_kl_loss are both true"),
        (config.rollout.top_p < 1,
         f"rollout.top_p = {config.rollout.top_p}: tokens are sampled from a different distribution than the "
         "one that is trained; 1.0 is on-policy"),
        (not any(weights.values()) and not config.reward.overlong_buffer.enable,
         f"every weight in reward.weights is 0 ({', '.join(weights)}): nothing is rewarded"),
        (first > 0 and not algorithm.needs_critic,
         f"trainer.critic_warmup = {first}: {algorithm.name} has no critic, so nothing learns then"),
        (algorithm.needs_critic and first >= steps > 0,
         f"trainer.critic_warmup = {first}: only the critic learns in all of the {steps} steps"),
        (config.rollout.n == 1 and usual != 1,
         f"rollout.n = 1: {algorithm.name} compares the episodes of one question; {usual} is usual"),
    ]  # fmt: skip
    yield from (line for is_so, line in rows if is_so)
