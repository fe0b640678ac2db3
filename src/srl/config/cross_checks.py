"""Checks that involve several keys, and the options of plugins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from srl.config.algorithm import Algorithm
from srl.config.keys import Config, KeyPath, flat, plain, value_of
from srl.config.sections import NamedRetriever
from srl.config.unread import NO_EXAMPLES, takes_examples
from srl.errors import UserError, parsing
from srl.protocol import read_examples
from srl.safe import quoted, refuse_credentials

KINDS = ("retriever", "reward", "algorithm")
"""The kinds of plugins; each has a section of the same name."""


def algorithm_plugin(name: str) -> Algorithm:
    """The algorithm plugin called `name`. Raises UserError when it is not installed."""
    from srl.plugins import manager

    return cast(Algorithm, manager.load("algorithm", name))


def context_errors(config: Config, context: int | None) -> Iterator[str]:
    """A line where the longest episode exceeds the model's context of `context` tokens."""
    longest, prompt = config.data.max_episode_tokens, config.data.max_prompt_length
    if context is not None and prompt >= context:
        yield (
            f"data.max_prompt_length = {prompt:,} tokens leaves no room for an episode, since this model's "
            f"context is {context:,}: lower it if the prompts are shorter, or choose another model"
        )
    elif context is not None and longest > context:
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
    if config.rollout.search and config.search.url is None and not config.search.replays:
        yield "retriever", config.retriever.name


def check_plugins(config: Config, origins: Mapping[str, str] | None = None) -> dict[KeyPath, Any]:
    """Check that every plugin that is named is installed, and that its options are valid.

    Returns every option of the plugins in use, defaults included, and every key of the named retrievers, so
    that a saved run has them all. Raises UserError that names the key, and its origin from `origins`.
    """
    from srl.plugins import manager

    known, options = origins or {}, dict[KeyPath, Any]()
    in_use = list(plugins_in_use(config))
    for kind, name in in_use:
        with _origin(known, f"{kind}.name" if kind != "reward" else f"reward.weights.{name}"):
            manager.find(kind, name)
    given = [(kind, name) for kind in KINDS for name in getattr(config, kind).model_extra]
    for kind, name in dict.fromkeys([*in_use, *given]):
        with _origin(known, f"{kind}.{name}."):
            valid = _validated(kind, name, config)
        if valid is not None and (kind, name) in in_use:
            options |= dict(flat(valid.model_dump(mode="json"), (kind, name)))
    for name, named in config.search.retrievers.items():
        with _origin(known, f"search.retrievers.{name}."):
            keys = {**named.model_dump(), "options": _named_options(name, config)}
        options |= dict(flat(keys, ("search", "retrievers", name)))
    return options


def _named_options(name: str, config: Config) -> dict[str, Any]:
    """The options of a named retriever, with defaults if it is a live one that a run loads."""
    from srl.plugins import manager
    from srl.plugins.options import validated

    named = config.search.retrievers[name]
    if named.retriever is None or config.search.replays:
        return named.options
    manager.find("retriever", named.retriever)
    model = manager.options_model("retriever", named.retriever)
    if model is None and named.options:
        raise UserError(f"search.retrievers.{name}.options: the retriever {named.retriever!r} takes none")
    where = f"search.retrievers.{name}.options"
    return validated(where, model, named.options).model_dump(mode="json") if model else {}


@contextmanager
def _origin(origins: Mapping[str, str], start: str) -> Iterator[None]:
    """Prefix a UserError with the origin of its key: the key it names, or one that begins with `start`."""
    try:
        yield
    except UserError as error:
        below = {key: origin for key, origin in origins.items() if key.startswith(start)}
        found = [origin for key, origin in below.items() if key in str(error)] or list(below.values())
        raise UserError(f"{found[0]}: {error}" if found else str(error)) from error


def _validated(kind: str, name: str, config: Config) -> Any:
    """The plugin's options as its own model; None for a plugin without options."""
    from srl.plugins import manager
    from srl.plugins.options import validated

    model = manager.options_model(kind, name)
    given = getattr(config, kind).options(name)
    if model is None and given:
        raise UserError(f"the {kind} {name!r} takes no options; remove {', '.join(map(repr, given))}")
    return model and validated(f"{kind}.{name}", model, given)


_AT_MOST = (
    ("rollout.max_turn_tokens", "data.max_response_length"),
    ("rollout.min_answer_tokens", "rollout.max_turn_tokens"),
)
"""Pairs of keys; the first must not exceed the second."""
_LOWER_ONE = "lower the first or raise the second"


