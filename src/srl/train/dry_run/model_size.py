"""What a run's networks look like: their sizes and how many numbers they hold, with no weight loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from srl.config import Config
from srl.errors import UserError
from srl.model import add_lora, count_parameters, of_run, one_line, pick_device, pick_dtype
from srl.train.dry_run.published_models import PUBLISHED
from srl.update.critic import Critic

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Shape:
    """The policy's sizes, and the numbers in each network of the run.

    `adapter` counts the LoRA adapter's, `trainable` those that the policy's training changes (the
    adapter's alone, where there is one), `critic` and `reference` those of networks held beside it.
    `body` are the policy's without embeddings, head and adapter.
    """

    kind: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int | None
    itemsize: int
    parameters: int
    body: int
    adapter: int
    trainable: int
    critic: int
    reference: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    @property
    def repeats(self) -> int:
        """How many query heads share a key head."""
        return self.heads // self.kv_heads


def shape_of(config: Config, path: str | Path, *, needs_critic: bool) -> Shape:
    """The shapes of a run of `config` that starts from the model `path`, built without memory.

    Raises UserError where there is neither a model directory nor a published shape of that name.
    """
    settings = config.model
    dtype = pick_dtype(settings.dtype, pick_device(settings.device))
    policy = _built(config, path, dtype)
    parameters, outside = count_parameters(policy), _embeddings(policy)
    if settings.lora_rank > 0:
        add_lora(policy, settings.lora_rank, settings.lora_alpha, settings.lora_target_modules)
    sizes = policy.config.get_text_config()
    heads = sizes.num_attention_heads
    return Shape(
        kind=sizes.model_type, layers=sizes.num_hidden_layers, width=sizes.hidden_size, heads=heads,
        kv_heads=getattr(sizes, "num_key_value_heads", None) or heads,
        head_dim=getattr(sizes, "head_dim", None) or sizes.hidden_size // heads,
        ffn=getattr(sizes, "intermediate_size", None) or 4 * sizes.hidden_size,
        vocabulary=sizes.vocab_size, context=getattr(sizes, "max_position_embeddings", None),
        itemsize=dtype.itemsize, parameters=parameters, body=parameters - outside,
        adapter=count_parameters(policy) - parameters, trainable=count_parameters(policy, trainable=True),
        critic=count_parameters(Critic(policy)) if needs_critic else 0,
        reference=_reference(config, parameters, dtype),
    )  # fmt: skip


def _reference(config: Config, parameters: int, dtype: torch.dtype) -> int:
    """Numbers of a reference held beside the policy: none without KL, or where adapters switch off."""
    if not (config.algorithm.use_kl_in_reward or config.actor.use_kl_loss):
        return 0
    if config.ref.path is not None:
        return count_parameters(_built(config, config.ref.path, dtype))
    return 0 if config.model.lora_rank > 0 else parameters


def _embeddings(model: PreTrainedModel) -> int:
    """Numbers of the embedding and the head, one table where they are tied."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    return sum({id(table.weight): table.weight.numel() for table in tables if table is not None}.values())


def _built(config: Config, path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `path` on the meta device: shapes and no weights."""
    from transformers import AutoModelForCausalLM

    trust = config.model.trust_remote_code
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                _sizes(path, trust), dtype=dtype, trust_remote_code=trust, attn_implementation="eager"
            )
    except UserError:
        raise
    except Exception as error:
        line = one_line(error)
        raise UserError(f"{path}: no causal language model can be made of its config.json: {line}") from error


def _sizes(path: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig

    if (Path(path) / "config.json").is_file():
        return AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    if str(path) in PUBLISHED:
        return AutoConfig.for_model(**PUBLISHED[str(path)])
    raise UserError(
        f"no model directory {path}: expected one with a config.json; fetch a model into one first, "
        "for example with `hf download ORG/NAME --local-dir DIRECTORY`, and give it with --model"
        f"{of_run(Path(path))}"
    )
