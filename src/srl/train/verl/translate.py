"""verl's configuration of a run: its defaults, then ours, then the section `verl`.

A key of ours that verl has too names it where it is declared (`Key.verl` in `srl.config.sections`). What
another form or other keys decide is below `settings`. All other keys are read by our own code in verl's
processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin
from srl.config.keys import flat, keys, plain, value_of
from srl.config.sections import ACTOR, ROLLOUT, Model
from srl.errors import UserError
from srl.install import pip_install
from srl.train.learning_rate import Network, warmup_steps
from srl.train.verl.job import (
    LOOP,
    TORCH,
    Job,
    Settings,
    absolute,
    device_support,
    model_config,
    precision,
    rollout_name,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

REF, MODEL = "actor_rollout_ref.ref", "actor_rollout_ref.model"
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NO_DUAL_CLIP = 1e9
"""A bound above every ratio, since verl requires one: it clamps log-ratios to 20, and e^20 = 4.9e8."""
CHECKED_WORKER = "srl.train.verl.vllm_delivery.CheckedWorker"
"""In place of verl's extension of vLLM's worker, with what checks its weights."""

FIXED: Settings = {
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.agent.default_agent_loop": LOOP,
    "trainer.logger": [],
    "trainer.v1.trainer_mode": "sync",
    "reward.num_workers": 0,
}
"""What is the same in every run: the episodes are our agent loop's, the log is ours."""
OUR_OWN = (
    *FIXED, f"{ROLLOUT}.logprobs_mode", "critic.enable", "trainer.default_local_dir", "trainer.resume_mode",
    "algorithm.rollout_correction", f"{ACTOR}.policy_loss.rollout_correction",
)  # fmt: skip
"""Keys and sections that the section `verl` cannot change: our code sets them, or reads ours instead."""
ADD = "+"
"""Prefix of a key that verl's YAML files do not have, as in Hydra."""


def settings(config: Config, job: Job) -> Settings:
    """verl's keys and their values for `config`, without those left at verl's defaults."""
    trainer, cluster, ray = config.trainer, config.cluster, "ray_kwargs.ray_init"
    critic, total = needs_critic(config), max(1, config.trainer.total_training_steps)
    values = {
        **_of_the_table(config), **FIXED,
        "algorithm.adv_estimator": f"srl_{config.algorithm.name}",  # a name: the trainer estimates itself
        "critic.enable": critic,
        "trainer.total_epochs": total,
        "trainer.save_freq": trainer.save_freq or total,
        "trainer.critic_warmup": trainer.critic_warmup + 1,  # verl's actor learns in that step, ours after it
        "trainer.default_local_dir": absolute(job.checkpoints),
        "trainer.resume_mode": "auto" if job.resume else "disable",
        "trainer.n_gpus_per_node": job.gpus_per_node,
        "trainer.device": "cpu" if job.cpu else "cuda",
        f"{ACTOR}.strategy": "fsdp2",
        **_model(config, job, MODEL), **_rollout(config, job), **_actor(config), **_engine(config, job, REF),
        **_network(config, job, "actor", ACTOR),
    }  # fmt: skip
    if critic:
        values |= _model(config, job, "critic.model") | _network(config, job, "critic", "critic")
        values["critic.strategy"] = "fsdp2"
    # Ray counts the GPUs of a cluster that it starts; an existing cluster knows its own.
    values |= {f"{ray}.address": cluster.address} if cluster.address else {f"{ray}.include_dashboard": False}
    if trainer.threads is not None:
        values[f"{ray}.runtime_env.env_vars"] = {"OMP_NUM_THREADS": str(trainer.threads)}
    support = device_support(job.cpu)
    return values | support.settings(config, job) if support else values


def needs_critic(config: Config) -> bool:
    return algorithm_plugin(config.algorithm.name).needs_critic


def _below(section: str, values: Settings) -> Settings:
    return {f"{section}.{name}": value for name, value in values.items()}


