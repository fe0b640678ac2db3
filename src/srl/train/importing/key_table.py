"""Which key of verl's or Search-R1's is which of ours, with its default there, and why others are dropped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from textwrap import dedent
from typing import Any

SEARCH_R1, VERL = "Search-R1", "verl"
"""The dialects: Search-R1's own version of verl, and verl itself (0.9.1)."""

NO_DEFAULT: Any = object()
"""There is no default to write out: the key matters only where it is set."""

KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_LOSS = {**KL, "k3+": "k3+", "low_var_kl+": "k3+"}
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
}
"""verl's names of advantage estimators, and our algorithms that compute the same."""
LOSS_AGG = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "constant",
}
CORRECTION = "algorithm.rollout_correction"
ROLLOUTS = {"vllm": "vllm", "sglang": "sglang", "sglang_async": "sglang", "vllm_async": "vllm"}
STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp2", "megatron": "megatron"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """One row: their key, ours, the default in each dialect that has the key, and how values translate."""

    theirs: str
    ours: str
    defaults: Mapping[str, Any]
    values: Mapping[Any, Any] = field(default_factory=dict)


def _row(
    dialects: str, theirs: str, ours: str, default: Any = NO_DEFAULT, values: Mapping[Any, Any] | None = None
) -> KeyMapping:
    return KeyMapping(theirs, ours, dict.fromkeys(dialects.split(), default), values or {})


_both, _search_r1, _verl = (partial(_row, names) for names in (f"{SEARCH_R1} {VERL}", SEARCH_R1, VERL))


def _each(theirs: str, ours: str, search_r1: Any, verl: Any) -> KeyMapping:
    return KeyMapping(theirs, ours, {SEARCH_R1: search_r1, VERL: verl})


_MODEL = [
    _both("actor_rollout_ref.model.path", "model.path"),
    _verl("actor_rollout_ref.model.tokenizer_path", "model.tokenizer"),
    _each(
        "actor_rollout_ref.model.enable_gradient_checkpointing", "model.gradient_checkpointing", False, True
    ),
    _verl("actor_rollout_ref.model.lora_rank", "model.lora_rank", 0),
    _verl("actor_rollout_ref.model.lora_alpha", "model.lora_alpha", 16),
    _verl("actor_rollout_ref.model.target_modules", "model.lora_target_modules", "all-linear"),
    _verl("actor_rollout_ref.model.trust_remote_code", "model.trust_remote_code"),
    _verl("actor_rollout_ref.model.override_config.attn_implementation", "model.attn_implementation"),
]
_DATA = [
    _both("data.train_files", "data.train_files"),
    _both("data.val_files", "data.val_files"),
    _both("data.train_batch_size", "data.train_batch_size", 1024),
    _search_r1("data.max_start_length", "data.max_prompt_length", 256),
    _search_r1("data.max_prompt_length", "data.max_response_length", 512),
    _verl("data.max_prompt_length", "data.max_prompt_length", 512),
    _verl("data.max_response_length", "data.max_response_length", 512),
    _verl("data.filter_overlong_prompts", "data.filter_overlong_prompts", False),
    _search_r1("data.shuffle_train_dataloader", "data.shuffle", True),
    _verl("data.shuffle", "data.shuffle", True),
    _search_r1("data.val_data_num", "eval.val_questions", None),
    _verl("data.val_max_samples", "eval.val_questions", -1, {-1: None}),
    _both("data.val_batch_size", "eval.batch_size"),
    _verl("data.seed", "trainer.seed"),
]
_REWARD = [
    _verl(f"{place}.reward_kwargs.overlong_buffer_cfg.{key}", f"reward.overlong_buffer.{key}")
    for place in ("reward_model", "reward")
    for key in ("enable", "len", "penalty_factor")
]
_ROLLOUT = [
    _search_r1("actor_rollout_ref.rollout.n_agent", "rollout.n", 1),
    _verl("actor_rollout_ref.rollout.n", "rollout.n", 1),
    _both("actor_rollout_ref.rollout.temperature", "rollout.temperature", 1.0),
    _each("actor_rollout_ref.rollout.top_p", "rollout.top_p", 0.95, 1.0),
    _each("actor_rollout_ref.rollout.max_num_seqs", "rollout.max_num_seqs", 1024, 256),
    _search_r1("max_turns", "rollout.max_turns", 10),
    _search_r1("data.max_response_length", "rollout.max_turn_tokens", 512),
    _search_r1("data.max_obs_length", "rollout.max_obs_length", 512),
    _search_r1("do_search", "rollout.search", True),
    _search_r1("retriever.url", "search.url", "http://127.0.0.1:8000/retrieve"),
    _search_r1("retriever.topk", "search.topk", 3),
]
_ALGORITHM = [
    _both("algorithm.adv_estimator", "algorithm.name", "gae", ESTIMATORS),
    _both("algorithm.gamma", "algorithm.gamma", 1.0),
    _both("algorithm.lam", "algorithm.lam", 1.0),
    _verl("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward", False),
    _both("algorithm.kl_penalty", "algorithm.kl_penalty", "kl", KL),
    _both("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.type", "fixed"),
    _both("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.kl_coef", 0.001),
    _both("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.target_kl"),
    _both("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.horizon"),
    _verl(f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is"),
    _verl(f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is_threshold"),
    _verl(f"{CORRECTION}.rollout_is_batch_normalize", f"{CORRECTION}.rollout_is_batch_normalize"),
    _verl(f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs"),
    _verl(f"{CORRECTION}.rollout_rs_threshold", f"{CORRECTION}.rollout_rs_threshold"),
]
_ACTOR = [
    _both("actor_rollout_ref.actor.ppo_mini_batch_size", "actor.ppo_mini_batch_size", 256),
    _both("actor_rollout_ref.actor.ppo_epochs", "actor.ppo_epochs", 1),
    _both("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "actor.ppo_max_token_len"),
    _both("actor_rollout_ref.actor.clip_ratio", "actor.clip_ratio", 0.2),
    _verl("actor_rollout_ref.actor.clip_ratio_low", "actor.clip_ratio_low"),
    _verl("actor_rollout_ref.actor.clip_ratio_high", "actor.clip_ratio_high"),
    _verl("actor_rollout_ref.actor.clip_ratio_c", "actor.clip_ratio_c", 3.0),
    _each("actor_rollout_ref.actor.entropy_coeff", "actor.entropy_coeff", 0.001, 0),
    _both("actor_rollout_ref.actor.use_kl_loss", "actor.use_kl_loss", False),
    _both("actor_rollout_ref.actor.kl_loss_coef", "actor.kl_loss_coef", 0.001),
    _both("actor_rollout_ref.actor.kl_loss_type", "actor.kl_loss_type", "low_var_kl", KL_LOSS),
    _verl("actor_rollout_ref.actor.loss_agg_mode", "actor.loss_agg_mode", "token-mean", LOSS_AGG),
    _verl("actor_rollout_ref.actor.loss_scale_factor", "actor.loss_agg_constant"),
    _both("actor_rollout_ref.actor.grad_clip", "actor.grad_clip", 1.0),
    _search_r1("actor_rollout_ref.actor.state_masking", "actor.mask_observations", False),
]
_CRITIC = [
    _both("critic.ppo_mini_batch_size", "critic.ppo_mini_batch_size"),
    _both("critic.ppo_epochs", "critic.ppo_epochs"),
    _both("critic.ppo_max_token_len_per_gpu", "critic.ppo_max_token_len"),
    _both("critic.cliprange_value", "critic.cliprange_value", 0.5),
    _both("critic.grad_clip", "critic.grad_clip", 1.0),
    _verl("critic.loss_agg_mode", "critic.loss_agg_mode", NO_DEFAULT, LOSS_AGG),
]
_TRAINER = [
    _both("trainer.total_training_steps", "trainer.total_training_steps"),
    _both("trainer.save_freq", "trainer.save_freq", -1, {-1: 0}),
    _both("trainer.test_freq", "trainer.test_freq", -1, {-1: 0}),
    _both("trainer.val_before_train", "trainer.val_before_train", True),
    _both("trainer.critic_warmup", "trainer.critic_warmup", 0),
    _verl("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    _both("trainer.project_name", "trainer.project_name"),
    _both("trainer.experiment_name", "trainer.experiment_name"),
]
_CLUSTER = [
    _both("trainer.nnodes", "cluster.nnodes", 1),
    _both("trainer.n_gpus_per_node", "cluster.n_gpus_per_node", 8),
    _both("actor_rollout_ref.actor.strategy", "cluster.strategy", "fsdp", STRATEGIES),
    _both("actor_rollout_ref.rollout.name", "cluster.rollout", NO_DEFAULT, ROLLOUTS),
    _both("actor_rollout_ref.rollout.tensor_model_parallel_size", "cluster.tensor_model_parallel_size", 2),
    _both("actor_rollout_ref.rollout.gpu_memory_utilization", "cluster.gpu_memory_utilization", 0.5),
    _both("actor_rollout_ref.actor.fsdp_config.param_offload", "cluster.param_offload", False),
    _both("actor_rollout_ref.actor.fsdp_config.optimizer_offload", "cluster.optimizer_offload", False),
    _verl("actor_rollout_ref.rollout.agent.num_workers", "cluster.agent_workers", 8),
]


def _optim(theirs: str, ours: str, lr: float) -> list[KeyMapping]:
    """The rows of one optimiser. Its schedule has another name under Megatron, and another in older verl.

    Of several rows for one of our keys, the last one that is set counts.
    """
    return [
        _both(f"{theirs}.lr", f"{ours}.lr", lr),
        _verl(f"{theirs}.betas", f"{ours}.betas", [0.9, 0.999]),
        _both(f"{theirs}.weight_decay", f"{ours}.weight_decay", 0.01),
        _verl(f"{theirs}.lr_warmup_steps", f"{ours}.lr_warmup_steps", -1, {-1: 0, None: 0}),
        _both(f"{theirs}.lr_warmup_steps_ratio", f"{ours}.lr_warmup_steps_ratio", 0.0),
        _verl(f"{theirs}.lr_scheduler_type", f"{ours}.lr_scheduler_type", "constant", SCHEDULES),
        _verl(f"{theirs}.lr_decay_style", f"{ours}.lr_scheduler_type", NO_DEFAULT, SCHEDULES),
        _both(f"{theirs}.warmup_style", f"{ours}.lr_scheduler_type", NO_DEFAULT, SCHEDULES),
    ]


KEY_TABLE: tuple[KeyMapping, ...] = (
    *_MODEL,
    *_DATA,
    *_REWARD,
    *_ROLLOUT,
    *_ALGORITHM,
    *_ACTOR,
    *_optim("actor_rollout_ref.actor.optim", "actor.optim", 1e-6),
    *_CRITIC,
    *_optim("critic.optim", "critic.optim", 1e-5),
    *_TRAINER,
    *_CLUSTER,
)

_OF_VERL = {row.theirs for row in KEY_TABLE if VERL in row.defaults}
SEARCH_R1_ONLY = frozenset(row.theirs for row in KEY_TABLE if row.theirs not in _OF_VERL) | {
    "data.train_data_num", "algorithm.no_think_rl", "algorithm.state_masking.start_state_marker",
    "algorithm.state_masking.end_state_marker", "reward_model.structure_format_score",
    "reward_model.final_format_score", "reward_model.retrieval_score", "reranker.do_rerank",
    "reranker.url", "reranker.topk",
}  # fmt: skip
"""Keys that mark a configuration as Search-R1's."""


