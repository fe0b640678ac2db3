"""The composed configuration checked before anything starts: by verl itself, and for what it finds out late.

An error names our key. verl leaves to its workers whether a mini-batch divides among them, whether
they divide among the copies that generate, and whether the model reads an episode; here they come first.
"""

from __future__ import annotations

import contextlib
import io
import os
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from math import gcd
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.config.checks import algorithm_plugin
from srl.errors import UserError
from srl.train.verl.job import Job
from srl.train.verl.overrides import given, replaced
from srl.train.verl.setting import MODEL, Setting, is_megatron, longest, model_sizes, precision
from srl.train.verl.translate import compose, settings
from srl.train.verl.without_gpu.vllm_cpu import refused_heads

if TYPE_CHECKING:
    from omegaconf import DictConfig


def validated(config: Config, job: Job) -> DictConfig:
    """The composed configuration that verl accepts. Raises UserError with our key and verl's words."""
    composed = compose(config, job)
    problem = next(problems(composed, config), None)
    if problem is not None:
        raise UserError(problem)
    _check_with_verl(composed, config, settings(config, job))
    return composed


def refused(config: Config) -> Iterator[str]:
    """What no run on verl does, wherever it runs."""
    mode, file = config.search.cassette_use or ("", "")
    if mode == "record" and config.rollout.search:
        yield (
            f"search.cassette=record {file}: --backend verl runs episodes in several processes and records "
            "no cassette; record with --backend local and replay it here, or leave search.cassette out"
        )


def notes(config: Config, job: Job) -> list[str]:
    """What a user may not expect of this backend, a line each."""
    return [*_notes(config, job), *replaced(config, settings(config, job))]


def _notes(config: Config, job: Job) -> Iterator[str]:
    critic = algorithm_plugin(config.algorithm.name).needs_critic
    for who in ("actor", "critic") if critic else ("actor",):
        section = getattr(config, who)
        if section.ppo_max_token_len < longest(config):
            yield (
                f"{who}.ppo_max_token_len = {section.ppo_max_token_len:,} is less than an episode may have: "
                f"{longest(config):,} is used, for verl ends a run at an episode above its limit"
            )
        if is_megatron(config) and (section.optim.lr_warmup_steps or section.optim.lr_warmup_steps_ratio):
            yield f"{who}.optim: Megatron's warm-up begins with a rate of 0, so step 1 changes nothing"
    number = precision(config, job)
    if number != "float32":
        yield f"passes are in {number}; the weights that are trained are float32, as verl keeps them"


def problems(composed: DictConfig, config: Config) -> Iterator[str]:
    """What a worker of verl would stumble over, each with the keys of ours that would have to change."""
    yield from refused(config)
    workers = composed.trainer.nnodes * composed.trainer.n_gpus_per_node
    if composed.trainer.nnodes > 1 and config.cluster.address is None and "RAY_ADDRESS" not in os.environ:
        yield (
            f"cluster.nnodes = {composed.trainer.nnodes}: several machines need a Ray cluster that is there; "
            "start one with `ray start` on each and set cluster.address=auto"
        )
    yield from _batches(composed, config, workers)
    yield from _copies(composed, workers)
    yield from _model(composed, config)


def _batches(composed: DictConfig, config: Config, workers: int) -> Iterator[str]:
    """A mini-batch of episodes must divide evenly among the workers that take different data."""
    n = composed.actor_rollout_ref.rollout.n
    for who, section in _trained(composed):
        size, ranks = section.ppo_mini_batch_size, _data_ranks(section, workers)
        if ranks == 0 or workers % ranks:
            yield f"{workers} workers do not divide by the sizes of the model's parallel parts"
        elif size * n % ranks:
            yield (
                f"{who}.ppo_mini_batch_size = {size} questions × rollout.n = {n} do not divide among {ranks} "
                f"workers; {_what_divides(config.data.train_batch_size, size, n, ranks)}"
            )


def _trained(composed: DictConfig) -> Iterator[tuple[str, Any]]:
    yield "actor", composed.actor_rollout_ref.actor
    if composed.critic.enable:
        yield "critic", composed.critic


