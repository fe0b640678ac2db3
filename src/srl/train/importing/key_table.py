"""The table: each key of verl's and Search-R1's that has one of ours, with its default there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEARCH_R1, VERL = "Search-R1", "verl"
"""Whose configuration a file is: Search-R1's own version of verl, or verl itself (0.9.1)."""

UNSAID: Any = object()
"""No default that would be written: the key says something only where it is given."""

KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce++": "reinforce_plus_plus",
}
"""verl's names of advantage estimators, and the algorithm plugins that estimate the same."""
LOSS_AGG = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "constant",
}
ROLLOUTS = {"vllm": "vllm", "sglang": "sglang", "sglang_async": "sglang", "vllm_async": "vllm"}
STRATEGIES = {"fsdp": "fsdp", "fsdp2": "fsdp2", "megatron": "megatron"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}


@dataclass(frozen=True, slots=True)
class Name:
    """One row: their key, ours, the default under each dialect that has the key, and what values become."""

    theirs: str
    ours: str
    defaults: Mapping[str, Any]
    values: Mapping[Any, Any] = field(default_factory=dict)


def _both(theirs: str, ours: str, default: Any = UNSAID, values: Mapping[Any, Any] | None = None) -> Name:
    return Name(theirs, ours, {SEARCH_R1: default, VERL: default}, values or {})


def _each(theirs: str, ours: str, search_r1: Any, verl: Any) -> Name:
    return Name(theirs, ours, {SEARCH_R1: search_r1, VERL: verl})


def _search_r1(theirs: str, ours: str, default: Any = UNSAID) -> Name:
    return Name(theirs, ours, {SEARCH_R1: default})


def _verl(theirs: str, ours: str, default: Any = UNSAID, values: Mapping[Any, Any] | None = None) -> Name:
    return Name(theirs, ours, {VERL: default}, values or {})


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
    _both("actor_rollout_ref.actor.kl_loss_type", "actor.kl_loss_type", "low_var_kl", KL),
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
    _verl("critic.loss_agg_mode", "critic.loss_agg_mode", UNSAID, LOSS_AGG),
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
    _both("actor_rollout_ref.rollout.name", "cluster.rollout", UNSAID, ROLLOUTS),
    _both("actor_rollout_ref.rollout.tensor_model_parallel_size", "cluster.tensor_model_parallel_size", 2),
    _both("actor_rollout_ref.rollout.gpu_memory_utilization", "cluster.gpu_memory_utilization", 0.5),
    _both("actor_rollout_ref.actor.fsdp_config.param_offload", "cluster.param_offload", False),
    _both("actor_rollout_ref.actor.fsdp_config.optimizer_offload", "cluster.optimizer_offload", False),
    _verl("actor_rollout_ref.rollout.agent.num_workers", "cluster.agent_workers", 8),
]


def _optim(theirs: str, ours: str, lr: float) -> list[Name]:
    """The rows of one optimiser; its schedule has another name under Megatron, and one in older verl.

    Of two rows for one key of ours the later counts, where it is given.
    """
    return [
        _both(f"{theirs}.lr", f"{ours}.lr", lr),
        _verl(f"{theirs}.betas", f"{ours}.betas", [0.9, 0.999]),
        _both(f"{theirs}.weight_decay", f"{ours}.weight_decay", 0.01),
        _verl(f"{theirs}.lr_warmup_steps", f"{ours}.lr_warmup_steps", -1, {-1: 0, None: 0}),
        _both(f"{theirs}.lr_warmup_steps_ratio", f"{ours}.lr_warmup_steps_ratio", 0.0),
        _verl(f"{theirs}.lr_scheduler_type", f"{ours}.lr_scheduler_type", "constant", SCHEDULES),
        _verl(f"{theirs}.lr_decay_style", f"{ours}.lr_scheduler_type", UNSAID, SCHEDULES),
        _both(f"{theirs}.warmup_style", f"{ours}.lr_scheduler_type", UNSAID, SCHEDULES),
    ]


NAMES: tuple[Name, ...] = (
    *_MODEL,
    *_DATA,
    *_ROLLOUT,
    *_ALGORITHM,
    *_ACTOR,
    *_optim("actor_rollout_ref.actor.optim", "actor.optim", 1e-6),
    *_CRITIC,
    *_optim("critic.optim", "critic.optim", 1e-5),
    *_TRAINER,
    *_CLUSTER,
)

SEARCH_R1_ONLY = frozenset(
    {
        "max_turns", "do_search", "retriever.url", "retriever.topk", "data.max_start_length",
        "data.max_obs_length", "data.train_data_num", "data.val_data_num", "data.shuffle_train_dataloader",
        "actor_rollout_ref.rollout.n_agent", "actor_rollout_ref.actor.state_masking",
        "algorithm.no_think_rl", "algorithm.state_masking.start_state_marker",
        "algorithm.state_masking.end_state_marker", "reward_model.structure_format_score",
        "reward_model.final_format_score", "reward_model.retrieval_score", "reranker.do_rerank",
        "reranker.url", "reranker.topk",
    }
)  # fmt: skip
"""Keys by which a configuration is known to be Search-R1's."""


def names_of(dialect: str) -> list[Name]:
    """The rows of one dialect."""
    return [name for name in NAMES if dialect in name.defaults]


def defaults_of(dialect: str) -> dict[str, Any]:
    """Their keys with the defaults there, as far as they are known."""
    return {
        name.theirs: name.defaults[dialect]
        for name in names_of(dialect)
        if name.defaults[dialect] is not UNSAID
    }
