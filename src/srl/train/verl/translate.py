"""The table "our key → verl's key", and verl's configuration made from it.

`settings` lists every value that our configuration gives verl in training, `server_settings` those of rollout
servers alone. Keys that have no counterpart in verl are in `READ_BY_US` (our own code reads them in verl's
processes) or in `srl.config.unread.UNREAD_BY_VERL`; `config_check.REFUSED` has those that verl cannot keep. A
test holds that every key of ours is in exactly one of these places.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin
from srl.config.sections import Actor, Critic, Model
from srl.errors import UserError
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

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
FSDP_AND_MEGATRON = (
    (ACTOR, "fsdp_config", "megatron"),
    (REF, "fsdp_config", "megatron"),
    ("critic", "fsdp", "megatron"),
)
"""verl's section of each network, and the keys in it for FSDP and for Megatron."""

KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k3+": "low_var_kl+"}
LOSS_AGG = {"constant": "seq-mean-token-sum-norm"}
"""verl's names of our modes, where they differ."""
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
NO_DUAL_CLIP = 1e9
"""A bound above every ratio, since verl requires one: it clamps log-ratios to 20, and e^20 = 4.9e8."""
VLLM_TOKENS = 8192
"""verl's default for the tokens of one pass of vLLM, which must be at least the number of sequences."""
CHECKED_WORKER = "srl.train.verl.vllm_delivery.CheckedWorker"
"""In place of verl's extension of vLLM's worker, with what checks its weights."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Gradient checkpointing under Megatron; verl reads its own key for it under FSDP only."""

READ_BY_US: dict[str, str] = {
    "data.train_files": "our data set reads the questions",
    "data.exclude_files": "our data set reads the questions",
    "data.val_files": "our data set reads the questions",
    "data.test_files": "our data set reads the questions",
    "data.world": "the made-up world, as in local training",
    "data.corpus": "the corpus to search, as in local training",
    "data.template": "our data set makes the prompts, the episode its feedback",
    "data.examples": "our data set makes the prompts",
    "data.filter_overlong_prompts": "our data set skips overlong prompts",
    "data.shuffle": "our data set yields the order of local training",
    "data.mix": "our data set yields the order of local training",
    "search.": "the episode searches",
    "retriever.": "the episode searches",
    "rollout.max_turns": "the episode counts turns",
    "rollout.max_turn_tokens": "the episode limits the tokens of a turn",
    "rollout.max_obs_length": "the episode truncates observations",
    "rollout.min_answer_tokens": "the episode reserves room for an answer",
    "rollout.search": "the episode searches or not",
    "rollout.stop_at_answer": "the episode ends at the answer or not",
    "algorithm.rollout_correction.": "our trainer weights and rejects tokens",
    "reward.": "the process that ran an episode scores it",
    "rft.": "rejection sampling runs on the machine that starts the run",
    "sft.": "fine-tuning before RL runs on the machine that starts the run",
    "trainer.max_ckpt_to_keep": "our trainer deletes old checkpoints; verl would delete the best",
    "trainer.keep_best_ckpt": "our trainer deletes old checkpoints",
    "trainer.logger": "our log writer passes metrics on",
    "trainer.plugin_path": "our processes load plugins named as module:Class from there",
    "trainer.sample_freq": "our log writer shows episodes",
    "trainer.sample_count": "our log writer shows episodes",
    "watch.": "our log writer has the watches",
    "eval.val_questions": "our data set limits the questions",
    "eval.test_questions": "our data set limits the questions",
    "eval.max_failed": "srl checks it after the evaluation",
    "cluster.watchdog_s": "the launcher watches the run",
    "verl": "applied on top of what is translated",
}
"""Keys that our code reads in verl's processes or in the launcher. A name that ends in a dot is a section."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of verl's configuration; `ours` is the key it comes from, empty for a fixed value."""

    value: Any
    ours: str = ""


def settings(config: Config, job: Job) -> dict[str, Setting]:
    """verl's keys and their values for `config`, without those left at verl's defaults."""
    return {key: Setting(value, ours) for key, value, ours in _rows(config, job)}