def cross_check(config: Config, origins: Mapping[str, str], algorithm: Algorithm) -> list[str]:
    """Warnings about settings that are probably mistakes. Raises UserError for contradictions."""

    def say(key: str) -> str:
        return f"{key} = {plain(value_of(config, key))} ({origins.get(key, 'default')})"

    for key, values in algorithm.requires.items():
        if value_of(config, key) not in values:
            wanted = " or ".join(f"{key}={plain(value)}" for value in values)
            raise UserError(f"algorithm.name = {algorithm.name} needs {wanted}, not {say(key)}")
    for who in ("actor", "critic") if algorithm.needs_critic else ("actor",):
        _check_mini_batch(config, f"{who}.ppo_mini_batch_size", say)
    for small, large in _AT_MOST:
        if value_of(config, small) > value_of(config, large):
            raise UserError(f"{say(small)} must not exceed {say(large)}; {_LOWER_ONE}")
    if config.rollout.deterministic and config.rollout.engine not in ("auto", "torch"):
        raise UserError(
            f"{say('rollout.deterministic')} needs the torch engine, not {say('rollout.engine')}: "
            "no other repeats a run; set rollout.engine=torch or rollout.deterministic=false"
        )
    if config.algorithm.filter_groups.enable and config.rollout.n < 2:
        raise UserError(
            f"{say('algorithm.filter_groups.enable')} compares the episodes of one question, and "
            f"{say('rollout.n')}: set rollout.n=5, or algorithm.filter_groups.enable=false"
        )
    buffer, longest = config.reward.overlong_buffer, config.data.max_response_length
    if buffer.enable and buffer.len > longest:
        raise UserError(
            f"{say('reward.overlong_buffer.len')} must not exceed {say('data.max_response_length')}; "
            f"{_LOWER_ONE}"
        )
    _check_rejection(config)
    _check_openai(config)
    _check_rewards(config, say)
    _check_urls("search.url", config.search.url or ())
    if config.search.url and config.search.index:
        raise UserError(f"give one of {say('search.url')} and {say('search.index')}; set the other to null")
    for name, named in config.search.retrievers.items():
        _check_named(name, named)
    _check_splits(config)
    return list(_warnings(config, algorithm))


def check_training(config: Config, kind: str) -> None:
    """Raises UserError for what a training run of this `kind` (rl, sft or rft) cannot do."""
    sft = config.sft
    if kind in ("sft", "rft") and sft.steps == 0:
        raise UserError("nothing to fine-tune: sft.steps = 0; set it to the optimiser steps")
    if kind == "rft" and sft.mix:
        raise UserError(
            "sft.mix is not for --algo rft; data.mix gives shares of the questions, sft.filter chooses"
        )
    if kind == "sft" and sft.patience and not config.trainer.test_freq:
        raise UserError("sft.patience counts validations, and there are none: trainer.test_freq = 0")
    if (examples := config.data.examples) is not None:
        if not takes_examples(config):
            raise UserError(f"data.examples = {examples} would not be used: {NO_EXAMPLES}")
        read_examples(examples)


def _check_mini_batch(config: Config, key: str, say: Callable[[str], str]) -> None:
    """A mini-batch below the batch divides it. `say` names a key with its value and origin."""
    size, batch = value_of(config, key), config.data.train_batch_size
    if size < batch and batch % size:
        fits = max(part for part in range(1, size) if batch % part == 0)
        raise UserError(f"{say(key)} must divide {say('data.train_batch_size')}; set {key}={fits}")


def _check_rejection(config: Config) -> None:
    """Every rejection has its bounds."""
    section, key = config.algorithm.rollout_correction, "algorithm.rollout_correction.rollout_rs"
    with parsing(f"{key} = {section.rollout_rs} and {key}_threshold = {section.rollout_rs_threshold}"):
        section.rejections  # noqa: B018


def _check_openai(config: Config) -> None:
    """An engine behind a server has a URL, without secrets in it."""
    url, key = config.rollout.openai.url, "rollout.openai.url"
    if url is None:
        if config.rollout.engine == "openai":
            raise UserError(f"rollout.engine = openai needs a server: --set {key}=http://HOST:PORT/v1")
        return
    refuse_credentials(key, url, config.rollout.openai.key_variable or "OPENAI_API_KEY")
    if not re.fullmatch(r"https?://[^/]+(/.*)?", url):
        raise UserError(f"{key} = {quoted(url, 80)} is not a URL; expected http://HOST:PORT/v1")


def _check_rewards(config: Config, say: Callable[[str], str]) -> None:
    """What is compared of an episode is a part of the reward, and no URL has secrets."""
    weights, overlong = config.reward.weights, config.reward.overlong_buffer.enable
    known = ["reward", *weights, *(["overlong"] if overlong else [])]
    groups, key = config.algorithm.filter_groups, "algorithm.filter_groups.metric"
    if groups.enable and not any(f"{groups.metric}/".startswith(f"{name}/") for name in known):
        raise UserError(f"{say(key)} is no part of the reward; use one of {', '.join(known)}")
    for name in weights:
        options = config.reward.options(name)
        if isinstance(url := options.get("url"), str):
            refuse_credentials(f"reward.{name}.url", url, options.get("key_variable") or "OPENAI_API_KEY")


def _check_urls(key: str, urls: Sequence[str]) -> None:
    for url in urls:
        refuse_credentials(key, url)


_SOURCES = ("url", "index", "retriever")
_NAME = re.compile(r"[a-z0-9_-]+")


def _check_named(name: str, named: NamedRetriever) -> None:
    """The name is one that the policy can write, and exactly one source is given."""
    key = f"search.retrievers.{name}"
    if not _NAME.fullmatch(name):
        raise UserError(f"{key}: expected a name of a-z, 0-9, - and _, such as web")
    given = [source for source in _SOURCES if getattr(named, source) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise UserError(f"{key} has {found} of url, index and retriever; give one: --set {key}.url=URL")
    if named.url and named.options:
        raise UserError(f"{key}.options are for an index or a live retriever; the server has its own")
    _check_urls(f"{key}.url", named.url or ())


def _check_splits(config: Config) -> None:
    """Validation must not use test questions: it chooses the checkpoint."""
    tested = {os.path.realpath(file) for file in config.data.test_files or ()}
    shared = [file for file in config.data.val_files or () if os.path.realpath(file) in tested]
    if shared:
        names = ", ".join(sorted(shared))
        raise UserError(f"data.val_files and data.test_files share {names}: validate on other questions")


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
