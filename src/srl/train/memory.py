"""Whether a run fits its memory: what each part takes in rollout and update, and what to set if not.

Nothing is loaded: bytes are counted from the model's shape. Weights, gradients, optimiser states and the KV
cache are counted as they are allocated; temporaries are an upper estimate (Korthikanti et al. 2022, arXiv
2205.05198, section 4, for a layer with RMSNorm, rotary positions, grouped-query attention and a gated
feed-forward), which tests hold to measured peaks. On verl FSDP shards float32 weights, gradients and moments
over the workers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from srl.config import Config
from srl.config.sections import Actor, Critic
from srl.rollout.cached_forward import PADDED_TOKENS
from srl.rollout.kv_cache import BLOCK
from srl.rollout.torch_engine import SMALL_CACHE
from srl.train.model_size import Shape, shape_of
from srl.update.logprobs import CHUNK, FLOAT32_LOGITS, KEPT_LOGITS

GIB = 2**30
USABLE = 0.9
"""Share of a device's memory that a run can plan with; libraries and fragmentation take the rest."""
GPUS = {"16 GB": 15.6, "24 GB": 24.0, "48 GB": 45.0, "80 GB": 79.6, "141 GB": 139.0}
"""GiB of the usual GPUs, for a plan made on a machine without one."""
FLOAT32, MOMENTS = 4, 8
"""Bytes of a number in float32, and of AdamW's two moments."""
SAMPLED_LOGIT = 16
"""Bytes per logit of the rollout: logits, scaled logits, log-probs and probabilities in float32."""
LOGIT, ENTROPY = 12, 8
"""Bytes per logit in float32 of an update on the local backend: three tensors, two more where the entropy has
a gradient too."""
VERL_LOGIT = {2: (12, 26), 4: (20, 28)}
"""Bytes per logit of an update in verl, by the bytes of a number of the pass, without and with entropy."""
FUSED_LOGIT = 4
"""Numbers per logit with flash attention, which brings verl fused kernels."""
VLLM_TOKENS = 8192
"""verl's default for the tokens of one pass of vLLM."""
SERVER, BUCKET = 2 * GIB, 2 * GIB
"""verl: a vLLM server beside its weights and cache, and new weights on their way to it, before the cache."""

Phase = Literal["rollout", "update"]
PHASES: tuple[Phase, Phase] = ("update", "rollout")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a backend spreads a run. `workers` are the devices that train; FSDP shards over `shard_group` of
    them (0: all). A copy that generates is on `copy_gpus`."""

    kind: Literal["local", "verl"] = "local"
    cpu: bool = False
    workers: int = 1
    shard_group: int = 0
    copy_gpus: int = 1

    @property
    def shards(self) -> int:
        return (self.shard_group or self.workers) if self.kind == "verl" else 1


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory: bytes at the peak of generating and of training, and how they are counted."""

    name: str
    rollout: int
    update: int
    how: str = ""


def checkpoint_bytes(shape: Shape) -> int:
    """Bytes on disk of a checkpoint of the local backend: the policy, an adapter by itself and to go on with,
    what is trained of a critic, and what the optimisers keep."""
    trained = shape.trainable + shape.critic_trained
    optimiser = MOMENTS + (FLOAT32 if shape.itemsize < FLOAT32 else 0)
    return (
        shape.parameters + 2 * shape.adapter + shape.critic_trained
    ) * shape.itemsize + trained * optimiser


def total(parts: Iterable[Part], phase: Phase) -> int:
    return sum(getattr(part, phase) for part in parts)


def gib(count: float) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.1f} MiB"


