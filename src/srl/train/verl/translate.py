"""verl's configuration of a run: its defaults, then ours, then the section `verl`.

A key of ours that verl has too names it where it is declared (`Key.verl` in `srl.config.sections`). In
`_computed` is what another form or other keys decide. All other keys are read by our own code in verl's
processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin
from srl.config.keys import flat, keys, plain, value_of
from srl.config.sections import ACTOR, ROLLOUT, Model
from srl.errors import UserError, nearest
from srl.install import pip_install
from srl.train.learning_rate import Network, warmup_steps
from srl.train.verl.job import (
    TORCH,
    Job,
    Row,
    absolute,
    device_support,
    is_megatron,
    model_config,
    precision,
    rollout_name,
    tokens_per_pass,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

Rows = Iterator[Row]

REF, MODEL = "actor_rollout_ref.ref", "actor_rollout_ref.model"
FSDP_AND_MEGATRON = (
    (ACTOR, "fsdp_config", "megatron"),
    (REF, "fsdp_config", "megatron"),
    ("critic", "fsdp", "megatron"),
)
"""verl's section of each network, and the keys in it for FSDP and for Megatron."""
NOT_OF_MEGATRON = (
    f"{ACTOR}.fsdp_config.", f"{ACTOR}.strategy", f"{MODEL}.lora_", f"{MODEL}.target_modules",
    f"{ACTOR}.optim.lr_scheduler_type", "critic.optim.lr_scheduler_type",
)  # fmt: skip
"""What begins the names of keys that verl has under FSDP only."""
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NO_DUAL_CLIP = 1e9
"""A bound above every ratio, since verl requires one: it clamps log-ratios to 20, and e^20 = 4.9e8."""
VLLM_TOKENS = 8192
"""verl's default for the tokens of one pass of vLLM, which must be at least the number of sequences."""
CHECKED_WORKER = "srl.train.verl.vllm_delivery.CheckedWorker"
"""In place of verl's extension of vLLM's worker, with what checks its weights."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Gradient checkpointing under Megatron; verl reads its own key for it under FSDP only."""

FIXED: dict[str, Any] = {
    "data.train_files": ["train"],
    "data.val_files": ["val"],
    "data.shuffle": False,
    "data.validation_shuffle": False,
    "data.dataloader_num_workers": 0,
    f"{ROLLOUT}.do_sample": True,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.agent.default_agent_loop": "srl_search",
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    f"{ROLLOUT}.val_kwargs.n": 1,
    "trainer.logger": [],
    "trainer.v1.trainer_mode": "sync",
    "reward.num_workers": 0,
}
"""What is the same in every run: our data set yields the questions, our agent loop the episodes."""
OUR_OWN = {
    "data.custom_cls.path", "data.custom_cls.name", f"{ROLLOUT}.agent.default_agent_loop",
    f"{ROLLOUT}.calculate_log_probs", f"{ROLLOUT}.logprobs_mode", "critic.enable",
    "trainer.default_local_dir", "trainer.resume_mode", "trainer.use_v1", "trainer.v1.trainer_mode",
}  # fmt: skip
"""Keys that make verl run our code; they cannot be changed."""
CORRECTIONS = ("algorithm.rollout_correction", f"{ACTOR}.policy_loss.rollout_correction")
"""verl's sections with the names of ours, which our trainer reads in their place."""
OPEN = "ray_kwargs.ray_init."
"""A mapping that verl passes on unread, to `ray.init`."""
ADD = "+"
"""Prefix of a key that verl does not have, as in Hydra."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of verl's configuration; `ours` is the key it comes from, empty for a fixed value."""

    value: Any
    ours: str = ""


def settings(config: Config, job: Job) -> dict[str, Setting]:
    """verl's keys and their values for `config`, without those left at verl's defaults."""
    fixed = ((key, value, "") for key, value in FIXED.items())
    rows = (*_of_the_table(config), *fixed, *_computed(config, job))
    return {key: Setting(value, ours) for key, value, ours in rows}


