"""What the check of the model says of small random models of many families, and whether it is right.

Each family of transformers is built with windows and chunks shorter than an episode, saved, loaded as a run
loads it, with and without a LoRA adapter, and checked. Where the check lets it pass, a few episodes are
sampled and trained on: the sampler's log-probs must be the trainer's, and the first update must clip nothing.
"""

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
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {}, "starcoder2": {}, "mistral": {"sliding_window": WINDOW}, "gpt2": {"n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 256}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma2": MIXED, "gemma3_text": MIXED, "olmo3": MIXED, "exaone4": MIXED, "cohere2": MIXED,
    "gemma4_text": MIXED | {"vocab_size_per_layer_input": 480, "hidden_size_per_layer_input": 8,
                            "global_head_dim": 8, "num_kv_shared_layers": 0},
    "llama4_text": {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"],
                    "num_local_experts": 4, "intermediate_size_mlp": 48},
    "modernbert-decoder": {"layer_types": ["sliding_attention", "full_attention"], "local_attention": WINDOW,
                           "cls_token_id": 0, "sep_token_id": 1},
    "phimoe": {"num_local_experts": 4}, "mixtral": {"num_local_experts": 4},
    "gpt_oss": MIXED | {"num_local_experts": 4},
}  # fmt: skip


def of_sizes(family: str, **sizes: Any) -> PreTrainedModel:
    """A random model in float32, of the small sizes but for `sizes`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def build(family: str) -> PreTrainedModel:
    return of_sizes(family, **FAMILIES[family])


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