def server_settings(config: Config, job: Job) -> dict[str, Setting]:
    """verl's keys and their values for rollout servers without a trainer, which load the weights."""
    return {key: Setting(value, ours) for key, value, ours in _server_rows(config, job)}


def _server_rows(config: Config, job: Job) -> Rows:
    yield from _model(config, job, MODEL)
    yield from _data(config)
    yield from _rollout(config, job)
    yield from _cluster(config, job)
    yield from _ray(config, job)
    if support := device_support(job.cpu):
        yield from support.settings(config, job)
    yield f"{ROLLOUT}.nnodes", config.cluster.nnodes, "cluster.nnodes"
    yield f"{ROLLOUT}.load_format", "auto", ""
    yield f"{ROLLOUT}.free_cache_engine", False, ""
    yield f"{ROLLOUT}.enable_sleep_mode", False, ""


def _rows(config: Config, job: Job) -> Rows:
    yield from _model(config, job, MODEL)
    if needs_critic(config):
        yield from _model(config, job, "critic.model")
    yield from _lora(config, job)
    yield from _data(config)
    yield from _rollout(config, job)
    yield from _algorithm(config)
    yield from _actor(config)
    if needs_critic(config):
        yield from _critic(config)
    yield from _trainer(config, job)
    yield from _cluster(config, job)
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
    length of all episodes together. Dropout is set to 0, since verl leaves it on in its updates.
    """
    model = config.model
    attention = _attention(model)
    changed = {"attn_implementation": attention, **without_dropout(model_config(model.path))}
    unpadded = is_megatron(config) or "flash" in attention
    yield f"{verl}.path", model.path and absolute(model.path), "model.path"
    yield f"{verl}.tokenizer_path", absolute(job.tokenizer), "model.tokenizer"
    yield f"{verl}.trust_remote_code", model.trust_remote_code, "model.trust_remote_code"
    checkpointing = model.gradient_checkpointing
    yield f"{verl}.enable_gradient_checkpointing", checkpointing, "model.gradient_checkpointing"
    yield f"{verl}.override_config", changed, "model.attn_implementation"
    yield f"{verl}.use_remove_padding", unpadded, "model.attn_implementation"


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


def _lora(config: Config, job: Job) -> Rows:
    """Adapters of the policy; merged into the weights for the torch rollout, which takes whole weights."""
    model = config.model
    if model.lora_rank == 0:
        return
    if is_megatron(config):
        yield f"{MODEL}.lora.rank", model.lora_rank, "model.lora_rank"
        yield f"{MODEL}.lora.alpha", model.lora_alpha, "model.lora_alpha"
        return
    named = model.lora_target_modules
    targets = named if isinstance(named, str) else list(named)
    yield f"{MODEL}.lora_rank", model.lora_rank, "model.lora_rank"
    yield f"{MODEL}.lora_alpha", model.lora_alpha, "model.lora_alpha"
    yield f"{MODEL}.target_modules", targets, "model.lora_target_modules"
    if rollout_name(config, job) == TORCH:
        yield f"{MODEL}.lora.merge", True, "cluster.rollout"
    else:
        yield f"{ROLLOUT}.load_format", "safetensors", "model.lora_rank"


def _data(config: Config) -> Rows:
    """Our data set yields the questions in the order of local training; verl reads no file."""
    yield "data.custom_cls.path", "pkg://srl.train.verl.dataset", ""
    yield "data.custom_cls.name", "Questions", ""
    yield "data.train_files", ["train"], ""
    yield "data.val_files", ["val"], ""
    yield "data.train_batch_size", config.data.train_batch_size, "data.train_batch_size"
    yield "data.max_prompt_length", config.data.max_prompt_length, "data.max_prompt_length"
    yield "data.max_response_length", config.data.max_response_length, "data.max_response_length"
    yield "data.trust_remote_code", config.model.trust_remote_code, "model.trust_remote_code"
    yield "data.shuffle", False, ""
    yield "data.validation_shuffle", False, ""
    yield "data.seed", config.trainer.seed, "trainer.seed"
    yield "data.dataloader_num_workers", 0, ""


def _rollout(config: Config, job: Job) -> Rows:
    yield from _sampling(config)
    yield from _rollout_engine(config, job)
    if rollout_name(config, job) == "vllm":  # it looks for a tokenizer beside the model unless told
        yield f"{ROLLOUT}.engine_kwargs.vllm.tokenizer", absolute(job.tokenizer), "model.tokenizer"
        yield f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls", CHECKED_WORKER, ""
    if rollout_name(config, job) == "sglang":  # without a tokenizer it ignores stop strings
        yield f"{ROLLOUT}.skip_tokenizer_init", False, ""
        yield f"{ROLLOUT}.engine_kwargs.sglang.tokenizer_path", absolute(job.tokenizer), "model.tokenizer"


def _sampling(config: Config) -> Rows:
    rollout, temperature = config.rollout, config.eval.temperature
    yield f"{ROLLOUT}.n", rollout.n, "rollout.n"
    yield f"{ROLLOUT}.do_sample", True, ""
    yield f"{ROLLOUT}.temperature", rollout.temperature, "rollout.temperature"
    yield f"{ROLLOUT}.top_p", rollout.top_p, "rollout.top_p"
    yield f"{ROLLOUT}.top_k", -1, ""
    yield f"{ROLLOUT}.seed", config.trainer.seed, "trainer.seed"
    yield f"{ROLLOUT}.calculate_log_probs", True, ""
    yield f"{ROLLOUT}.agent.default_agent_loop", "srl_search", ""
    yield f"{ROLLOUT}.val_kwargs.do_sample", temperature > 0, "eval.temperature"
    yield f"{ROLLOUT}.val_kwargs.temperature", temperature, "eval.temperature"
    yield f"{ROLLOUT}.val_kwargs.top_p", 1.0, ""
    yield f"{ROLLOUT}.val_kwargs.top_k", -1, ""
    yield f"{ROLLOUT}.val_kwargs.n", 1, ""


def _rollout_engine(config: Config, job: Job) -> Rows:
    """The engine that generates, and how much it generates at once on each copy of the model."""
    cluster, seqs = config.cluster, config.rollout.max_num_seqs
    size, share = cluster.tensor_model_parallel_size, cluster.gpu_memory_utilization
    yield f"{ROLLOUT}.name", rollout_name(config, job), "cluster.rollout"
    yield f"{ROLLOUT}.tensor_model_parallel_size", size, "cluster.tensor_model_parallel_size"
    yield f"{ROLLOUT}.gpu_memory_utilization", share, "cluster.gpu_memory_utilization"
    yield f"{ROLLOUT}.dtype", precision(config, job), "model.dtype"
    yield f"{ROLLOUT}.max_model_len", config.data.max_episode_tokens, "data.max_response_length"
    yield f"{ROLLOUT}.max_num_seqs", seqs, "rollout.max_num_seqs"
    yield f"{ROLLOUT}.max_num_batched_tokens", max(VLLM_TOKENS, seqs), "rollout.max_num_seqs"


def _algorithm(config: Config) -> Rows:
    algorithm = config.algorithm
    yield "algorithm.adv_estimator", f"srl_{algorithm.name}", "algorithm.name"
    yield "critic.enable", needs_critic(config), "algorithm.name"
    yield "algorithm.gamma", algorithm.gamma, "algorithm.gamma"
    yield "algorithm.lam", algorithm.lam, "algorithm.lam"
    yield "algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward"
    yield "algorithm.kl_penalty", KL_NAMES[algorithm.kl_penalty], "algorithm.kl_penalty"
    for name, value in algorithm.kl_ctrl.model_dump().items():
        yield f"algorithm.kl_ctrl.{name}", value, f"algorithm.kl_ctrl.{name}"


def _actor(config: Config) -> Rows:
    actor = config.actor
    low, high = (
        name if getattr(actor, name) is not None else "clip_ratio"
        for name in ("clip_ratio_low", "clip_ratio_high")
    )
    yield from _passes(config, ACTOR, "actor", actor)
    yield f"{ACTOR}.ppo_max_token_len_per_gpu", *_tokens(config, "actor", actor)
    yield f"{ACTOR}.clip_ratio", actor.clip_ratio, "actor.clip_ratio"
    yield f"{ACTOR}.clip_ratio_low", getattr(actor, low), f"actor.{low}"
    yield f"{ACTOR}.clip_ratio_high", getattr(actor, high), f"actor.{high}"
    yield f"{ACTOR}.clip_ratio_c", actor.clip_ratio_c or NO_DUAL_CLIP, "actor.clip_ratio_c"
    yield f"{ACTOR}.policy_loss.loss_mode", actor.policy_loss.loss_mode, "actor.policy_loss.loss_mode"
    yield f"{ACTOR}.entropy_coeff", actor.entropy_coeff, "actor.entropy_coeff"
    yield f"{ACTOR}.use_kl_loss", actor.use_kl_loss, "actor.use_kl_loss"
    yield f"{ACTOR}.kl_loss_coef", actor.kl_loss_coef, "actor.kl_loss_coef"
    yield f"{ACTOR}.kl_loss_type", KL_NAMES[actor.kl_loss_type], "actor.kl_loss_type"
    yield from _optimiser(config, "actor", actor)


def _critic(config: Config) -> Rows:
    """verl's critic uses the token limit of its inference key in training too."""
    critic = config.critic
    yield from _passes(config, "critic", "critic", critic)
    limits = ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu", "ppo_infer_max_token_len_per_gpu")
    for name in limits:
        yield f"critic.{name}", *_tokens(config, "critic", critic)
    yield "critic.cliprange_value", critic.cliprange_value, "critic.cliprange_value"
    yield from _optimiser(config, "critic", critic)