def server_settings(config: Config, job: Job) -> dict[str, Setting]:
    """verl's keys and their values for rollout servers without a trainer, which load the weights."""
    merged = config.with_settings({"model.lora_rank": 0})
    loading = {"load_format": "auto", "free_cache_engine": False, "enable_sleep_mode": False}
    return (
        settings(merged, job)
        | {f"{ROLLOUT}.{name}": Setting(value) for name, value in loading.items()}
        | {f"{ROLLOUT}.nnodes": Setting(config.cluster.nnodes, "cluster.nnodes")}
    )


def _of_the_table(config: Config) -> Rows:
    """Each key of ours that names one of verl's, with its value there."""
    for key in keys():
        name, value = key.facts.verl, value_of(config, key.name) if key.facts.verl else None
        if not name or (key.name.startswith("critic.") and not needs_critic(config)):
            continue
        if is_megatron(config) and name.startswith(NOT_OF_MEGATRON):
            continue
        if key.name.startswith("model.lora_") and config.model.lora_rank == 0:
            continue
        yield (
            name,
            plain(value) if isinstance(value, tuple | dict) else key.facts.names.get(value, value),
            key.name,
        )


def _computed(config: Config, job: Job) -> Rows:
    """What verl has in another form, or takes from several keys of ours."""
    yield from _model(config, job, MODEL)
    yield from _rollout(config, job)
    yield "algorithm.adv_estimator", f"srl_{config.algorithm.name}", "algorithm.name"
    yield "critic.enable", needs_critic(config), "algorithm.name"
    yield from _network(config, "actor", ACTOR)
    yield from _clipping(config)
    if needs_critic(config):
        yield from _model(config, job, "critic.model")
        yield from _network(config, "critic", "critic")
        for name in ("forward_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu"):
            tokens = tokens_per_pass(config.critic.ppo_max_token_len, config)
            yield f"critic.{name}", tokens, "critic.ppo_max_token_len"
    yield from _trainer(config, job)
    for section, fsdp, megatron in networks(config):
        name = f"{section}.{megatron if is_megatron(config) else fsdp}"
        yield from _training_engine(config, job, name, trained=section != REF)
    yield from _ray(config, job)
    if support := device_support(job.cpu):
        yield from support.settings(config, job)


def needs_critic(config: Config) -> bool:
    return algorithm_plugin(config.algorithm.name).needs_critic


def networks(config: Config) -> tuple[tuple[str, str, str], ...]:
    """The run's networks, as in `FSDP_AND_MEGATRON`."""
    return FSDP_AND_MEGATRON if needs_critic(config) else FSDP_AND_MEGATRON[:2]


def _model(config: Config, job: Job, verl: str) -> Rows:
    """The policy; and the critic, which starts as a copy of it with a value head of zeros.

    Padding is removed with flash attention only: other implementations would need a mask of the squared
    length of all episodes together. Dropout is set to 0, since verl leaves it on in its updates. Adapters are
    merged into the weights for the torch rollout, which takes whole weights.
    """
    model, attention = config.model, _attention(config.model)
    yield f"{verl}.path", model.path and absolute(model.path), "model.path"
    yield f"{verl}.tokenizer_path", absolute(job.tokenizer), "model.tokenizer"
    yield f"{verl}.trust_remote_code", model.trust_remote_code, "model.trust_remote_code"
    checkpointing = model.gradient_checkpointing
    yield f"{verl}.enable_gradient_checkpointing", checkpointing, "model.gradient_checkpointing"
    yield f"{verl}.override_config.attn_implementation", attention, "model.attn_implementation"
    for name, rate in without_dropout(model_config(model.path)).items():
        yield f"{verl}.override_config.{name}", rate, ""
    unpadded = is_megatron(config) or "flash" in attention
    yield f"{verl}.use_remove_padding", unpadded, "model.attn_implementation"
    if model.lora_rank == 0 or verl != MODEL:
        return
    if is_megatron(config):
        yield f"{verl}.lora.rank", model.lora_rank, "model.lora_rank"
        yield f"{verl}.lora.alpha", model.lora_alpha, "model.lora_alpha"
    elif rollout_name(config, job) == TORCH:
        yield f"{verl}.lora.merge", True, "cluster.rollout"
    else:
        yield f"{ROLLOUT}.load_format", "safetensors", "model.lora_rank"


