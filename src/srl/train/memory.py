"""Whether a run fits its memory: what each part takes in rollout and update, and what to set if not.

Nothing is loaded: bytes are counted from the shape of the model. Weights, gradients, optimiser states and the
KV cache are counted as they are allocated; temporaries are an upper estimate (Korthikanti et al. 2022, arXiv
2205.05198, section 4, for a layer with RMSNorm, rotary positions, grouped-query attention and a gated
feed-forward), which tests hold to measured peaks. On verl FSDP shards float32 weights, gradients and moments
over the workers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from srl.config import Config, sections
from srl.config.keys import value_of
from srl.errors import UserError, error_line
from srl.models.check import context_of
from srl.models.hub import HubName, fetched
from srl.models.load import check_directory, count_parameters, pick_device, pick_dtype
from srl.models.weights import add_lora
from srl.rollout.cached_forward import PADDED_TOKENS
from srl.rollout.kv_cache import BLOCK
from srl.train.make_missing import PRESETS
from srl.update.critic import Critic
from srl.update.logprobs import CHUNK, FLOAT32_LOGITS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PUBLISHED: dict[str, dict[str, Any]] = json.loads((PRESETS / "published.json").read_text(encoding="utf-8"))
"""`config.json` of the models that presets name, with the context that base and instruct models share: their
dry run works before they are downloaded."""
GIB = 2**30
GPUS = {"16 GB": 15.6, "24 GB": 24.0, "48 GB": 45.0, "80 GB": 79.6, "141 GB": 139.0}
"""GiB of the usual GPUs, for a plan made on a machine without one."""
USABLE = 0.9
"""Share of a device's memory that a run can plan with; libraries and fragmentation take the rest."""
FLOAT32, MOMENTS = 4, 8
"""Bytes of a number in float32, and of AdamW's two moments."""
SAMPLED_LOGIT = 16
"""Bytes per logit of the rollout: logits, scaled logits, log-probs and probabilities in float32."""
LOGIT = (12, 20)
"""Bytes per logit in float32 of an update on the local backend, without and with the entropy's gradient."""
VERL_LOGIT = {2: (12, 26), 4: (20, 28)}
"""The same of an update in verl, by the bytes of a number of the pass."""
FUSED_LOGIT = 4
"""Numbers per logit with flash attention, which brings verl fused kernels."""
SERVER = 4 * GIB
"""A vLLM server beside its weights and cache."""