def _of_the_table(config: Config) -> Settings:
    """Each key of ours that names one of verl's, with its value there."""
    values: Settings = {}
    for key in keys():
        name = key.facts.verl
        if not name or (key.name.startswith("critic.") and not needs_critic(config)):
            continue
        if key.name.startswith("model.lora_") and config.model.lora_rank == 0:
            continue
        value = value_of(config, key.name)
        values[name] = plain(value) if isinstance(value, tuple | dict) else key.facts.names.get(value, value)
    return values


def _model(config: Config, job: Job, verl: str) -> Settings:
    """The policy; and the critic, which starts as a copy of it with a value head of zeros.

    Padding is removed with flash attention only: other implementations would need a mask of the squared
    length of all episodes together. Dropout is set to 0, since verl leaves it on in its updates. Adapters are
    merged into the weights for the torch rollout, which takes whole weights.
    """
    model, attention = config.model, _attention(config.model)
    dropout = without_dropout(model_config(model.path))
    values = _below(verl, {
        "path": model.path and absolute(model.path), "tokenizer_path": absolute(job.tokenizer),
        "trust_remote_code": model.trust_remote_code,
        "enable_gradient_checkpointing": model.gradient_checkpointing,
        "override_config.attn_implementation": attention, **_below("override_config", dropout),
        "use_remove_padding": "flash" in attention,
    })  # fmt: skip
    if model.lora_rank == 0 or verl != MODEL:
        return values
    if rollout_name(config, job) == TORCH:
        return values | {f"{verl}.lora.merge": True}
    return values | {f"{ROLLOUT}.load_format": "safetensors"}


def _attention(model: Model) -> str:
    """What `model.attn_implementation` is; of auto as its class has it, or sdpa for a model elsewhere."""
    if model.attn_implementation != "auto":
        return model.attn_implementation
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = str(model_config(model.path).get("model_type"))
    if kind not in CONFIG_MAPPING:
        return "sdpa"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[kind], None)
    return "sdpa" if getattr(model_class, "_supports_sdpa", True) else "eager"


def without_dropout(sizes: dict[str, Any]) -> dict[str, Any]:
    """All dropout rates above 0 of a model's `config.json`, those of inner sections too, set to 0."""
    rates = {name for name, value in sizes.items() if "drop" in name and isinstance(value, int | float)}
    inner = {name: without_dropout(value) for name, value in sizes.items() if isinstance(value, dict)}
    return {name: 0.0 for name in sorted(rates) if sizes[name] > 0} | {k: v for k, v in inner.items() if v}


def _rollout(config: Config, job: Job) -> Settings:
    """The engine that generates, and how much it generates at once on each copy of the model."""
    engine = rollout_name(config, job)
    values: Settings = {
        "name": engine,
        "dtype": precision(config, job),
        "max_model_len": config.data.max_episode_tokens,
        "seed": config.trainer.seed,
    }
    if job.cpu:
        values["agent.num_workers"] = min(8, job.gpus_per_node)  # 8 is verl's
    if engine == "vllm":  # it looks for a tokenizer beside the model unless told
        values["engine_kwargs.vllm.tokenizer"] = absolute(job.tokenizer)
        values["engine_kwargs.vllm.worker_extension_cls"] = CHECKED_WORKER
    if engine == "sglang":  # without a tokenizer it ignores stop strings
        values["engine_kwargs.sglang.tokenizer_path"] = absolute(job.tokenizer)
        values["skip_tokenizer_init"] = False
    return _below(ROLLOUT, values)


def _actor(config: Config) -> Settings:
    """The loss of the policy and its clip ranges; verl takes one bound where it is told both."""
    actor = config.actor
    bounds = {name: getattr(actor, name) for name in ("clip_ratio_low", "clip_ratio_high")}
    return _below(ACTOR, {
        **{name: actor.clip_ratio for name, bound in bounds.items() if bound is None},
        "clip_ratio_c": actor.clip_ratio_c or NO_DUAL_CLIP,
        "policy_loss.loss_mode": actor.policy_loss.loss_mode,
    })  # fmt: skip