def available_memory(path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of memory that Linux reports as available; None elsewhere."""
    match = re.search(r"MemAvailable: +(\d+) kB", path.read_text()) if path.is_file() else None
    return int(match[1]) * 1024 if match else None


def footprint(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """The memory of one device. On verl the server comes on top (`server_bytes`): it has a fixed share."""
    parts = states(shape, config, layout)
    if layout.kind == "local":
        parts += rollout_parts(shape, config, layout)
        candidates = [[saved_model(shape, layout)]]
    else:
        step = -(-8 * max(shape.trainable, shape.critic_trained) // layout.shards)
        candidates = [[Part("optimiser step", 0, step, "gradients and a root of moments in float32")]]
    networks: tuple[Actor | Critic, ...] = (config.actor, config.critic) if shape.critic else (config.actor,)
    candidates += [pass_parts(shape, config, layout, section) for section in networks]
    parts += max(candidates, key=lambda parts: total(parts, "update"))
    return [part for part in parts if part.rollout or part.update]


def states(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """Weights, optimiser states and gradients of one device. What verl offloads is there in an update only;
    FSDP keeps the reference in the machine's memory; one network at a time has gradients."""
    on_verl = layout.kind == "verl"
    weight = FLOAT32 if on_verl else shape.itemsize
    optimiser = MOMENTS + (FLOAT32 if weight < FLOAT32 else 0)  # with a copy in float32
    away = on_verl and config.cluster.param_offload
    states_away = on_verl and config.cluster.optimizer_offload
    rows = (
        ("policy weights", shape.parameters, weight, away),
        ("adapter weights", shape.adapter, weight, away),
        ("critic weights", shape.critic, weight, away),
        ("reference weights", 0 if on_verl else shape.reference, weight, not layout.cpu),
        ("policy optimiser", shape.trainable, optimiser, states_away),
        ("critic optimiser", shape.critic_trained, optimiser, states_away),
        ("gradients", max(shape.trainable, shape.critic_trained), FLOAT32, True),
    )  # fmt: skip
    cut, parts = f" / {layout.shards}" if layout.shards > 1 else "", []
    for name, count, size, is_away in rows:
        share = -(-count * size // layout.shards)
        parts.append(Part(name, 0 if is_away else share, share, f"{count / 1e6:,.1f} M × {size} bytes{cut}"))
    return parts


def cache_bytes(shape: Shape, slots: int, longest: int) -> int:
    """Bytes of `srl.rollout.kv_cache` once an episode has had `longest` tokens: whole blocks of positions
    for every slot and a spare one."""
    return (slots + 1) * -(-longest // BLOCK) * BLOCK * shape.kv_bytes


def rollout_parts(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """The local engine's KV cache, given back before the update unless it is small, and temporaries: of
    sampling a token for every episode, and of one layer over prompts and search results with a mask and the
    keys and values of its episodes. A CPU needs the larger of the two. A GPU's graphs have those of sampling
    to themselves, and episodes that read results together their keys and values once for each head."""
    slots, longest, size = config.rollout.max_num_seqs, config.data.max_episode_tokens, shape.itemsize
    sampling = SAMPLED_LOGIT * slots * shape.vocabulary
    tokens = max(PADDED_TOKENS["cpu" if layout.cpu else "cuda"], longest)
    gathered = slots * longest * shape.kv_bytes // shape.layers
    if not layout.cpu and shape.heads > shape.kv_heads:
        together = min(slots, -(-tokens // config.rollout.max_obs_length))
        gathered += together * longest * 2 * shape.heads * shape.head_dim * size
    norm, attention = shape.width * (8 + size), 4 * shape.heads * shape.head_dim * size
    inner = max(tokens * norm, tokens * attention + gathered, tokens * 3 * shape.ffn * size)
    layer = (
        tokens * longest * (1 + size) + tokens * 2 * shape.width * size + inner
    )  # mask, states, what is in it
    buffers = max(sampling, layer) if layout.cpu else sampling + layer
    buffers += shape.body * size if shape.adapter and layout.cpu else 0  # aside, while an adapter is merged
    cached = cache_bytes(shape, slots, longest)
    small = cached if layout.cpu and cached <= SMALL_CACHE else 0
    return [
        Part("KV cache", cached, small, f"{slots} episodes × {longest:,} tokens × {shape.kv_bytes:,} bytes"),
        Part("rollout buffers", buffers, 0, "logits, one layer"),
    ]


def saved_model(shape: Shape, layout: Layout) -> Part:
    """A first checkpoint, which is loaded anew: on a GPU one layer at a time. An adapter is merged for it:
    the largest matrix in float32, its change twice, the matrix before it."""
    merged = shape.width * shape.ffn * (FLOAT32 + 3 * shape.itemsize) if shape.adapter else 0
    on_gpu = shape.parameters - shape.body + shape.body // shape.layers
    loaded = (shape.parameters if layout.cpu else on_gpu) * shape.itemsize
    again = loaded if shape.adapter and layout.cpu else 0  # the shard that is being written
    peak = max(merged + again, loaded + 64 * shape.vocabulary * FLOAT32)
    return Part("saved model", 0, peak, "loaded anew")


def pass_tokens(config: Config, layout: Layout, section: Actor | Critic) -> int:
    """The most tokens, padding included, of one forward and backward pass of a worker."""
    longest = config.data.max_episode_tokens
    rows = min(section.ppo_mini_batch_size, config.data.train_batch_size) * config.rollout.n
    return min(max(section.ppo_max_token_len, longest), max(1, rows // layout.workers) * longest)


def pass_parts(shape: Shape, config: Config, layout: Layout, section: Actor | Critic) -> list[Part]:
    """What one forward and backward pass of a network holds until it ends. During one layer's backward pass,
    its forward pass is repeated first where activations are not kept."""
    size, tokens, is_actor = shape.itemsize, pass_tokens(config, layout, section), section is config.actor
    rank = config.model.lora_rank if is_actor else config.critic.lora_rank
    layer_kept = layer_bytes(shape, layout, rank)
    checkpointed = config.model.gradient_checkpointing
    layer = tokens * (checkpointed * layer_kept + 2 * (shape.ffn + shape.width) * size + 8 * shape.width)
    logits = logits_bytes(shape, config, layout, tokens) if is_actor else 0
    if layout.kind == "local" and not rank:  # a weight's gradient, before it is accumulated
        head = shape.width * size * shape.vocabulary if is_actor else 0
        layer += shape.width * size * shape.ffn + (head if shape.tied else 0)
        logits += head
    if is_actor and config.model.cast_lm_head_to_fp32 and size < FLOAT32:
        logits += 2 * FLOAT32 * shape.width * shape.vocabulary  # the head in float32, and its gradient
    gathered = 0
    if layout.kind == "verl":  # embedding, head, two layers and one layer's gradients, unsharded
        layer_size, root = shape.body // shape.layers, shape.parameters - shape.body
        gathered = (root + 2 * layer_size) * size
        gathered += 0 if shape.adapter else (root + layer_size) * (size + FLOAT32)
    kept = 1 if checkpointed else shape.layers  # eager attention keeps its weights, in float32 and as used
    weights = kept * shape.heads * (FLOAT32 + size) if shape.attention == "eager" else 0
    mask = 0 if _packs(shape, layout) else config.data.max_episode_tokens * (1 + size + weights)
    token_bytes = shape.layers * (shape.width * size if checkpointed else layer_kept)
    token_bytes += shape.width * (4 + 2 * size) + mask
    who = f"{'policy' if is_actor else 'critic'}, {tokens:,} tokens × {token_bytes:,} bytes"
    return [
        Part("gathered weights", 0, gathered, "embedding, head, two layers"),
        Part("activations", 0, tokens * token_bytes, who),
        Part("backward buffers", 0, max(logits, layer), "logits, or one layer"),
    ]


def _packs(shape: Shape, layout: Layout) -> bool:
    """Whether the local backend packs the rows of an update, which takes no padding and no mask."""
    return layout.kind == "local" and shape.attention == "sdpa"


def layer_bytes(shape: Shape, layout: Layout, rank: int) -> int:
    """Bytes per token that one decoder layer keeps for its backward pass.

    Two norms (their input in float32, and their output, twice where their weight is trained); queries and the
    attention's output; keys and values for each query head, or where rows are packed the output once more;
    the original keys and values, and the softmax's normaliser; the four tensors of the gated feed-forward;
    the inner activations of seven LoRA adapters.
    """
    size, heads = shape.itemsize, shape.heads * shape.head_dim
    norms = 2 * shape.width * (4 + (size if rank else 2 * size))
    wide = 3 if _packs(shape, layout) else 4
    attention = (wide * heads + 2 * shape.kv_heads * shape.head_dim) * size + 4 * shape.heads
    return norms + attention + (4 * shape.ffn + 7 * rank) * size


def logits_bytes(shape: Shape, config: Config, layout: Layout, tokens: int) -> int:
    """Bytes of the logits of `tokens` tokens and of what is computed from them.

    verl has those of a pass all at once. Locally there is one chunk at a time with its gradient, recomputed
    in the backward pass, and a part of it in float32; small chunks are kept.
    """
    entropy = config.actor.entropy_coeff != 0
    if layout.kind == "verl":
        fused = "flash" in config.model.attn_implementation
        per_logit = FUSED_LOGIT * shape.itemsize if fused else VERL_LOGIT[shape.itemsize][entropy]
        return per_logit * tokens * shape.vocabulary
    size = FLOAT32 if config.model.cast_lm_head_to_fp32 else shape.itemsize
    chunk = min(CHUNK, tokens) * shape.vocabulary
    resident = chunk if chunk > KEPT_LOGITS else tokens * shape.vocabulary
    in_float32 = min(chunk, FLOAT32_LOGITS["cpu" if layout.cpu else "cuda"])
    return (resident + chunk) * size + (LOGIT + entropy * ENTROPY) * in_float32


def server_bytes(shape: Shape, config: Config, layout: Layout, memory: float) -> float:
    """What verl's server takes of a GPU with `memory` bytes while it generates: its share, in which weights
    and an episode must fit (else infinite), or what it needs while it gets new weights."""
    size, gpus, seqs = shape.itemsize, layout.copy_gpus, config.rollout.max_num_seqs
    weights = -(-(shape.parameters + shape.adapter) * size // gpus)
    token = 2 * shape.layers * -(-shape.kv_heads // gpus) * shape.head_dim * size
    prompts = max(VLLM_TOKENS, seqs) * (2 * shape.ffn + 4 * shape.width) * size // gpus
    own = SERVER + max(prompts, SAMPLED_LOGIT * seqs * shape.vocabulary)
    share = config.rollout.gpu_memory_utilization * memory
    fits = weights + own + token * config.data.max_episode_tokens <= share
    return max(share, weights + own + BUCKET) - (1 - USABLE) * memory if fits else float("inf")


Fits = dict[str, dict[str, Any] | None]


def settings_that_fit(
    config: Config, path: str | Path, shape: Shape, layout: Layout, rooms: Mapping[str, int]
) -> Fits:
    """What to set for both phases to fit each of `rooms`, devices of so many bytes; None: nothing is enough.

    What leaves as it is what is learned comes first, adapters last."""

    @cache
    def shape_with(rank: int, critic_rank: int) -> Shape:
        if (rank, critic_rank) == (config.model.lora_rank, config.critic.lora_rank):
            return shape
        ranks = {"model.lora_rank": rank, "critic.lora_rank": critic_rank}
        return shape_of(config.with_settings(ranks), path, needs_critic=shape.critic > 0)

    def fits(settings: dict[str, Any], phase: Phase, memory: int) -> bool:
        changed = config.with_settings(settings)
        sizes = shape_with(changed.model.lora_rank, changed.critic.lora_rank)
        peak = float(total(footprint(sizes, changed, layout), phase))
        if layout.kind == "verl" and phase == "rollout":
            peak += server_bytes(sizes, changed, layout, memory)
        return peak <= USABLE * memory

    def chosen_for(memory: int) -> dict[str, Any] | None:
        settings: dict[str, Any] = {}
        for phases, change in _suggestions(config, layout, shape.critic > 0):
            if not all(fits(settings, phase, memory) for phase in phases):
                settings |= change
        return settings if all(fits(settings, phase, memory) for phase in PHASES) else None

    return {name: chosen_for(memory) for name, memory in rooms.items()}


def _suggestions(
    config: Config, layout: Layout, has_critic: bool
) -> Iterator[tuple[tuple[Phase, ...], dict[str, Any]]]:
    """What to set for less memory in the order in which it is tried, and the phases that it helps."""
    update, rollout = PHASES
    networks = {"actor": config.actor.ppo_max_token_len}
    networks |= {"critic": config.critic.ppo_max_token_len} if has_critic else {}
    yield (update,), {"model.gradient_checkpointing": True}
    for tokens in (4 * config.data.max_episode_tokens, config.data.max_episode_tokens):
        yield (
            (update,),
            {f"{name}.ppo_max_token_len": tokens for name, now in networks.items() if now > tokens},
        )
    if layout.kind == "verl":
        yield (rollout,), {"cluster.param_offload": True, "cluster.optimizer_offload": True}
    for episodes in (64, 32, 16, 8, 4, 2, 1):
        if episodes < config.rollout.max_num_seqs:
            yield (rollout,), {"rollout.max_num_seqs": episodes}
    if layout.kind == "local" and has_critic and not config.critic.lora_rank:  # verl's has no adapter
        yield PHASES, {"critic.lora_rank": 32}
    if not config.model.lora_rank:
        yield PHASES, {"model.lora_rank": 32}
