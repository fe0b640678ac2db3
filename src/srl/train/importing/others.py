"""Keys without one of ours: what srl does in another way, and what verl 0.9.1 knows and may keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase


def _in(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


_ROLLOUT = "actor_rollout_ref.rollout"

REPLACED: Mapping[str, list[str]] = {
    "runs and their checkpoints lie in the workspace, and srl train --resume goes on": [
        *_in("trainer", "default_local_dir default_hdfs_dir resume_mode resume_from_path"),
        *_in("trainer", "del_local_ckpt_after_load remove_previous_ckpt_in_save max_critic_ckpt_to_keep"),
        *_in("trainer", "checkpoint_callback_class esi_redundant_time"),
        "actor_rollout_ref.actor.checkpoint.*",
        "critic.checkpoint.*",
    ],
    "every episode is in the run's log, and srl inspect shows it": [
        *_in("trainer", "rollout_data_dir validation_data_dir log_val_generations"),
        f"{_ROLLOUT}.trace.*",
    ],
    "ppo_max_token_len says how much a pass takes, and what is computed does not depend on it": [
        *_in("*", "ppo_micro_batch_size ppo_micro_batch_size_per_gpu forward_micro_batch_size*"),
        *_in("*", "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz"),
        *_in("*", "use_dynamic_bsz log_prob_max_token_len_per_gpu forward_max_token_len_per_gpu"),
    ],
    "srl reads the questions itself": [
        *_in("data", "tokenizer prompt_key return_raw_input_ids return_raw_chat return_full_prompt"),
        *_in("data", "reward_fn_key truncation custom_cls.* tool_config_path function_tool_path use_shm"),
        *_in("data", "dataloader_num_workers filter_overlong_prompts_workers gen_batch_size"),
        *_in("data", "validation_shuffle trust_remote_code *image* *video* *audio* *multi_modal*"),
        *_in("data", "mm_processor_kwargs* apply_chat_template_kwargs*"),
    ],
    "the episodes are srl's own": [
        *_in(_ROLLOUT, "multi_turn.* agent.* mode do_sample val_kwargs.* ignore_eos prompt_length"),
        *_in(_ROLLOUT, "response_length calculate_log_probs over_sample_rate skip_tokenizer_init"),
        *_in(_ROLLOUT, "load_format seed max_model_len max_num_batched_tokens dtype"),
    ],
    "it follows from other keys": [
        *_in("*", "rollout_n data_loader_seed use_remove_padding grad_offload optim.total_training_steps"),
        *_in("critic", "enable nccl_timeout strategy shuffle fsdp.param_offload fsdp.optimizer_offload"),
        *_in("critic.model", "tokenizer_path external_lib enable_gradient_checkpointing fsdp_config.*"),
        *_in("critic.model", "override_config* trust_remote_code lora_rank lora_alpha target_modules"),
        *_in("actor_rollout_ref", "hybrid_engine actor.shuffle ref.strategy"),
        "trainer.total_epochs",
    ],
    "srl starts verl itself, in its synchronous mode": [
        *_in("trainer", "use_v1 v1.* device"),
        *_in("ray_kwargs.ray_init", "runtime_env.*"),
        *("transfer_queue.*", "skip.*", "distillation.*", "hydra.*", "hydra/*", "ray_init.*"),
    ],
    "rewards are plugins: reward.weights": [
        *("reward.*", "reward_model.*", "custom_reward_function.*", "sandbox_fusion.*"),
    ],
}
"""Why keys are dropped, and which."""

_OPTIM = (
    "optimizer optimizer_impl min_lr* num_cycles zero_indexed_step override_optimizer_config* lr_decay_* "
    "lr_wsd_* lr_warmup_init muon_* exp_avg* main_grads_dtype use_checkpoint_opt_param_scheduler "
    "use_layer_wise_distributed_optimizer use_precision_aware_optimizer weight_decay_incr_style"
)
_ENGINE = (
    "strategy dtype model_dtype seed forward_only forward_prefetch fsdp_size full_determinism "
    "offload_policy reshard_after_forward use_orig_params use_torch_compile wrap_policy.* "
    "mixed_precision.* ulysses_sequence_parallel_size param_offload optimizer_offload qat.* "
    "turbo_config.* entropy_* pad_to_length* use_no_sync_for_gradient_accumulation"
)
_MODEL = (
    "custom_chat_template enable_activation_offload exclude_modules external_lib hf_config_path use_shm "
    "lora_adapter_path use_fused_kernels use_liger fused_kernel_options.* lora.* tiled_mlp.* mtp.* "
    "override_config*"
)
_ROLE = (
    "ulysses_sequence_parallel_size use_torch_compile use_fused_kernels entropy_* pad_to_length* "
    "profiler.* megatron.* veomni.* torchtitan.* mindspeed.* fsdp_turbo.*"
)

_KNOWN: list[str] = [
    "actor_rollout_ref.nccl_timeout",
    *_in("actor_rollout_ref.model", _MODEL),
    *_in("actor_rollout_ref.actor", _ROLE),
    *_in("actor_rollout_ref.actor", "policy_loss.* calculate_entropy calculate_sum_pi_squared qat.*"),
    *_in("actor_rollout_ref.actor", "freeze_vision_tower tau_pos tau_neg use_prefix_grouper"),
    *_in("actor_rollout_ref.actor.optim", _OPTIM),
    *_in("actor_rollout_ref.actor.fsdp_config", _ENGINE),
    *_in("actor_rollout_ref.ref", _ROLE),
    *_in("actor_rollout_ref.ref.fsdp_config", _ENGINE),
    *_in(_ROLLOUT, "top_k cudagraph_capture_sizes data_parallel_size disable_log_stats"),
    *_in(_ROLLOUT, "enable_chunked_prefill enable_prefix_caching enable_rollout_routing_replay"),
    *_in(_ROLLOUT, "enable_sleep_mode enforce_eager expert_parallel_size free_cache_engine"),
    *_in(_ROLLOUT, "full_determinism layered_summon logprobs_mode moe_load_balance_metrics_interval"),
    *_in(_ROLLOUT, "multi_stage_wake_up nnodes n_gpus_per_node pipeline_model_parallel_size"),
    *_in(_ROLLOUT, "quantization quantization_config_file router_config_path scheduling_policy"),
    *_in(_ROLLOUT, "checkpoint_engine.* disaggregation.* engine_kwargs.* prometheus.* profiler.* qat* mtp*"),
    *_in("algorithm", "use_pf_ppo pf_ppo.* filter_groups.* rollout_correction.* norm_adv_by_std_in_grpo"),
    *_in("critic", _ROLE),
    "critic.loss_scale_factor",
    *_in("critic.optim", _OPTIM),
    *_in("critic.fsdp", _ENGINE),
    *_in("critic.model", _MODEL),
    *_in("trainer", "balance_batch ray_wait_register_center_timeout"),
    *_in("ray_kwargs", "timeline_json_file ray_init.num_cpus ray_init.num_gpus ray_init.include_dashboard"),
    "global_profiler.*",
]
"""Keys of verl 0.9.1 that may stand below `verl:`."""


def why_replaced(key: str) -> str | None:
    """Why a key of theirs is dropped, or None where it is not one of those."""
    return next((why for why, patterns in REPLACED.items() if _matches(key, patterns)), None)


def verl_knows(key: str) -> bool:
    """Whether verl 0.9.1 has the key, for one that is neither in the table nor dropped."""
    return _matches(key, _KNOWN)


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
