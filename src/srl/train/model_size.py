"""The sizes of a run's networks and their parameter counts, without loading any weights.

A name in `PUBLISHED` needs no files at all: the dry run of a preset works before its model is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from srl.config import Config
from srl.errors import UserError, error_line
from srl.models.check import context_of
from srl.models.hub import HubName, fetched
from srl.models.load import count_parameters, of_run, pick_device, pick_dtype
from srl.models.weights import add_lora
from srl.update.critic import Critic

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_COLUMNS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip
_BASE = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, True),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 11008, 151936, 32768, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 18944, 152064, 131072, False),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 48, 40, 8, 13824, 152064, 131072, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 64, 40, 8, 27648, 152064, 131072, False),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 28, 24, 8, 8192, 128256, 131072, True),
}
_INSTRUCT = {"qwen2": {"max_position_embeddings": 32768}, "llama": {}}
"""Base and instruct models differ in their context alone."""

PUBLISHED: dict[str, dict[str, Any]] = {}
"""Published `config.json` of the models that presets name."""
for _name, _row in _BASE.items():
    PUBLISHED[_name] = dict(zip(_COLUMNS, _row, strict=True))
    PUBLISHED[f"{_name}-Instruct"] = PUBLISHED[_name] | _INSTRUCT[str(_row[0])]


@dataclass(frozen=True, slots=True)
class Shape:
    """The policy's sizes, and the parameter counts of the run's networks.

    `parameters` are the policy's without the LoRA adapter, `body` those without embeddings and head as well.
    `trainable` are what its training changes: the adapter's alone, where there is one. `critic` and
    `reference` are held beside the policy; what the critic shares with the policy does not count, and
    `critic_trained` of it are trained. `tied` is whether the head is the embedding. `itemsize` is the bytes
    of a number in a pass, `attention` its implementation.
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
    critic_trained: int
    reference: int
    tied: bool
    attention: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


def shape_of(config: Config, path: str | Path, *, needs_critic: bool) -> Shape:
    """The shape of a run that starts from the model `path`; its networks are built on the meta device.

    Of a model on the hub that is not in `PUBLISHED`, its `config.json` is fetched. Raises UserError.
    """
    from srl.train.rl import critic_options

    settings = config.model
    dtype = pick_dtype(settings.dtype, pick_device(settings.device))
    policy = meta_model(config, path, dtype)
    tables = [policy.get_input_embeddings(), policy.get_output_embeddings()]
    outside = sum({id(table.weight): table.weight.numel() for table in tables if table is not None}.values())
    parameters = count_parameters(policy)
    if settings.lora_rank > 0:
        add_lora(policy, settings.lora_rank, settings.lora_alpha, settings.lora_target_modules)
    attention = settings.attn_implementation
    shared, critic = {id(weight) for weight in policy.parameters()}, list[nn.Parameter]()
    if needs_critic:
        weights = Critic(policy, **critic_options(config)).parameters()
        critic = [weight for weight in weights if id(weight) not in shared]
    sizes = policy.config.get_text_config()
    heads = sizes.num_attention_heads
    return Shape(
        kind=sizes.model_type, layers=sizes.num_hidden_layers, width=sizes.hidden_size, heads=heads,
        kv_heads=getattr(sizes, "num_key_value_heads", None) or heads,
        head_dim=getattr(sizes, "head_dim", None) or sizes.hidden_size // heads,
        ffn=getattr(sizes, "intermediate_size", None) or 4 * sizes.hidden_size,
        vocabulary=sizes.vocab_size, context=context_of(sizes),
        itemsize=dtype.itemsize, parameters=parameters, body=parameters - outside,
        adapter=count_parameters(policy) - parameters, trainable=count_parameters(policy, trainable=True),
        critic=sum(weight.numel() for weight in critic),
        critic_trained=sum(weight.numel() for weight in critic if weight.requires_grad),
        reference=_reference(config, parameters, dtype), tied=outside <= sizes.vocab_size * sizes.hidden_size,
        attention=policy.config._attn_implementation if attention == "auto" else attention,
    )  # fmt: skip


def _reference(config: Config, parameters: int, dtype: torch.dtype) -> int:
    """Parameters of the reference: none without KL, or where it is the policy without its adapter."""
    if not config.needs_reference:
        return 0
    if config.ref.path is not None:
        return count_parameters(meta_model(config, config.ref.path, dtype))
    return 0 if config.model.lora_rank > 0 else parameters


def meta_model(config: Config, path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `path` on the meta device, which has shapes and no data."""
    from transformers import AutoModelForCausalLM

    trust = config.model.trust_remote_code
    attention = None if config.model.attn_implementation == "auto" else "eager"
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                _sizes(path, trust), dtype=dtype, trust_remote_code=trust, attn_implementation=attention
            )
    except UserError:
        raise
    except Exception as error:
        line = error_line(error)
        raise UserError(f"{path}: its config.json describes no causal language model: {line}") from error


def _sizes(path: str | Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The `config.json` of a directory, a published model, or a model on the hub."""
    from transformers import AutoConfig

    if (Path(path) / "config.json").is_file():
        return AutoConfig.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=trust_remote_code
        )
    if str(path) in PUBLISHED:
        return AutoConfig.for_model(**PUBLISHED[str(path)])
    if name := HubName.parse(path):
        return _sizes(fetched(name, "config", trust_remote_code=trust_remote_code), trust_remote_code)
    raise UserError(
        f"no model directory {path} (expected a config.json in it) {of_run(Path(path))}",
        key="model.path", hint="a directory, or ORG/NAME of the Hugging Face hub",
    )  # fmt: skip
