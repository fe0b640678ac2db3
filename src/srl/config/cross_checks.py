"""Checks that involve several keys, and the options of plugins."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from srl.config.algorithm import Algorithm
from srl.config.keys import Config, KeyPath, flat, plain, value_of
from srl.errors import UserError
from srl.safe import quoted, refuse_credentials

KINDS = ("retriever", "reward", "algorithm", "tool")
"""The kinds of plugins; each has a section of the same name."""
_NAMED_BY = {"reward": "reward.weights.{}", "tool": "rollout.tools"}
"""The keys that name plugins, where it is not `name` of their section."""


def algorithm_plugin(name: str) -> Algorithm:
    """The algorithm plugin called `name`. Raises UserError when it is not installed."""
    from srl.plugins import manager

    return cast(Algorithm, manager.load("algorithm", name))


def context_errors(config: Config, context: int | None) -> Iterator[str]:
    """A line where the longest episode exceeds the model's context of `context` tokens."""
    longest = config.data.max_episode_tokens
    if context is not None and longest > context:
        yield (
            f"data.max_prompt_length + data.max_response_length = {longest:,} tokens, and this model's "
            f"context is {context:,}: lower one of them"
        )


def local_errors(config: Config) -> Iterator[str]:
    """A line for each setting that the local backend does not train with."""
    if config.model.dtype == "float16":
        yield (
            "model.dtype = float16: training needs loss scaling in float16, which the local backend does not "
            "do; set model.dtype=bfloat16 or float32"
        )
    if config.rollout.engine == "openai":
        yield (
            "rollout.engine = openai is not for training: the weights of a server cannot be changed; set "
            "rollout.engine=torch, or fine-tune on what `srl data demonstrations` has the server write"
        )


def truncation_errors(config: Config, engine: str) -> Iterator[str]:
    """A line where `engine` renormalises what top_p leaves, and nothing corrects the log-probs for it.

    vLLM's log-probs are then those of the distribution that it sampled from. The other engines give those of
    the whole distribution, whatever top_p is.
    """
    if (
        engine == "vllm"
        and config.rollout.top_p < 1
        and config.algorithm.rollout_correction.rollout_is == "off"
    ):
        yield (
            f"rollout.top_p = {config.rollout.top_p}: vLLM renormalises what is left, which only importance "
            "weights correct; set rollout.top_p=1.0 or algorithm.rollout_correction.rollout_is=token"
        )


def plugins_in_use(config: Config) -> Iterator[tuple[str, str]]:
    """`(kind, name)` of the plugins that a run with this configuration loads."""
    yield "algorithm", config.algorithm.name
    yield from (("reward", name) for name in config.reward.weights)
    yield from (("tool", name) for name in config.rollout.tool_plugins)
    if config.rollout.search and config.search.url is None and not config.search.replays:
        yield "retriever", config.retriever.name


def check_plugins(config: Config, origins: Mapping[str, str] | None = None) -> dict[KeyPath, Any]:
    """Check that every plugin that is named is installed, and that its options are valid.

    Returns every option of the plugins in use, defaults included, and every key of the named retrievers, so
    that a saved run has them all. Raises UserError that names the key, and its origin from `origins`.
    """
    from srl.plugins import manager

    key_origins, options = origins or {}, dict[KeyPath, Any]()
    in_use = list(plugins_in_use(config))
    for kind, name in in_use:
        with _origin(key_origins, _NAMED_BY.get(kind, f"{kind}.name").format(name)):
            manager.find(kind, name)
    sections = [(kind, name) for kind in KINDS for name in getattr(config, kind).model_extra]
    for kind, name in dict.fromkeys([*in_use, *sections]):
        with _origin(key_origins, f"{kind}.{name}"):
            valid = _options(f"{kind}.{name}", kind, name, getattr(config, kind).options(name))
        options |= dict(flat(valid, (kind, name))) if (kind, name) in in_use else {}
    for name, entry in config.search.retrievers.items():
        where, whole = f"search.retrievers.{name}", entry.model_dump()
        if entry.retriever is not None and not config.search.replays:
            with _origin(key_origins, where):
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
    for keys, why, hint in _contradictions(config, algorithm):
        parts = [f"{key} = {plain(value_of(config, key))} ({origins.get(key, 'default')})" for key in keys]
        raise UserError(f"{' and '.join(parts)}: {why}", key=keys[0], hint=hint)
    return list(_warnings(config, algorithm))


Contradictions = Iterator[tuple[tuple[str, ...], str, str]]
"""Keys that do not go together, why, and what to do."""