def _passes(config: Config, verl: str, ours: str, section: Actor | Critic) -> Rows:
    """Mini-batches (counted in questions on both sides), epochs, and the aggregation of token losses."""
    mode, constant = section.loss_agg_mode, config.actor.loss_agg_constant
    source = "actor.loss_agg_constant" if constant else "data.max_response_length"
    scale = (constant or config.data.max_response_length) if mode == "constant" else None
    mini = min(section.ppo_mini_batch_size, config.data.train_batch_size)
    yield f"{verl}.ppo_mini_batch_size", mini, f"{ours}.ppo_mini_batch_size"
    yield f"{verl}.ppo_epochs", section.ppo_epochs, f"{ours}.ppo_epochs"
    yield f"{verl}.use_dynamic_bsz", True, f"{ours}.ppo_max_token_len"
    yield f"{verl}.shuffle", False, ""
    yield f"{verl}.data_loader_seed", config.trainer.seed, "trainer.seed"
    yield f"{verl}.loss_agg_mode", LOSS_AGG.get(mode, mode), f"{ours}.loss_agg_mode"
    yield f"{verl}.loss_scale_factor", scale, source


def _tokens(config: Config, ours: str, section: Actor | Critic) -> tuple[int, str]:
    return tokens_per_pass(section.ppo_max_token_len, config), f"{ours}.ppo_max_token_len"