def _attention(model: Model) -> str:
    """What `model.attn_implementation` is; of auto as its class has it, or sdpa for a model elsewhere."""
    if model.attn_implementation != "auto":
        return model.attn_implementation
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = str(model_config(model.path).get("model_type"))
    if kind not in CONFIG_MAPPING:
        return "sdpa"
    made = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
    return "sdpa" if getattr(made, "_supports_sdpa", True) else "eager"


def without_dropout(sizes: dict[str, Any]) -> dict[str, Any]:
    """All dropout rates above 0 of a model's `config.json`, those of inner sections too, set to 0."""
    rates = {name for name, value in sizes.items() if "drop" in name and isinstance(value, int | float)}
    inner = {name: without_dropout(value) for name, value in sizes.items() if isinstance(value, dict)}
    return {name: 0.0 for name in sorted(rates) if sizes[name] > 0} | {k: v for k, v in inner.items() if v}


def _rollout(config: Config, job: Job) -> Rows:
    """The engine that generates, and how much it generates at once on each copy of the model."""
    engine, seqs = rollout_name(config, job), config.rollout.max_num_seqs
    yield f"{ROLLOUT}.name", engine, "cluster.rollout"
    yield f"{ROLLOUT}.dtype", precision(config, job), "model.dtype"
    yield f"{ROLLOUT}.max_model_len", config.data.max_episode_tokens, "data.max_response_length"
    yield f"{ROLLOUT}.max_num_batched_tokens", max(VLLM_TOKENS, seqs), "rollout.max_num_seqs"
    yield f"{ROLLOUT}.seed", config.trainer.seed, "trainer.seed"
    yield f"{ROLLOUT}.val_kwargs.do_sample", config.eval.temperature > 0, "eval.temperature"
    workers = config.cluster.agent_workers
    workers = min(workers, job.gpus_per_node) if job.cpu else workers
    yield f"{ROLLOUT}.agent.num_workers", workers, "cluster.agent_workers"
    tokenizer = absolute(job.tokenizer)
    if engine == "vllm":  # it looks for a tokenizer beside the model unless told
        yield f"{ROLLOUT}.engine_kwargs.vllm.tokenizer", tokenizer, "model.tokenizer"
        yield f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls", CHECKED_WORKER, ""
    if engine == "sglang":  # without a tokenizer it ignores stop strings
        yield f"{ROLLOUT}.skip_tokenizer_init", False, ""
        yield f"{ROLLOUT}.engine_kwargs.sglang.tokenizer_path", tokenizer, "model.tokenizer"


def _clipping(config: Config) -> Rows:
    """The loss of the policy and its clip ranges; verl takes one bound where it is told both."""
    actor = config.actor
    for name in ("clip_ratio_low", "clip_ratio_high"):
        if getattr(actor, name) is None:
            yield f"{ACTOR}.{name}", actor.clip_ratio, "actor.clip_ratio"
    yield f"{ACTOR}.clip_ratio_c", actor.clip_ratio_c or NO_DUAL_CLIP, "actor.clip_ratio_c"
    yield f"{ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode, "actor.policy_loss.loss_mode"


