"""Our sections model, data, rollout and eval in verl's keys."""

from __future__ import annotations

from typing import Any

from srl.config import Config
from srl.config.checks import algorithm_plugin
from srl.train.verl.job import Job
from srl.train.verl.setting import (
    MODEL,
    ROLLOUT,
    Rows,
    everywhere,
    is_megatron,
    longest,
    model_sizes,
    precision,
    rollout_name,
)

VLLM_TOKENS = 8192
"""verl's own limit of tokens in one of vLLM's passes, which must not be less than its sequences."""

VLLM_CPU_CACHE = 2**30
"""Bytes of keys and values of a copy without a GPU."""


def acting(config: Config, job: Job) -> Rows:
    yield from _model(config, job, MODEL)
    if algorithm_plugin(config.algorithm.name).needs_critic:
        yield from _model(config, job, "critic.model")
    yield from _lora(config, job)
    yield from _data(config)
    yield from _sampling(config)
    yield from _validation(config)
    yield from _engine(config, job)


def _model(config: Config, job: Job, verl: str) -> Rows:
    """The policy, and the critic, which starts as a copy of it with a head of zeros.

    Padding is taken out only with flash attention: others would see one long row with a mask of
    its square. Dropout, which verl would leave on in its updates, is set to 0.
    """
    model = config.model
    attention = model.attn_implementation
    changed = {"attn_implementation": attention, **without_dropout(model_sizes(model.path))}
    yield f"{verl}.path", model.path and everywhere(model.path), "model.path"
    yield f"{verl}.tokenizer_path", everywhere(job.tokenizer), "model.tokenizer"
    yield f"{verl}.trust_remote_code", model.trust_remote_code, "model.trust_remote_code"
    yield (
        f"{verl}.enable_gradient_checkpointing",
        model.gradient_checkpointing,
        "model.gradient_checkpointing",
    )
    yield f"{verl}.override_config", changed, "model.attn_implementation"
    yield (
        f"{verl}.use_remove_padding",
        is_megatron(config) or "flash" in attention,
        "model.attn_implementation",
    )


def without_dropout(sizes: dict[str, Any]) -> dict[str, Any]:
    """Every rate of dropout above 0 in a model's configuration, sections within it included, as 0."""
    rates = {name for name, value in sizes.items() if "drop" in name and isinstance(value, int | float)}
    inner = {name: without_dropout(value) for name, value in sizes.items() if isinstance(value, dict)}
    return {name: 0.0 for name in sorted(rates) if sizes[name] > 0} | {k: v for k, v in inner.items() if v}


def _lora(config: Config, job: Job) -> Rows:
    """Adapters of the policy. The torch rollout takes whole weights, so they are merged for it."""
    model = config.model
    if model.lora_rank == 0:
        return
    if is_megatron(config):
        yield f"{MODEL}.lora.rank", model.lora_rank, "model.lora_rank"
        yield f"{MODEL}.lora.alpha", model.lora_alpha, "model.lora_alpha"
        return
    targets = model.lora_target_modules
    yield f"{MODEL}.lora_rank", model.lora_rank, "model.lora_rank"
    yield f"{MODEL}.lora_alpha", model.lora_alpha, "model.lora_alpha"
    yield (
        f"{MODEL}.target_modules",
        targets if isinstance(targets, str) else list(targets),
        "model.lora_target_modules",
    )
    if rollout_name(config, job) == "srl_torch":
        yield f"{MODEL}.lora.merge", True, "cluster.rollout"
    else:
        yield f"{ROLLOUT}.load_format", "safetensors", "model.lora_rank"


def _data(config: Config) -> Rows:
    """Our data set yields the questions in the order of the local backend; verl reads no file of it."""
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


def _sampling(config: Config) -> Rows:
    rollout = config.rollout
    yield f"{ROLLOUT}.n", rollout.n, "rollout.n"
    yield f"{ROLLOUT}.do_sample", True, ""
    yield f"{ROLLOUT}.temperature", rollout.temperature, "rollout.temperature"
    yield f"{ROLLOUT}.top_p", rollout.top_p, "rollout.top_p"
    yield f"{ROLLOUT}.top_k", -1, ""
    yield f"{ROLLOUT}.seed", config.trainer.seed, "trainer.seed"
    yield f"{ROLLOUT}.calculate_log_probs", True, ""
    yield f"{ROLLOUT}.agent.default_agent_loop", "srl_search", ""


def _validation(config: Config) -> Rows:
    temperature = config.eval.temperature
    yield f"{ROLLOUT}.val_kwargs.do_sample", temperature > 0, "eval.temperature"
    yield f"{ROLLOUT}.val_kwargs.temperature", temperature, "eval.temperature"
    yield f"{ROLLOUT}.val_kwargs.top_p", 1.0, ""
    yield f"{ROLLOUT}.val_kwargs.top_k", -1, ""
    yield f"{ROLLOUT}.val_kwargs.n", 1, ""


def _engine(config: Config, job: Job) -> Rows:
    """What generates, and how much of it at once on each copy of the model."""
    cluster, seqs = config.cluster, config.rollout.max_num_seqs
    yield f"{ROLLOUT}.name", rollout_name(config, job), "cluster.rollout"
    yield (
        f"{ROLLOUT}.tensor_model_parallel_size",
        cluster.tensor_model_parallel_size,
        ("cluster.tensor_model_parallel_size"),
    )
    yield (
        f"{ROLLOUT}.gpu_memory_utilization",
        cluster.gpu_memory_utilization,
        ("cluster.gpu_memory_utilization"),
    )
    yield f"{ROLLOUT}.dtype", precision(config, job), "model.dtype"
    yield f"{ROLLOUT}.max_model_len", longest(config), "data.max_response_length"
    yield f"{ROLLOUT}.max_num_seqs", seqs, "rollout.max_num_seqs"
    yield f"{ROLLOUT}.max_num_batched_tokens", max(VLLM_TOKENS, seqs), "rollout.max_num_seqs"
    if rollout_name(config, job) == "vllm":
        yield from _vllm(job)
    if rollout_name(config, job) == "sglang":
        yield f"{ROLLOUT}.skip_tokenizer_init", False, ""  # without a tokenizer it knows no stop strings
        yield f"{ROLLOUT}.engine_kwargs.sglang.tokenizer_path", everywhere(job.tokenizer), "model.tokenizer"


def _vllm(job: Job) -> Rows:
    """vLLM reads a tokenizer beside the model, unless it is given another; on processors it takes a share of
    the machine's memory for each copy, unless it is given bytes."""
    yield f"{ROLLOUT}.engine_kwargs.vllm.tokenizer", everywhere(job.tokenizer), "model.tokenizer"
    if job.cpu:
        yield f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes", VLLM_CPU_CACHE, ""
