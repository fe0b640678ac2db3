"""verl's configuration of a run, checked before any process is started.

`compose` refuses what a run on verl cannot keep. `validated` adds what verl would only find out in its
workers (batch sizes, copies of the model, context length) and verl's own validation. `server_config` is for
rollout servers alone, and checks nothing that only training needs. Messages name our keys. The processes of a
running run are checked in `workers.py`.
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Iterable, Iterator
from copy import deepcopy
from importlib.util import find_spec
from math import gcd
from typing import TYPE_CHECKING, Any

import torch

from srl.config import Config
from srl.config.cross_checks import context_errors, truncation_errors
from srl.config.keys import keys, plain, value_of
from srl.config.unread import missing
from srl.errors import UserError
from srl.train.verl.job import (
    TORCH,
    Job,
    is_megatron,
    model_config,
    precision,
    rollout_name,
)
from srl.train.verl.translate import (
    MODEL,
    Setting,
    composed,
    given,
    needs_critic,
    server_settings,
    settings,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

REFUSED = {key.name: key for key in keys() if key.facts.refused}
"""Keys that must keep their default."""
OF_SERVERS = ("rollout.engine", "model.cast_lm_head_to_fp32")
"""Those among them that rollout servers read."""


def compose(config: Config, job: Job) -> DictConfig:
    """verl's configuration of a run: its defaults, then our settings, then the section `verl`.

    Raises UserError for a setting that verl cannot keep, and for a key that verl does not have.
    """
    check_supported(config, job)
    return composed(config, settings(config, job))


def server_config(config: Config, job: Job) -> DictConfig:
    """verl's configuration of rollout servers without a trainer, with all checks passed.

    Raises UserError, as `compose` and `validated` do.
    """
    _raise_first(_refused_keys(config, OF_SERVERS))
    _raise_first(_rollout(config, job))
    _raise_first(_device(config, job))
    whole = composed(config, server_settings(config, job))
    _raise_first(_machines(whole, config))
    _raise_first(_copies(whole, _workers(whole)))
    _raise_first(_model(whole, config))
    return whole


def validated(config: Config, job: Job) -> DictConfig:
    """`compose`, with all checks passed. Raises UserError with our key and verl's words."""
    whole = compose(config, job)
    _raise_first(problems(whole, config))
    _check_with_verl(whole, config, settings(config, job))
    return whole


def _raise_first(problems: Iterator[str]) -> None:
    for problem in problems:
        raise UserError(problem)


def notes(config: Config, job: Job) -> Iterator[str]:
    """What may surprise a user of this backend, one line each."""
    longest = config.data.max_episode_tokens
    for who in ("actor", "critic") if needs_critic(config) else ("actor",):
        section = getattr(config, who)
        if section.ppo_max_token_len < longest:
            yield (
                f"{who}.ppo_max_token_len = {section.ppo_max_token_len:,} is less than the longest episode; "
                f"{longest:,} is used, since verl fails on an episode above its limit"
            )
        if is_megatron(config) and (section.optim.lr_warmup_steps or section.optim.lr_warmup_steps_ratio):
            yield f"{who}.optim: Megatron's warm-up starts at a rate of 0, so step 1 changes nothing"
    dtype = precision(config, job)
    if dtype != "float32":
        yield f"passes are computed in {dtype}; verl keeps the trained weights in float32"


def check_supported(config: Config, job: Job) -> None:
    """Raises UserError for the first setting that this backend cannot keep, with what to set instead."""
    _raise_first(_unsupported(config, job))


def _unsupported(config: Config, job: Job) -> Iterator[str]:
    yield from _refused_keys(config, REFUSED)
    if config.trainer.total_training_steps == 0:
        yield (
            "trainer.total_training_steps = 0: training with --backend verl takes at least one step; "
            "`srl eval run --backend verl` evaluates without training"
        )
    if is_megatron(config) and config.model.lora_rank and config.model.lora_target_modules != "all-linear":
        yield (
            "model.lora_target_modules: Megatron has other names for modules; set all-linear here and verl's "
            "own key verl.actor_rollout_ref.model.lora.target_modules"
        )
    yield from _rollout(config, job)
    yield from truncation_errors(config, rollout_name(config, job))
    yield from _device(config, job)
    if is_megatron(config) and job.cpu:
        yield "cluster.strategy = megatron needs GPUs, and there are none; set fsdp2"
    if is_megatron(config) and precision(config, job) == "float32":
        yield "model.dtype = float32: Megatron trains in bfloat16 or float16; set one of them"