def _network(config: Config, who: Network, verl: str) -> Rows:
    """Mini-batches (counted in questions on both sides), passes, the aggregation of losses, and AdamW.

    Under FSDP the schedule of the learning rate is ours (`schedule.py`). Under Megatron verl passes AdamW's
    betas on by the override only.
    """
    section = getattr(config, who)
    optim = section.optim
    mini = min(section.ppo_mini_batch_size, config.data.train_batch_size)
    tokens = tokens_per_pass(section.ppo_max_token_len, config)
    kind, asked = optim.lr_scheduler_type, "" if optim.lr_warmup_steps else "_ratio"
    yield f"{verl}.ppo_mini_batch_size", mini, f"{who}.ppo_mini_batch_size"
    yield f"{verl}.ppo_max_token_len_per_gpu", tokens, f"{who}.ppo_max_token_len"
    yield f"{verl}.use_dynamic_bsz", True, ""
    yield f"{verl}.shuffle", False, ""
    yield f"{verl}.data_loader_seed", config.trainer.seed, "trainer.seed"
    scale = config.data.max_response_length if section.loss_agg_mode == "constant" else None
    yield f"{verl}.loss_scale_factor", scale, "data.max_response_length"
    yield f"{verl}.optim.lr_warmup_steps", warmup_steps(config, who), f"{who}.optim.lr_warmup_steps{asked}"
    yield f"{verl}.optim.lr_warmup_steps_ratio", 0.0, f"{who}.optim.lr_warmup_steps_ratio"
    if is_megatron(config):
        adam = {"adam_beta1": optim.betas[0], "adam_beta2": optim.betas[1], "adam_eps": 1e-8}
        yield f"{verl}.optim.override_optimizer_config", adam, f"{who}.optim.betas"
        yield f"{verl}.optim.lr_decay_style", kind, f"{who}.optim.lr_scheduler_type"
    else:
        yield f"{verl}.optim.lr_scheduler_type", verl_scheduler_type(kind), f"{who}.optim.lr_scheduler_type"


def verl_scheduler_type(kind: str) -> str:
    """The schedule's name in verl's configuration. verl refuses `linear`; under FSDP the schedule is ours."""
    return "constant" if kind == "linear" else kind


def _trainer(config: Config, job: Job) -> Rows:
    """verl's actor learns from step `critic_warmup` on, ours from the step after it."""
    trainer, total = config.trainer, max(1, config.trainer.total_training_steps)
    yield "trainer.total_epochs", total, "trainer.total_training_steps"
    yield "trainer.save_freq", trainer.save_freq or total, "trainer.save_freq"
    yield "trainer.critic_warmup", trainer.critic_warmup + 1, "trainer.critic_warmup"
    yield "trainer.experiment_name", job.run.name, ""
    yield "trainer.default_local_dir", absolute(job.checkpoints), ""
    yield "trainer.resume_mode", "auto" if job.resume else "disable", ""
    yield "trainer.n_gpus_per_node", job.gpus_per_node, "cluster.n_gpus_per_node"
    yield "trainer.device", "cpu" if job.cpu else "cuda", "model.device"
    yield "data.trust_remote_code", config.model.trust_remote_code, "model.trust_remote_code"
    if needs_critic(config) and not is_megatron(config):
        yield "critic.strategy", config.cluster.strategy, "cluster.strategy"