def _optimiser(config: Config, who: Network, section: Actor | Critic) -> Rows:
    """AdamW. verl clips by `optim.clip_grad`; nothing reads the actor's `grad_clip`."""
    optim, verl = section.optim, f"{ACTOR if who == 'actor' else who}.optim"
    asked = "lr_warmup_steps" if optim.lr_warmup_steps else "lr_warmup_steps_ratio"
    yield f"{verl}.lr", optim.lr, f"{who}.optim.lr"
    yield f"{verl}.betas", list(optim.betas), f"{who}.optim.betas"
    yield f"{verl}.weight_decay", optim.weight_decay, f"{who}.optim.weight_decay"
    yield f"{verl}.clip_grad", section.grad_clip, f"{who}.grad_clip"
    yield f"{verl}.lr_warmup_steps", warmup_steps(config, who), f"{who}.optim.{asked}"
    yield f"{verl}.lr_warmup_steps_ratio", 0.0, f"{who}.optim.lr_warmup_steps_ratio"
    yield from _schedule(config, verl, who, optim)


def _schedule(config: Config, verl: str, who: str, optim: Any) -> Rows:
    """The learning-rate schedule, and ε. Under Megatron verl passes AdamW's betas on by the override only.

    Under FSDP `patches.local_learning_rate` replaces the schedule; verl has no name for `linear`.
    """
    if is_megatron(config):
        first, second = optim.betas
        adam = {"adam_beta1": first, "adam_beta2": second, "adam_eps": optim.eps}
        yield f"{verl}.lr_decay_style", optim.lr_scheduler_type, f"{who}.optim.lr_scheduler_type"
        yield f"{verl}.override_optimizer_config", adam, f"{who}.optim.eps"
        return
    kind = verl_scheduler_type(optim.lr_scheduler_type)
    yield f"{verl}.lr_scheduler_type", kind, f"{who}.optim.lr_scheduler_type"
    yield f"{verl}.override_optimizer_config", {"eps": optim.eps}, f"{who}.optim.eps"