def _refused_keys(config: Config, names: Iterable[str]) -> Iterator[str]:
    """The keys that verl cannot keep, where they have an effect and not their default."""
    for name in names:
        key, value = REFUSED[name], value_of(config, name)
        void = missing(config, name) or (name == "ref.path" and not config.needs_reference)
        if value != key.default and not void:
            yield (
                f"{name} = {plain(value)} is not supported with --backend verl, since {key.facts.refused}; "
                f"leave it at {plain(key.default)}, or leave out --backend verl"
            )


def _rollout(config: Config, job: Job) -> Iterator[str]:
    """Which rollout engine runs on which kind of machine."""
    chosen, size = rollout_name(config, job), config.cluster.tensor_model_parallel_size
    if chosen == TORCH and not job.cpu:
        yield "cluster.rollout = torch is for machines without a GPU; set vllm or sglang"
    if chosen == "sglang" and job.cpu:
        yield "cluster.rollout = sglang needs a GPU, and there is none; set torch or vllm"
    if chosen == TORCH and size > 1:
        yield (
            f"cluster.tensor_model_parallel_size = {size}: the torch rollout keeps a whole copy of the model "
            "in each worker; set 1"
        )
    if chosen == TORCH and precision(config, job) == "float16":
        yield "model.dtype = float16: the torch rollout has float32 and bfloat16"


def _device(config: Config, job: Job) -> Iterator[str]:
    """Where the run may be: the workers use all visible GPUs, or none."""
    device = config.model.device
    if ":" in device:
        yield (
            f"model.device = {device}: with --backend verl the workers use all visible GPUs; set auto, and "
            "CUDA_VISIBLE_DEVICES to choose some"
        )
    if device == "cuda" and job.cpu:
        yield "model.device = cuda, and this machine has no GPU; set auto"


def refused(config: Config) -> Iterator[str]:
    """What no run on verl does, whatever it runs on."""
    mode, file = config.search.cassette_use or ("", "")
    if mode == "record" and config.rollout.search:
        yield (
            f"search.cassette=record {file}: --backend verl runs episodes in several processes and cannot "
            "record a cassette; record with --backend local and replay it here, or leave search.cassette out"
        )
    for name in config.reward.weights:
        device = str(config.reward.options(name).get("device", ""))
        if device.startswith("cuda"):
            yield (
                f"reward.{name}.device = {device}: --backend verl scores in processes without a GPU; "
                f"set reward.{name}.device=cpu"
            )


def problems(whole: DictConfig, config: Config) -> Iterator[str]:
    """What one of verl's workers would fail on, with the keys of ours to change."""
    yield from refused(config)
    yield from _machines(whole, config)
    workers = _workers(whole)
    yield from _batches(whole, config, workers)
    yield from _copies(whole, workers)
    yield from _model(whole, config)


def _workers(whole: DictConfig) -> int:
    """How many GPUs the run uses, or workers in their place."""
    return int(whole.trainer.nnodes * whole.trainer.n_gpus_per_node)


def _machines(whole: DictConfig, config: Config) -> Iterator[str]:
    """Several machines need a Ray cluster that is running; without an address a run starts its own, with the
    GPUs that are here."""
    if whole.trainer.nnodes > 1 and config.cluster.address is None:
        yield (
            f"cluster.nnodes = {whole.trainer.nnodes}: several machines need an existing Ray cluster; "
            "run `ray start` on each and set cluster.address=auto"
        )
    here, wanted = torch.cuda.device_count(), whole.trainer.n_gpus_per_node
    if whole.trainer.device != "cpu" and config.cluster.address is None and 0 < here < wanted:
        yield (
            f"cluster.n_gpus_per_node = {wanted}: this machine has {here} GPU{'s' if here > 1 else ''}; "
            f"set cluster.n_gpus_per_node={here}"
        )


