"""What the check of the model says of small random models of many families, and whether it is right.

Each family of transformers is built with windows and chunks shorter than an episode, saved, loaded as a run
loads it, with and without a LoRA adapter, and checked. Where the check lets it pass, a few episodes are
sampled and trained on: the sampler's log-probs must be the trainer's, and the first update must clip nothing.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.rows import on_policy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from srl.config.sections import Model
from srl.errors import UserError
from srl.rollout.cached_forward import CachedForward
from srl.rollout.engine import Sampling
from srl.rollout.torch_engine import TorchEngine
from srl.train.load_components import LoadedModel, load_policy
from srl.train.model_check import check_model
from srl.update.actor import ActorLoss, update_actor
from srl.update.batch import Batch, row_batch
from srl.update.logits import try_packing
from srl.update.logprobs import batched_stats
from srl.update.optimiser import Optimiser

LONGEST = 96
"""Tokens of the longest episode; every window is shorter."""
WINDOW = 12
SIZES: dict[str, Any] = {
    "vocab_size": 480, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_chunk_size": WINDOW,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_num_value_heads": 2, "linear_value_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "smollm3": {}, "olmo2": {}, "granite": {}, "glm4": {},
    "ernie4_5": {},
    "phi3": {}, "phi": {}, "stablelm": {}, "starcoder2": {"sliding_window": WINDOW}, "nemotron": {},
    "mistral": {"sliding_window": WINDOW},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW, "num_layers": 2},
    "gpt_neox": {}, "bloom": {}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {}, "gemma2": MIXED, "gemma3_text": MIXED,
    "gemma4_text": MIXED | {"vocab_size_per_layer_input": 480, "hidden_size_per_layer_input": 8,
                            "global_head_dim": 8, "num_kv_shared_layers": 0},
    "olmo3": MIXED, "exaone4": MIXED, "cohere": {}, "cohere2": MIXED,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": WINDOW},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
              "use_mamba_kernels": False, "num_experts": 4},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"], "num_local_experts": 4,
                                 "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "nemotron_h": {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 4,
                   "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8, "chunk_size": WINDOW},
    "qwen3_5_text": DELTA, "qwen3_next": DELTA | MOE | {"shared_expert_intermediate_size": 16},
    "minimax": {"block_size": WINDOW, "layer_types": ["linear_attention", "full_attention"]},
    "llama4_text": {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"],
                    "num_local_experts": 4, "intermediate_size_mlp": 48},
    "modernbert-decoder": {"layer_types": ["sliding_attention", "full_attention"], "local_attention": WINDOW,
                           "cls_token_id": 0, "sep_token_id": 1},
    "deepseek_v2": LATENT | {"qk_head_dim": 16, "topk_method": "greedy"}, "deepseek_v3": LATENT,
    "phimoe": {"num_local_experts": 4}, "mixtral": {"num_local_experts": 4}, "olmoe": MOE,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 16}, "qwen3_moe": MOE,
    "glm4_moe": {**LATENT, "num_key_value_heads": 2}, "gpt_oss": MIXED | {"num_local_experts": 4},
}  # fmt: skip


def build(family: str) -> PreTrainedModel:
    """A random model of a family, in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def measure(directory: Path, rank: int) -> dict[str, Any]:
    """What the check says of the model in `directory`, and what sampling and training then show."""
    said = Said()
    logging.getLogger("srl").addHandler(said)
    try:
        policy = load_policy(Model(path=str(directory), lora_rank=rank), lambda note: None)
        _move_adapter(policy.model)
        engine = TorchEngine(policy.model, policy.codec, max_num_seqs=4, max_model_len=LONGEST)
        check_model(policy.model, LONGEST, said.lines.append)
    except UserError as error:
        return {"outcome": "refused", "why": str(error)}
    finally:
        logging.getLogger("srl").removeHandler(said)
    rows, sampled = asyncio.run(_episodes(engine))
    engine.reset()
    return {
        "cached": isinstance(engine._forward, CachedForward), "why": said.lines,
        "packed": try_packing(policy.model, LONGEST),
        "outcome": "safe" if said.lines else "right", **train(policy, rows, sampled),
    }  # fmt: skip


class Said(logging.Handler):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _move_adapter(model: PreTrainedModel) -> None:
    """Give an adapter, which starts as the identity, an effect."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)


async def _episodes(engine: TorchEngine) -> tuple[list[list[int]], list[list[float]]]:
    """Ids, and the sampler's log-probs (0 where it sampled nothing), of episodes of two turns."""

    async def episode(number: int, length: int) -> tuple[list[int], list[float]]:
        random = np.random.default_rng(number)
        ids = random.integers(2, 470, length).tolist()
        logprobs = [0.0] * length
        for turn in range(2):
            said = await engine.generate(f"e{number}", list(ids), Sampling(max_tokens=12, key=(number, turn)))
            read = random.integers(2, 470, 5).tolist()
            ids += [*said.token_ids, *read]
            logprobs += [*said.logprobs, *[0.0] * len(read)]
        engine.finish(f"e{number}")
        return ids, logprobs

    played = await asyncio.gather(*(episode(number, 4 + 13 * number) for number in range(4)))
    return [ids for ids, _ in played], [logprobs for _, logprobs in played]


def train(policy: LoadedModel, rows: list[list[int]], sampled: list[list[float]]) -> dict[str, float]:
    """The largest gap between sampled and trained log-probs, and the first update's share of clips."""
    batch: Batch = row_batch(rows, policy.model.device)
    width = batch.input_ids.shape[1]
    theirs = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in sampled])
    mask = (theirs != 0).float()
    old = batched_stats(policy.model, batch, mask, max_tokens=1000).logprobs
    advantages = mask * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    experience = on_policy(batch, mask, advantages, old)
    optimiser = Optimiser(policy.model.parameters(), lr=1e-4)
    metrics = update_actor(policy.model, optimiser, experience, loss=ActorLoss(), mini_batch_rows=4)
    return {
        "gap": float((old - theirs)[mask != 0].abs().max()), "clipfrac": metrics["actor/pg_clipfrac"],
        "grad_norm": metrics["actor/grad_norm"],
    }  # fmt: skip