def _contradictions(config: Config, algorithm: Algorithm) -> Contradictions:
    batch, longest, groups = (
        config.data.train_batch_size,
        config.data.max_response_length,
        config.algorithm.filter_groups,
    )
    for key, values in algorithm.requires.items():
        if value_of(config, key) not in values:
            choices = " or ".join(f"{key}={plain(value)}" for value in values)
            yield (key,), f"{algorithm.name} needs another value", f"set {choices}"
    for who in ("actor", "critic") if algorithm.needs_critic else ("actor",):
        key, size = f"{who}.ppo_mini_batch_size", getattr(config, who).ppo_mini_batch_size
        if size < batch and batch % size:
            fits = max(part for part in range(1, size) if batch % part == 0)
            yield (key, "data.train_batch_size"), "the first must divide the second", f"set {key}={fits}"
    for small, large in (("rollout.max_turn_tokens", "data.max_response_length"),):
        if value_of(config, small) > value_of(config, large):
            yield (small, large), "the first must not exceed the second", ""
    if config.rollout.deterministic and config.rollout.engine not in ("auto", "torch"):
        hint = "set rollout.engine=torch or rollout.deterministic=false"
        yield ("rollout.deterministic", "rollout.engine"), "only the torch engine repeats a run", hint
    if groups.enable and config.rollout.n < 2:
        keys = ("algorithm.filter_groups.enable", "rollout.n")
        yield keys, "the episodes of one question are compared", "set rollout.n=5"
    buffer, weights = config.reward.overlong_buffer, config.reward.weights
    parts = ["reward", *weights, *(["overlong"] if buffer.enable else [])]
    if groups.enable and not any(f"{groups.metric}/".startswith(f"{name}/") for name in parts):
        yield ("algorithm.filter_groups.metric",), "no part of the reward", f"use one of {', '.join(parts)}"
    if buffer.enable and buffer.len > longest:
        keys = ("reward.overlong_buffer.len", "data.max_response_length")
        yield keys, "the first must not exceed the second", ""
    try:
        config.algorithm.rollout_correction.rejections  # noqa: B018
    except ValueError as error:
        section = "algorithm.rollout_correction"
        yield (f"{section}.rollout_rs", f"{section}.rollout_rs_threshold"), str(error), ""
    if config.rollout.engine == "openai" and config.rollout.openai.url is None:
        yield ("rollout.engine",), "it needs a server", "--set rollout.openai.url=http://HOST:PORT/v1"
    tools, plugins = config.rollout.tools, config.rollout.tool_plugins
    if "search" not in tools or len(set(tools)) < len(tools):
        yield ("rollout.tools",), "it lists search, and each tool once", "such as [search, open, find]"
    if plugins and config.search.cassette is not None:
        keys = ("rollout.tools", "search.cassette")
        yield keys, f"a cassette has no calls of {', '.join(plugins)}", "set one of them to its default"
    if config.search.url and config.search.index:
        yield ("search.url", "search.index"), "one of them searches", "set the other to null"
    tested = {os.path.realpath(file) for file in config.data.test_files or ()}
    if any(os.path.realpath(file) in tested for file in config.data.val_files or ()):  # they choose
        yield ("data.val_files", "data.test_files"), "they share questions", "validate on other questions"


def check_training(config: Config, kind: str) -> None:
    """Raises UserError for what a training run of this `kind` (rl, sft or rft) cannot do."""
    sft = config.sft
    if kind in ("sft", "rft") and sft.steps == 0:
        raise UserError("nothing to fine-tune: sft.steps = 0", key="sft.steps")
    if kind == "rft" and sft.mix:
        hint = "data.mix gives shares of the questions, sft.filter chooses"
        raise UserError("sft.mix is not for --algo rft", key="sft.mix", hint=hint)
    if kind == "sft" and sft.patience and not config.trainer.test_freq:
        why = "sft.patience counts validations, and there are none: trainer.test_freq = 0"
        raise UserError(why, key="sft.patience")


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
    if config.algorithm.use_kl_in_reward and config.actor.use_kl_loss:
        yield "the KL counts twice: algorithm.use_kl_in_reward and actor.use_kl_loss are both true"
    if config.rollout.top_p < 1:
        yield (
            f"rollout.top_p = {config.rollout.top_p}: tokens are sampled from a different distribution than "
            "the one that is trained; 1.0 is on-policy"
        )
    weights = config.reward.weights
    if weights and not any(weights.values()) and not config.reward.overlong_buffer.enable:
        yield f"every weight in reward.weights is 0 ({', '.join(weights)}): nothing is rewarded"
    if config.trainer.critic_warmup > 0 and not algorithm.needs_critic:
        yield (
            f"trainer.critic_warmup = {config.trainer.critic_warmup}: {algorithm.name} has no critic, so "
            "nothing learns in these steps; set it to 0"
        )
    steps = config.trainer.total_training_steps
    if algorithm.needs_critic and config.trainer.critic_warmup >= steps > 0:
        yield (
            f"trainer.critic_warmup = {config.trainer.critic_warmup}: only the critic learns in all of the "
            f"{steps} steps, and the policy stays as it is; take more steps, or lower it"
        )
    usual = algorithm.defaults.get("rollout.n", 1)
    if config.rollout.n == 1 and usual != 1:
        yield f"rollout.n = 1: {algorithm.name} compares the episodes of one question; {usual} is usual"