def _training_engine(config: Config, job: Job, verl: str, *, trained: bool) -> Rows:
    """Sharding, offload, precision and seed of one network; the reference is not `trained`."""
    dtype = precision(config, job)
    yield f"{verl}.seed", config.trainer.seed, "trainer.seed"
    yield f"{verl}.param_offload", config.cluster.param_offload, "cluster.param_offload"
    if trained:
        yield f"{verl}.optimizer_offload", config.cluster.optimizer_offload, "cluster.optimizer_offload"
    yield f"{verl}.dtype", dtype, "model.dtype"
    if not is_megatron(config):
        mixed = {"param_dtype": SHORT_DTYPES[dtype], "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        yield f"{verl}.mixed_precision", mixed, "model.dtype"
    elif config.model.gradient_checkpointing and trained:
        for name, value in RECOMPUTE.items():
            yield f"{verl}.override_transformer_config.{name}", value, "model.gradient_checkpointing"


def _ray(config: Config, job: Job) -> Rows:
    """Ray counts the GPUs of a cluster that it starts; an existing cluster knows its own."""
    verl, threads = "ray_kwargs.ray_init", config.trainer.threads
    if config.cluster.address is not None:
        yield f"{verl}.address", config.cluster.address, "cluster.address"
    else:
        yield f"{verl}.include_dashboard", False, ""
    if threads is not None:
        yield f"{verl}.runtime_env.env_vars", {"OMP_NUM_THREADS": str(threads)}, "trainer.threads"
        if rollout_name(config, job) == TORCH:
            yield f"{ROLLOUT}.engine_kwargs.srl_torch", {"threads": threads}, "trainer.threads"


# verl's own files, and the section `verl`


def composed(config: Config, rows: Mapping[str, Setting]) -> DictConfig:
    """verl's defaults, then `rows`, then the section `verl`.

    Raises UserError for a key in it that verl does not have, and for one that our code sets or replaces.
    """
    from omegaconf import OmegaConf

    pristine = _read_defaults(is_megatron(config))
    whole = deepcopy(pristine)
    for key, setting in rows.items():
        OmegaConf.update(whole, key, setting.value, merge=False, force_add=True)
    for key, value in given(config):
        name = key.removeprefix(ADD)
        _check_free(name, value)
        if not key.startswith((ADD, OPEN)):
            _check_known(whole if _has(whole, name) else pristine, name, value)
        OmegaConf.update(whole, name, value, merge=False, force_add=True)
    return whole


def given(config: Config) -> Iterator[tuple[str, Any]]:
    """`(verl's dotted key, value)` of the section `verl`."""
    for path, value in flat(config.verl):
        yield ".".join(path), plain(value)


@cache
def ours_of() -> dict[str, str]:
    """verl's names in the table, and our keys that have them."""
    return {key.facts.verl: key.name for key in keys() if key.facts.verl}


def _check_free(name: str, value: Any) -> None:
    """Raises UserError for a key of verl's that a key of ours has, or that makes verl run our code."""
    ours = ours_of().get(name)
    for section in CORRECTIONS:
        if name == section or name.startswith(f"{section}."):
            ours = CORRECTIONS[0]
    if ours:
        raise UserError(f"verl.{name} is a key of ours", key=f"verl.{name}", hint=f"set {ours} instead")
    if name in OUR_OWN or value == "bypass_mode":
        raise UserError(f"verl.{name} makes verl run srl's code, and cannot be changed", key=f"verl.{name}")


def _check_known(whole: DictConfig, key: str, value: Any) -> None:
    """Raises UserError for a key that verl does not have, and for a section that is set to a value."""
    from omegaconf import DictConfig, OmegaConf

    there = OmegaConf.select(whole, key, throw_on_missing=False) if _has(whole, key) else None
    if isinstance(there, DictConfig) and len(there) and not isinstance(value, Mapping):
        raise UserError(f"verl.{key} is a section, not a value", key=f"verl.{key}", hint="set a key in it")
    parent, _, name = key.rpartition(".")
    if not _has(whole, key) and not _is_open(whole, parent, name):
        tree: Any = OmegaConf.to_container(whole, resolve=False)
        near = nearest(key, [".".join(map(str, path)) for path, _ in flat(tree)])
        what = f"verl.{key}: verl has no key {key}{near}"
        raise UserError(what, key=f"verl.{key}", hint=f"to add one: verl.{ADD}{key}")


def _has(whole: DictConfig, key: str) -> bool:
    """Whether `key` exists, also with a missing value or null; interpolations are not followed."""
    from omegaconf import DictConfig

    node: Any = whole
    for name in key.split("."):
        if not isinstance(node, DictConfig) or name not in list(node):
            return False
        node = node._get_node(name)
    return True


def _is_open(whole: DictConfig, parent: str, name: str) -> bool:
    """Whether `name` may be added to `parent`: an empty mapping, or a section whose class has the field."""
    from dataclasses import fields, is_dataclass

    from hydra.utils import get_class
    from omegaconf import DictConfig, OmegaConf

    if not _has(whole, parent):
        above, _, last = parent.rpartition(".")
        return bool(above) and _is_open(whole, above, last)
    node = OmegaConf.select(whole, parent, throw_on_missing=False)
    if node is None or not isinstance(node, DictConfig) or len(node) == 0:
        return node is None or isinstance(node, DictConfig)
    target = node.get("_target_")
    made = get_class(target) if target else None
    return is_dataclass(made) and name in [field.name for field in fields(made)]


@cache
def _read_defaults(megatron: bool) -> DictConfig:
    """verl's own defaults, read from its YAML files; verl itself is not imported. Raises UserError."""
    spec = find_spec("verl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places or find_spec("hydra") is None:
        raise UserError(f"verl is not installed; type: {pip_install('verl')}")
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(places[0]) / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", ["model_engine=megatron"] if megatron else [])