def verl_scheduler_type(kind: str) -> str:
    """The schedule's name in verl's configuration. verl refuses `linear`; under FSDP the schedule is ours."""
    return "constant" if kind == "linear" else kind


def _trainer(config: Config, job: Job) -> Rows:
    """verl's actor learns from step `critic_warmup` on, ours from the step after it."""
    trainer, total = config.trainer, config.trainer.total_training_steps
    yield "trainer.total_training_steps", total, "trainer.total_training_steps"
    yield "trainer.total_epochs", max(1, total), "trainer.total_training_steps"
    yield "trainer.save_freq", trainer.save_freq or max(1, total), "trainer.save_freq"
    yield "trainer.test_freq", trainer.test_freq, "trainer.test_freq"
    yield "trainer.val_before_train", trainer.val_before_train, "trainer.val_before_train"
    yield "trainer.critic_warmup", trainer.critic_warmup + 1, "trainer.critic_warmup"
    yield "trainer.logger", [], ""
    yield "trainer.project_name", trainer.project_name, "trainer.project_name"
    yield "trainer.experiment_name", trainer.experiment_name or job.run.name, "trainer.experiment_name"
    yield "trainer.default_local_dir", absolute(job.checkpoints), ""
    yield "trainer.resume_mode", "auto" if job.resume else "disable", ""
    yield "trainer.v1.trainer_mode", "sync", ""
    yield "reward.num_workers", 0, ""


def _cluster(config: Config, job: Job) -> Rows:
    cluster = config.cluster
    yield "trainer.nnodes", cluster.nnodes, "cluster.nnodes"
    yield "trainer.n_gpus_per_node", job.gpus_per_node, "cluster.n_gpus_per_node"
    yield "trainer.device", "cpu" if job.cpu else "cuda", "model.device"
    if not is_megatron(config):
        yield f"{ACTOR}.strategy", cluster.strategy, "cluster.strategy"
        if needs_critic(config):
            yield "critic.strategy", cluster.strategy, "cluster.strategy"
    workers = min(cluster.agent_workers, job.gpus_per_node) if job.cpu else cluster.agent_workers
    yield f"{ROLLOUT}.agent.num_workers", workers, "cluster.agent_workers"


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
    verl = "ray_kwargs.ray_init"
    if config.cluster.address is not None:
        yield f"{verl}.address", config.cluster.address, "cluster.address"
    else:
        yield f"{verl}.include_dashboard", False, ""
    threads = config.trainer.threads
    if threads is not None:
        yield f"{verl}.runtime_env.env_vars", {"OMP_NUM_THREADS": str(threads)}, "trainer.threads"
        if rollout_name(config, job) == TORCH:
            yield f"{ROLLOUT}.engine_kwargs.srl_torch", {"threads": threads}, "trainer.threads"


def defaults(config: Config) -> DictConfig:
    """verl's own defaults, read from its YAML files; verl itself is not imported."""
    return deepcopy(_read_defaults(is_megatron(config)))


@cache
def _read_defaults(megatron: bool) -> DictConfig:
    directory = str(_config_directory())

    from hydra import compose, initialize_config_dir

    with initialize_config_dir(directory, version_base=None):
        return compose("ppo_trainer", ["model_engine=megatron"] if megatron else [])


def _config_directory() -> Path:
    """The configuration files of the installed verl. Raises UserError if there are none."""
    spec = find_spec("verl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places or find_spec("hydra") is None:
        raise UserError(f"verl is not installed; type: {pip_install('verl')}")
    return Path(places[0]) / "trainer" / "config"