def _network(config: Config, job: Job, who: Network, verl: str) -> Settings:
    """Mini-batches (counted in questions on both sides), passes, the aggregation of losses, and AdamW.

    A pass has room for one episode, since verl fails on one above its limit. The schedule of the learning
    rate is ours (`patches.py`); verl refuses linear.
    """
    section = getattr(config, who)
    kind = section.optim.lr_scheduler_type
    tokens = max(section.ppo_max_token_len, config.data.max_episode_tokens)
    values: Settings = {
        "ppo_mini_batch_size": min(section.ppo_mini_batch_size, config.data.train_batch_size),
        "ppo_max_token_len_per_gpu": tokens,
        "use_dynamic_bsz": True,
        "loss_scale_factor": config.data.max_response_length if section.loss_agg_mode == "constant" else None,
        "optim.lr_scheduler_type": "constant" if kind == "linear" else kind,
        "optim.lr_warmup_steps": warmup_steps(config, who),
        "optim.lr_warmup_steps_ratio": 0.0,
    }
    if who == "critic":
        values |= {"forward_max_token_len_per_gpu": tokens, "ppo_infer_max_token_len_per_gpu": tokens}
    return _below(verl, values) | _engine(config, job, verl)


def _engine(config: Config, job: Job, network: str) -> Settings:
    """Sharding, offload, precision and seed of one network; the reference is not trained."""
    dtype, trained = precision(config, job), network != REF
    values: Settings = {
        "seed": config.trainer.seed, "dtype": dtype, "param_offload": config.cluster.param_offload
    }  # fmt: skip
    if trained:
        values["optimizer_offload"] = config.cluster.optimizer_offload
    short = SHORT_DTYPES[dtype]
    values["mixed_precision"] = {"param_dtype": short, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    return _below(f"{network}.{'fsdp' if network == 'critic' else 'fsdp_config'}", values)


# verl's own files, and the section `verl`


def composed(config: Config, settings: Settings) -> DictConfig:
    """verl's defaults, then `settings`, then the section `verl`.

    Raises UserError for a key in it that verl does not have, and for one that our code sets or replaces.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged = deepcopy(_read_defaults())
    for name, value in settings.items():
        OmegaConf.update(merged, name, value, merge=False, force_add=True)
    for path, value in flat(config.verl):
        key = ".".join(path)
        name = key.removeprefix(ADD)
        _check_free(name)
        default = OmegaConf.select(merged, name, throw_on_missing=False, throw_on_resolution_failure=False)
        if isinstance(default, DictConfig) and len(default) and not isinstance(value, Mapping):
            raise UserError(f"verl.{name} is a section", key=f"verl.{name}", hint="set a key in it")
        try:
            OmegaConf.update(merged, name, plain(value), merge=False, force_add=key.startswith(ADD))
        except OmegaConfBaseException as error:
            hint = f"to add one, as in Hydra: verl.{ADD}{name}"
            raise UserError(f"verl has no key {name}", key=f"verl.{name}", hint=hint) from error
    return merged


def _check_free(name: str) -> None:
    """Raises UserError for a key of verl's that a key of ours has, or that is `OUR_OWN`."""
    for key in keys():
        if key.facts.verl == name:
            what, hint = f"verl.{name} is a key of ours", f"set {key.name} instead"
            raise UserError(what, key=f"verl.{name}", hint=hint)
    if f"{name}.".startswith(tuple(f"{key}." for key in OUR_OWN)):
        raise UserError(f"verl.{name} is set by srl, and cannot be changed", key=f"verl.{name}")


@cache
def _read_defaults() -> DictConfig:
    """verl's own defaults, read from its YAML files; verl itself is not imported. Raises UserError."""
    spec = find_spec("verl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places or find_spec("hydra") is None:
        raise UserError(f"verl is not installed; type: {pip_install('verl')}")
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(Path(places[0]) / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer")