def _data_ranks(section: Any, workers: int) -> int:
    """How many workers get different rows; the others of a group share one copy of the network."""
    if section.strategy == "megatron":
        engine = section.megatron
        shared = (
            engine.tensor_model_parallel_size
            * engine.pipeline_model_parallel_size
            * engine.context_parallel_size
        )
    else:
        shared = section.get("ulysses_sequence_parallel_size", 1)
    return workers // shared


def _what_divides(batch: int, size: int, n: int, ranks: int) -> str:
    """The sizes of a mini-batch near `size` that would do, or of a whole batch where none does."""
    fitting = [d for d in range(1, batch + 1) if batch % d == 0 and d * n % ranks == 0]
    if not fitting:
        return f"data.train_batch_size = {batch} would have to be a multiple of {ranks // gcd(n, ranks)}"
    return f"{min(fitting, key=lambda d: abs(d - size))} questions do"


def _copies(composed: DictConfig, workers: int) -> Iterator[str]:
    """Whole copies of the model that generate, each on so many GPUs."""
    size, node = (
        composed.actor_rollout_ref.rollout.tensor_model_parallel_size,
        composed.trainer.n_gpus_per_node,
    )
    if workers % size:
        yield (
            f"cluster.tensor_model_parallel_size = {size} does not divide the {workers} GPUs "
            "(cluster.nnodes × cluster.n_gpus_per_node)"
        )
    elif size > node and size % node:
        yield (
            f"cluster.tensor_model_parallel_size = {size} is no multiple of the {node} GPUs of a machine "
            "(cluster.n_gpus_per_node)"
        )


def _model(composed: DictConfig, config: Config) -> Iterator[str]:
    """What the model's own sizes forbid, where its `config.json` is here to be read."""
    sizes = model_sizes(composed.actor_rollout_ref.model.path)
    context, heads = sizes.get("max_position_embeddings"), sizes.get("num_attention_heads")
    size = composed.actor_rollout_ref.rollout.tensor_model_parallel_size
    if context is not None and longest(config) > context:
        yield (
            f"data.max_prompt_length + data.max_response_length = {longest(config):,} tokens, and this model "
            f"reads {context:,}: lower one of them"
        )
    if heads is not None and heads % size:
        yield f"cluster.tensor_model_parallel_size = {size} does not divide the model's {heads} heads"
    on_cpu = composed.trainer.device == "cpu" and composed.actor_rollout_ref.rollout.name == "vllm"
    if on_cpu and (why := refused_heads(sizes)):
        yield why


def _check_with_verl(composed: DictConfig, config: Config, known: dict[str, Setting]) -> None:
    """verl's own validation, which prints; what it raises becomes one line."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    checked = _without_files(composed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(checked, need_reference_policy(checked), need_critic(checked))
    except Exception as error:
        raise UserError(_in_our_words(error, config, known)) from error


def _without_files(composed: DictConfig) -> DictConfig:
    """A copy in which nothing has to be on this machine: verl would load the critic's model, and vLLM."""
    from copy import deepcopy

    from omegaconf import OmegaConf

    copy = deepcopy(composed)
    OmegaConf.update(copy, "critic.model", None, merge=False)
    if find_spec("vllm") is None:
        for rank in ("lora_rank", "lora.rank"):
            OmegaConf.update(copy, f"{MODEL}.{rank}", 0, merge=False)
    return copy


def _in_our_words(error: Exception, config: Config, known: dict[str, Setting]) -> str:
    """verl's message on one line, after the keys that it is about: those of the section `verl`, else ours."""
    inner = error.__cause__ or error
    text = " ".join(str(inner).split()) or _assertion(inner)
    direct = [f"verl.{key}" for key, _ in given(config) if _names(text, key)]
    ours = [setting.ours for key, setting in known.items() if setting.ours and _names(text, key)]
    named = ", ".join(dict.fromkeys(direct or ours))
    return f"{named or 'the configuration'}: verl refuses it: {text}"


def _assertion(error: BaseException) -> str:
    """The line of verl that an error without a message comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line if frames else None) or type(error).__name__


def _names(text: str, key: str) -> bool:
    """Whether verl's message speaks of `key`, by its last word; a short one only where it is quoted."""
    last = key.rpartition(".")[2]
    return last in text if "_" in last else f"'{last}'" in text or f".{last}" in text