def _batches(whole: DictConfig, config: Config, workers: int) -> Iterator[str]:
    """A mini-batch of episodes must divide evenly among the workers that take different data."""
    n = whole.actor_rollout_ref.rollout.n
    trained = [("actor", whole.actor_rollout_ref.actor)]
    trained += [("critic", whole.critic)] if whole.critic.enable else []
    for who, section in trained:
        size, ranks = section.ppo_mini_batch_size, _data_ranks(section, workers)
        if ranks == 0 or workers % ranks:
            yield f"{workers} workers are not divisible by the sizes of the model's parallel parts"
        elif size * n % ranks:
            yield (
                f"{who}.ppo_mini_batch_size = {size} questions × rollout.n = {n} is not divisible by {ranks} "
                f"workers; {_what_divides(config.data.train_batch_size, size, n, ranks)}"
            )


def _data_ranks(section: Any, workers: int) -> int:
    """How many workers take different rows; groups of the others share one copy of the network."""
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
    """The possible mini-batch size nearest to `size`, or the batch size needed if there is none."""
    fitting = [d for d in range(1, batch + 1) if batch % d == 0 and d * n % ranks == 0]
    if not fitting:
        return f"data.train_batch_size = {batch} must be a multiple of {ranks // gcd(n, ranks)}"
    return f"{min(fitting, key=lambda d: abs(d - size))} questions work"


def _copies(whole: DictConfig, workers: int) -> Iterator[str]:
    """Whole copies of the model generate, each on `tensor_model_parallel_size` GPUs."""
    size = whole.actor_rollout_ref.rollout.tensor_model_parallel_size
    node = whole.trainer.n_gpus_per_node
    if workers % size:
        yield (
            f"cluster.tensor_model_parallel_size = {size} does not divide the {workers} GPUs "
            "(cluster.nnodes × cluster.n_gpus_per_node)"
        )
    elif size > node and size % node:
        yield (
            f"cluster.tensor_model_parallel_size = {size} is not a multiple of the {node} GPUs of a machine "
            "(cluster.n_gpus_per_node)"
        )


def _model(whole: DictConfig, config: Config) -> Iterator[str]:
    """What the model's `config.json` does not allow, if it is on this machine."""
    sizes = model_config(whole.actor_rollout_ref.model.path)
    context, heads = sizes.get("max_position_embeddings"), sizes.get("num_attention_heads")
    rollout = whole.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    yield from context_errors(config, context)
    if heads is not None and heads % size:
        yield f"cluster.tensor_model_parallel_size = {size} does not divide the model's {heads} heads"


def _check_with_verl(whole: DictConfig, config: Config, known: dict[str, Setting]) -> None:
    """verl's own validation, whose output is dropped and whose errors become one line."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    checked = _without_files(whole)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(checked, need_reference_policy(checked), need_critic(checked))
    except Exception as error:
        raise UserError(_in_our_words(error, config, known)) from error


def _without_files(whole: DictConfig) -> DictConfig:
    """A copy for which verl loads nothing: it would read the critic's model, and import vLLM for LoRA."""
    from omegaconf import OmegaConf

    copy = deepcopy(whole)
    OmegaConf.update(copy, "critic.model", None, merge=False)
    if find_spec("vllm") is None:
        for rank in ("lora_rank", "lora.rank"):
            OmegaConf.update(copy, f"{MODEL}.{rank}", 0, merge=False)
    return copy


def _in_our_words(error: Exception, config: Config, known: dict[str, Setting]) -> str:
    """verl's message on one line, after the keys it is about: those under `verl` if any, else ours."""
    inner = error.__cause__ or error
    text = " ".join(str(inner).split()) or _assertion(inner)
    direct = [f"verl.{key}" for key, _ in given(config) if _names(text, key)]
    ours = [setting.ours for key, setting in known.items() if setting.ours and _names(text, key)]
    named = ", ".join(dict.fromkeys(direct or ours))
    return f"{named or 'the configuration'}: refused by verl: {text}"


def _assertion(error: BaseException) -> str:
    """The line of verl's code that raised an error without a message."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line if frames else None) or type(error).__name__


def _names(text: str, key: str) -> bool:
    """Whether verl's message names the last part of `key`; a single word counts only if quoted."""
    last = key.rpartition(".")[2]
    return last in text if "_" in last else f"'{last}'" in text or f".{last}" in text