Phase = Literal["rollout", "update"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run is spread: over `workers` devices that train, on verl with FSDP over `shards` of them.
    Where it is `served`, vLLM generates with a copy of the model on `copy_gpus`."""

    verl: bool = False
    cpu: bool = False
    served: bool = False
    workers: int = 1
    shards: int = 1
    copy_gpus: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory: bytes at the peak of generating and of training, and how they are counted."""

    name: str
    rollout: int
    update: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """The policy's sizes, and the parameter counts of the run's networks.

    `parameters` are the policy's without its LoRA adapter, `body` those without embeddings and head as well.
    `critic` and `reference` are held beside the policy; what the critic shares with the policy does not
    count, and `critic_trained` of it are trained. `itemsize` is the bytes of a number in a pass.
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
    attention: str
    parameters: int
    body: int
    adapter: int
    critic: int
    critic_trained: int
    reference: int

    @property
    def trainable(self) -> int:
        """Parameters of the policy that training changes: an adapter's alone, where there is one."""
        return self.adapter or self.parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


def shape_of(config: Config, path: str | Path, *, needs_critic: bool) -> Shape:
    """The shape of a run that starts from the model `path`; its networks are built on the meta device.

    Of a model on the hub that is not in `PUBLISHED`, its `config.json` is fetched. Raises UserError.
    """
    from srl.train.rl import critic_options

    section, dtype = config.model, pick_dtype(config.model.dtype, pick_device(config.model.device))
    policy = meta_model(config, path, dtype)
    tables = [policy.get_input_embeddings(), policy.get_output_embeddings()]
    outside = sum(weight.numel() for weight in {table.weight for table in tables if table is not None})
    parameters = count_parameters(policy)
    if section.lora_rank > 0:
        add_lora(policy, section.lora_rank, section.lora_alpha, section.lora_target_modules)
    shared = set(map(id, policy.parameters()))
    critic = list(Critic(policy, **critic_options(config)).parameters()) if needs_critic else []
    critic = [weight for weight in critic if id(weight) not in shared]
    has_reference = config.needs_reference and (section.lora_rank == 0 or config.ref.path is not None)
    sizes, attention = policy.config.get_text_config(), section.attn_implementation
    heads = sizes.num_attention_heads
    return Shape(
        kind=sizes.model_type, layers=sizes.num_hidden_layers, width=sizes.hidden_size, heads=heads,
        kv_heads=getattr(sizes, "num_key_value_heads", None) or heads,
        head_dim=getattr(sizes, "head_dim", None) or sizes.hidden_size // heads,
        ffn=getattr(sizes, "intermediate_size", None) or 4 * sizes.hidden_size,
        vocabulary=sizes.vocab_size, context=context_of(sizes), itemsize=dtype.itemsize,
        attention=policy.config._attn_implementation if attention == "auto" else attention,
        parameters=parameters, body=parameters - outside, adapter=count_parameters(policy) - parameters,
        critic=sum(weight.numel() for weight in critic),
        critic_trained=sum(weight.numel() for weight in critic if weight.requires_grad),
        reference=parameters if has_reference else 0,
    )  # fmt: skip


def meta_model(config: Config, path: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `path` on the meta device, which has shapes and no data. Raises UserError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, trust = HubName.parse(path), config.model.trust_remote_code
    published = PUBLISHED.get(str(path).removesuffix("-Instruct")) if name else None
    if not name:
        check_directory(Path(path), trust)
    elif not published:
        path = fetched(name, "config", trust_remote_code=trust)
    attention = None if config.model.attn_implementation == "auto" else "eager"
    read = {"trust_remote_code": trust, "local_files_only": True}
    try:
        sizes = AutoConfig.for_model(**published) if published else AutoConfig.from_pretrained(path, **read)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                sizes, dtype=dtype, trust_remote_code=trust, attn_implementation=attention
            )
    except Exception as error:
        line = error_line(error)
        raise UserError(f"{path}: its config.json describes no causal language model: {line}") from error


def total(parts: Iterable[Part], phase: Phase) -> int:
    return sum(getattr(part, phase) for part in parts)


def footprint(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """The memory of one device. vLLM comes on top (`server_bytes`): it has a fixed share.

    What verl offloads is there in an update only; FSDP keeps the reference in the machine's memory; one
    network at a time has gradients.
    """
    trained, weight = max(shape.trainable, shape.critic_trained), FLOAT32 if layout.verl else shape.itemsize
    optimiser = MOMENTS + (FLOAT32 if weight < FLOAT32 else 0)  # with a copy in float32
    away = layout.verl and config.cluster.param_offload
    states_away = layout.verl and config.cluster.optimizer_offload
    rows = (
        ("policy weights", shape.parameters + shape.adapter, weight, away),
        ("critic weights", shape.critic, weight, away),
        ("reference weights", 0 if layout.verl else shape.reference, weight, not layout.cpu),
        ("policy optimiser", shape.trainable, optimiser, states_away),
        ("critic optimiser", shape.critic_trained, optimiser, states_away),
        ("gradients", trained, FLOAT32, True),
    )
    cut, parts = f" / {layout.shards}" if layout.shards > 1 else "", []
    for name, count, size, is_away in rows:
        share = -(-count * size // layout.shards)
        parts.append(Part(name, 0 if is_away else share, share, f"{count / 1e6:,.1f} M × {size} bytes{cut}"))
    parts += [] if layout.served else rollout_parts(shape, config, layout)
    networks = (config.actor, config.critic) if shape.critic else (config.actor,)
    peaks = [pass_parts(shape, config, layout, section) for section in networks]
    if layout.verl:
        step = -(-8 * trained // layout.shards)
        peaks.append([Part("optimiser step", 0, step, "gradients and a root of moments in float32")])
    else:
        peaks.append([saved_model(shape, layout)])
    parts += max(peaks, key=lambda parts: total(parts, "update"))
    return [part for part in parts if part.rollout or part.update]


def rollout_parts(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """The torch engine's KV cache, given back before the update, and temporaries.

    The cache (`srl.rollout.kv_cache`) has whole blocks of positions for every slot and a spare one. The
    temporaries are of sampling a token for every episode, and of one layer over prompts and search results
    with a mask and the keys and values of its episodes; a CPU needs the larger of the two. On a GPU sampling
    has its own, and episodes that read results together have keys and values once more, for each head.
    """
    slots, longest, size = config.rollout.max_num_seqs, config.data.max_episode_tokens, shape.itemsize
    cache = (slots + 1) * -(-longest // BLOCK) * BLOCK * shape.kv_bytes
    sampling = SAMPLED_LOGIT * slots * shape.vocabulary
    tokens, heads = max(PADDED_TOKENS["cpu" if layout.cpu else "cuda"], longest), slots * shape.kv_heads
    if not layout.cpu:
        heads += min(slots, -(-tokens // config.rollout.max_obs_length)) * shape.heads
    inner = 2 * shape.width + max(4 * shape.heads * shape.head_dim, 3 * shape.ffn)
    layer = tokens * (longest * (1 + size) + inner * size) + 2 * heads * longest * shape.head_dim * size
    buffers = max(sampling, layer) if layout.cpu else sampling + layer
    buffers += shape.body * size if shape.adapter and layout.cpu else 0  # aside, while an adapter is merged
    how = f"{slots} episodes × {longest:,} tokens × {shape.kv_bytes:,} bytes"
    return [Part("KV cache", cache, 0, how), Part("rollout buffers", buffers, 0, "logits, one layer")]


def saved_model(shape: Shape, layout: Layout) -> Part:
    """A first checkpoint, which is loaded anew: on a GPU one layer at a time. An adapter is merged for it:
    the largest matrix in float32, its change twice, the matrix before it."""
    merged = shape.width * shape.ffn * (FLOAT32 + 3 * shape.itemsize) if shape.adapter else 0
    on_gpu = shape.parameters - shape.body + shape.body // shape.layers
    loaded = (shape.parameters if layout.cpu else on_gpu) * shape.itemsize
    return Part("saved model", 0, loaded + max(merged, 64 * shape.vocabulary * FLOAT32), "loaded anew")


def pass_tokens(config: Config, layout: Layout, section: sections.Actor | sections.Critic) -> int:
    """The most tokens of one forward and backward pass of a worker."""
    longest = config.data.max_episode_tokens
    rows = min(section.ppo_mini_batch_size, config.data.train_batch_size) * config.rollout.n
    return min(max(section.ppo_max_token_len, longest), max(1, rows // layout.workers) * longest)


def pass_parts(
    shape: Shape, config: Config, layout: Layout, section: sections.Actor | sections.Critic
) -> list[Part]:
    """What one forward and backward pass of a network takes: what its layers keep for the backward pass, and
    the larger of a layer's backward pass, recomputed first where nothing is kept, and the logits'.

    A layer keeps per token two norms (their input in float32, their output twice), queries, keys and values
    for each query head, the attention's output, the original keys and values, and the four tensors of the
    gated feed-forward. Eager attention keeps its weights, in float32 and as used. Logits are in verl those of
    all tokens, locally those of one chunk with their gradient, and a part of them in float32.
    """
    size, tokens, is_actor = shape.itemsize, pass_tokens(config, layout, section), section is config.actor
    recomputed, wide = config.model.gradient_checkpointing, shape.heads * shape.head_dim
    flash, in_float32 = "flash" in config.model.attn_implementation, config.model.cast_lm_head_to_fp32
    layer = shape.width * (8 + 4 * size) + 4 * (wide + shape.ffn) * size
    layer += 2 * shape.kv_heads * shape.head_dim * size
    kept = shape.layers * (shape.width * size if recomputed else layer) + shape.width * (4 + 2 * size)
    if shape.attention == "eager":
        weights = config.data.max_episode_tokens * shape.heads * (FLOAT32 + size)
        kept += weights * (1 if recomputed else shape.layers)
    buffers, whole = tokens * layer * (5 if recomputed else 1) // 4, 0
    if is_actor:
        entropy = config.actor.entropy_coeff != 0
        chunk = min(CHUNK, tokens) * shape.vocabulary
        logits = 2 * chunk * (FLOAT32 if in_float32 else size)
        logits += LOGIT[entropy] * min(chunk, FLOAT32_LOGITS["cpu" if layout.cpu else "cuda"])
        if layout.verl:
            logits = FUSED_LOGIT * size if flash else VERL_LOGIT[size][entropy]
            logits *= tokens * shape.vocabulary
        buffers = max(buffers, logits)
        head = 2 * FLOAT32 if in_float32 and size < FLOAT32 else 0  # and its gradient
        head += 0 if layout.verl or shape.adapter else size  # the gradient, before it is accumulated
        whole = head * shape.width * shape.vocabulary
    if layout.verl:  # embedding, head, two layers and one layer's gradients, unsharded
        one, root = shape.body // shape.layers, shape.parameters - shape.body
        whole += (root + 2 * one) * size + (0 if shape.adapter else (root + one) * (size + FLOAT32))
    how = f"{'policy' if is_actor else 'critic'}, {tokens:,} tokens × {kept:,} bytes"
    return [
        Part(
            "activations", 0, tokens * kept, f"{how}, without padding" if layout.verl and not flash else how
        ),
        Part("backward buffers", 0, buffers, "logits, or one layer"),
        Part("whole weights", 0, whole, "unsharded layers; the head's gradient"),
    ]


def server_bytes(shape: Shape, config: Config, layout: Layout, memory: float) -> float:
    """What vLLM takes of a GPU with `memory` bytes while it generates: a share, which may be of what other
    parts cannot use, and in which itself, its weights and an episode must fit (else infinite)."""
    weights = (shape.parameters + shape.adapter) * shape.itemsize
    episode = config.data.max_episode_tokens * shape.kv_bytes
    share = config.rollout.gpu_memory_utilization * memory
    fits = SERVER + (weights + episode) / layout.copy_gpus <= share
    return share - (1 - USABLE) * memory if fits else float("inf")


def settings_that_fit(config: Config, shape: Shape, layout: Layout, memory: int) -> dict[str, Any] | None:
    """The first settings with which both phases fit a device of so many bytes; None: none is enough. They
    leave as it is what is learned."""
    networks = ("actor", "critic") if shape.critic else ("actor",)
    lengths = {f"{name}.ppo_max_token_len": config.data.max_episode_tokens for name in networks}
    offload = {"cluster.param_offload": True, "cluster.optimizer_offload": True}
    counts = [count for count in (64, 32, 16, 8, 4, 2, 1) if count < config.rollout.max_num_seqs]
    changes: dict[Phase, list[dict[str, Any]]] = {
        "update": [{}, {"model.gradient_checkpointing": True}, lengths],
        "rollout": [{}, offload] if layout.verl else [{}, *({"rollout.max_num_seqs": n} for n in counts)],
    }
    settings = dict[str, Any]()
    for phase in changes:
        for change in changes[phase]:
            settings |= {key: value for key, value in change.items() if value_of(config, key) != value}
            changed = config.with_settings(settings)
            peak: float = total(footprint(shape, changed, layout), phase)
            if layout.served and phase == "rollout":
                peak += server_bytes(shape, changed, layout, memory)
            if peak <= USABLE * memory:
                break
        else:
            return None
    return settings


def available_memory() -> int | None:
    """Bytes of memory that Linux reports as available; None elsewhere."""
    path = Path("/proc/meminfo")
    match = re.search(r"MemAvailable: +(\d+) kB", path.read_text()) if path.is_file() else None
    return int(match[1]) * 1024 if match else None


def gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.1f} MiB"