def mappings_of(dialect: str) -> list[KeyMapping]:
    """The rows of one dialect."""
    return [name for name in KEY_TABLE if dialect in name.defaults]


def defaults_of(dialect: str) -> dict[str, Any]:
    """Their keys with their defaults there, where these are known."""
    return {
        name.theirs: name.defaults[dialect]
        for name in mappings_of(dialect)
        if name.defaults[dialect] is not NO_DEFAULT
    }


def _patterns(text: str) -> list[str]:
    """The keys in lines of `SECTION SECTION: NAME NAME`; an indented line goes on with the names."""
    found: list[str] = []
    for block in re.split(r"\n(?! )", dedent(text).strip()):
        sections, names = block.split(":")
        found += [f"{section}.{name}" for section in sections.split() for name in names.split()]
    return [pattern.removeprefix("TOP.") for pattern in found]


REPLACED: Mapping[str, list[str]] = {
    "runs and their checkpoints lie in the workspace, and srl train --resume goes on": _patterns("""
        trainer: default_local_dir default_hdfs_dir resume_mode resume_from_path del_local_ckpt_after_load
          remove_previous_ckpt_in_save max_critic_ckpt_to_keep checkpoint_callback_class esi_redundant_time
        actor_rollout_ref.actor critic: checkpoint.*
    """),
    "every episode is in the run's log, and srl inspect shows it": _patterns("""
        trainer: rollout_data_dir validation_data_dir log_val_generations
        actor_rollout_ref.rollout: trace.*
    """),
    "ppo_max_token_len says how much a pass takes, and what is computed does not depend on it": _patterns("""
        *: ppo_micro_batch_size ppo_micro_batch_size_per_gpu forward_micro_batch_size* use_dynamic_bsz
          log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz
          log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu
    """),
    "srl reads the questions itself": _patterns("""
        data: tokenizer prompt_key return_raw_input_ids return_raw_chat return_full_prompt reward_fn_key
          truncation custom_cls.* tool_config_path function_tool_path use_shm dataloader_num_workers
          filter_overlong_prompts_workers gen_batch_size validation_shuffle trust_remote_code *image*
          *video* *audio* *multi_modal* mm_processor_kwargs* apply_chat_template_kwargs*
    """),
    "the episodes are srl's own": _patterns("""
        actor_rollout_ref.rollout: multi_turn.* agent.* mode do_sample val_kwargs.* ignore_eos prompt_length
          response_length calculate_log_probs over_sample_rate skip_tokenizer_init load_format seed
          max_model_len max_num_batched_tokens dtype
    """),
    "it follows from other keys": _patterns("""
        *: rollout_n data_loader_seed use_remove_padding grad_offload optim.total_training_steps
        critic: enable nccl_timeout strategy shuffle *.param_offload *.optimizer_offload
        critic.model: path tokenizer_path external_lib enable_gradient_checkpointing fsdp_config.*
          override_config* trust_remote_code lora_rank lora_alpha target_modules
        actor_rollout_ref: hybrid_engine actor.shuffle ref.strategy
        trainer: total_epochs
    """),
    "srl starts verl itself, in its synchronous mode": _patterns("""
        trainer: use_v1 v1.* device
        TOP: ray_kwargs.ray_init.runtime_env.* transfer_queue.* skip.* distillation.* hydra.* hydra/*
          ray_init.*
    """),
    "srl has no bypass mode: it computes the old log-probs itself": _patterns(
        "algorithm.rollout_correction: bypass_mode loss_type"
    ),
    "reranking is the server's: let the one at search.url rerank": _patterns("reranker: do_rerank url topk"),
    "the learning rate decays to 0": _patterns("actor_rollout_ref.actor critic: optim.min_lr_ratio"),
    "tokens are sampled from all": _patterns("actor_rollout_ref.rollout: top_k"),
    "all questions of data.train_files are used": _patterns("data: train_data_num train_max_samples"),
    "set algorithm.filter_groups.enable=true to replace groups": _patterns("algorithm.filter_groups: *"),
    "the mask follows who wrote a token": _patterns("algorithm: state_masking.* no_think_rl"),
    "srl eval validates; the imported file trains": _patterns("trainer: val_only"),
    "rewards are plugins: reward.weights": _patterns("""
        TOP: reward.* reward_model.* custom_reward_function.* sandbox_fusion.*
    """),
}
"""Why keys are dropped, and which."""


def why_replaced(key: str) -> str | None:
    """Why a key of theirs is dropped, or None where it is not dropped."""
    matching = (why for why, patterns in REPLACED.items() if any(fnmatchcase(key, p) for p in patterns))
    return next(matching, None)
