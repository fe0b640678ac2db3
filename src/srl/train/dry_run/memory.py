"""How much memory a run takes: on each device, on each machine and on disk.

Both backends are counted by the same parts; a `Layout` says how a backend spreads them. Weights, gradients,
optimiser states and the KV cache are counted as they are allocated. FSDP shards float32 weights, gradients
and moments over the workers. Megatron's distributed optimiser is counted as its documentation says; no run
of it has been measured. Activations are an upper estimate: the accounting of Korthikanti et al. 2022 (arXiv
2205.05198, section 4), for a layer with RMSNorm, rotary positions, grouped-query attention and a gated
feed-forward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from srl.config import Config
from srl.config.sections import Actor, Critic
from srl.model import SHARD
from srl.rollout.cached_forward import PADDED_TOKENS
from srl.rollout.kv_cache import BLOCK
from srl.rollout.torch_engine import SMALL_CACHE
from srl.train.dry_run.model_size import Shape
from srl.train.verl.translate import VLLM_TOKENS
from srl.update.logprobs import CHUNK, FLOAT32_LOGITS, KEPT_LOGITS

GIB = 2**30
FLOAT32 = 4
MOMENTS, STEP = 8, 8
"""Bytes per trained number: AdamW's two moments in float32, and the temporaries of its step on verl."""
FORWARD_LOGIT, LOGIT, ENTROPY = 8, 12, 8
"""Bytes per logit in float32 on the local backend: two tensors in a pass without gradients, three in an
update, two more where the entropy has a gradient too."""
VERL_LOGIT = {2: 12, 4: 20}
VERL_LOGIT_WITH_ENTROPY = {2: 26, 4: 28}
"""Bytes per logit of an update in verl, by the bytes of a number of the pass: logits, their copy without
padding, softmax and log-softmax in float32, gradients; more where the entropy has a gradient too."""
FUSED_LOGIT = 4
"""Numbers per logit with flash attention, which brings fused kernels: logits, two gradients, their sum."""
SAMPLED_LOGIT = 16
"""Bytes per logit of the rollout: logits, scaled logits, log-probs and probabilities in float32."""
SERVER = 2 * GIB
"""Allowance for a vLLM server beside weights and cache: CUDA context, graphs, buffers."""
BUCKET = 2 * GIB
"""In which verl hands new weights to the server of a GPU, before there is a cache."""
PROCESS = 3 * GIB // 5
"""Each process that imports verl, Ray and torch: 0.55 GiB measured on Linux, rounded up."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a backend spreads a run over machines and devices.

    `workers` are the devices that train. FSDP shards states over `shard_group` of them (0: all), and each
    group has a copy. Megatron cuts a network into `model_parts`. In generation, a copy of
    the policy is spread over `copy_gpus`. `episode_workers` and `single_processes` are verl's: processes that
    run episodes, spread over the machines, and those that run once, on one machine.
    """

    kind: Literal["local", "fsdp", "megatron"]
    cpu: bool = False
    workers: int = 1
    nodes: int = 1
    shard_group: int = 0
    model_parts: int = 1
    copy_gpus: int = 1
    episode_workers: int = 0
    single_processes: int = 0

    @property
    def copies(self) -> int:
        """Copies of the policy that generate."""
        return self.workers // self.copy_gpus

    @property
    def processes(self) -> int:
        """Processes of the machine that has most."""
        spread = (self.workers, self.copies, self.episode_workers)
        return sum(-(-count // self.nodes) for count in spread) + self.single_processes

    @property
    def shards(self) -> int:
        """Pieces that weights and gradients are cut into."""
        return (self.shard_group or self.workers) if self.kind == "fsdp" else self.model_parts

    @property
    def optimiser_shards(self) -> int:
        """Pieces that the optimiser's state is cut into; Megatron's is spread over all workers."""
        return self.shards if self.kind == "fsdp" else self.workers

    def state_bytes(self, itemsize: int) -> tuple[int, int, int]:
        """Bytes per number of weights, of gradients and of AdamW's state: the moments, and a float32 copy of
        other weights. `itemsize` is that of the passes."""
        weight = FLOAT32 if self.kind == "fsdp" else itemsize
        copied = self.kind == "megatron" or weight < FLOAT32
        return weight, FLOAT32, MOMENTS + (FLOAT32 if copied else 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory: its bytes at the peak of each phase, and how they are counted.

    The local backend's log-probs (the policy's, the reference's and the critic's values) and checkpoint are
    phases of their own; verl's are not counted.
    """

    name: str
    rollout: int
    update: int
    how: str
    logprobs: int = 0
    checkpoint: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """All parts, and their sums."""

    parts: tuple[Part, ...]

    @property
    def rollout(self) -> int:
        return sum(part.rollout for part in self.parts)

    @property
    def update(self) -> int:
        return sum(part.update for part in self.parts)

    @property
    def logprobs(self) -> int:
        return sum(part.logprobs for part in self.parts)

    @property
    def checkpoint(self) -> int:
        return sum(part.checkpoint for part in self.parts)


def footprint(shape: Shape, config: Config, layout: Layout) -> Footprint:
    """The memory of one device, or of the whole machine where verl runs without a GPU.

    On verl's GPUs the engine comes on top (`generation`): it takes a fixed share of each GPU.
    """
    if layout.kind == "local":
        held = [*_local_states(shape, config, layout), *_rollout(shape, config, layout)]
        passes = [_logprobs(shape, config, layout), _saved(shape, layout)]
        parts = [*held, *_update(shape, config, layout), *passes]
    else:
        parts = [*_states(shape, config, layout), *_update(shape, config, layout)]
    if layout.cpu and layout.kind != "local":
        count, each = layout.workers, f"{layout.workers} workers × "
        parts = [Part(p.name, p.rollout * count, p.update * count, f"{each}({p.how})") for p in parts]
        parts += machine_memory(shape, config, layout)
    phases = ("rollout", "logprobs", "update", "checkpoint")
    return Footprint(tuple(part for part in parts if any(getattr(part, phase) for phase in phases)))


def available_memory(path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of memory that Linux reports as available; None elsewhere."""
    found = re.search(r"MemAvailable: +(\d+) kB", path.read_text()) if path.is_file() else None
    return int(found[1]) * 1024 if found else None


def gib(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.1f} MiB"


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def _local_states(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """Weights and optimiser states, which stay where they are; the reference, which comes to a GPU for its
    pass if it is offloaded; and gradients, which one network at a time has."""
    weight, gradient, optimiser = layout.state_bytes(shape.itemsize)
    rows = (
        ("policy weights", "", shape.parameters, weight),
        ("adapter weights", "", shape.adapter, weight),
        ("critic weights", "", shape.critic, weight),
        ("policy optimiser", ", AdamW in float32", shape.trainable, optimiser),
        ("critic optimiser", ", AdamW in float32", shape.critic_trained, optimiser),
    )
    parts = []
    for name, note, count, each in rows:
        size = count * each
        parts.append(Part(name, size, size, f"{millions(count)} × {each} bytes{note}", size, size))
    size, away = shape.reference * weight, config.ref.param_offload and not layout.cpu
    how = f"{millions(shape.reference)} × {weight} bytes" + ("; else in the machine's memory" if away else "")
    held = 0 if away else size
    parts.append(Part("reference weights", held, held, how, size, held))
    most, one = max(shape.trainable, shape.critic_trained), "; of one network at a time" * bool(shape.critic)
    how = f"{millions(most)} × {gradient} bytes, accumulated in float32{one}"
    return [*parts, Part("gradients", 0, most * gradient, how)]


def _states(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """verl's weights, optimiser states and gradients; the offloaded ones only in an update, and gradients of
    one network at a time. FSDP keeps the reference in the machine's memory."""
    weight, gradient, optimiser = layout.state_bytes(shape.itemsize)
    weights_away, states_away = config.cluster.param_offload, config.cluster.optimizer_offload
    reference = 0 if layout.kind == "fsdp" else shape.reference
    adamw, one = ", AdamW in float32", "; of one network at a time" if shape.critic else ""
    most = max(shape.trainable, shape.critic_trained)
    rows = (
        ("policy weights", "", shape.parameters, weight, layout.shards, weights_away),
        ("adapter weights", "", shape.adapter, weight, layout.shards, weights_away),
        ("critic weights", "", shape.critic, weight, layout.shards, weights_away),
        ("reference weights", "", reference, weight, layout.shards, weights_away),
        ("policy optimiser", adamw, shape.trainable, optimiser, layout.optimiser_shards, states_away),
        ("critic optimiser", adamw, shape.critic_trained, optimiser, layout.optimiser_shards, states_away),
        ("gradients", one, most, gradient, layout.shards, False),
    )
    parts = []
    for name, note, count, size, shards, offloaded in rows:
        share = -(-count * size // shards)
        how = f"{millions(count)} × {size} bytes" + (f" / {shards}" if shards > 1 else "") + note
        how += "; offloaded during the rollout" if offloaded else ""
        parts.append(Part(name, 0 if offloaded or name == "gradients" else share, share, how))
    return parts


def _rollout(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """The local engine's KV cache, given back before the update unless it is small or a GPU has room,
    and temporaries: of sampling a token for every episode, and of one layer's pass over prompts and search
    results, with a mask and the keys and values of its episodes. A CPU needs the larger of the two. On a GPU
    the graphs have those of sampling to themselves, and the episodes that read results together have their
    keys and values once more for every head that shares them."""
    slots, longest, size = config.rollout.max_num_seqs, config.data.max_episode_tokens, shape.itemsize
    sampling = SAMPLED_LOGIT * slots * shape.vocabulary
    tokens = max(PADDED_TOKENS["cpu" if layout.cpu else "cuda"], longest)
    gathered = slots * longest * shape.kv_bytes // shape.layers
    if not layout.cpu and shape.heads > shape.kv_heads:
        together = min(slots, -(-tokens // config.rollout.max_obs_length))
        gathered += together * longest * 2 * shape.heads * shape.head_dim * size
    layer = tokens * longest * (1 + size) + _forward_layer(shape, tokens, gathered)
    cache = cache_bytes(shape, slots, longest)
    kept = cache if layout.cpu and cache <= SMALL_CACHE else 0
    how = f"{slots} episodes × {longest:,} tokens × {shape.kv_bytes:,} bytes"
    aside = shape.body * size if shape.adapter and layout.cpu else 0  # a GPU's lie in the machine's memory
    what = "logits" if sampling > layer else "one layer, a mask, keys and values of its episodes"
    buffers = max(sampling, layer)
    if not layout.cpu:
        what, buffers = "logits; one layer, a mask, keys and values of its episodes", sampling + layer
    return [
        Part("KV cache", cache, kept, how, kept, kept),
        Part("rollout buffers", buffers, 0, what),
        Part("weights aside", aside, 0, "of the matrices with an adapter, while it is merged"),
    ]


def _forward_layer(shape: Shape, tokens: int, gathered: int = 0) -> int:
    """Bytes of a layer's forward pass without gradients: the states before and after it, and the largest of
    its norm, its attention with `gathered` bytes of keys and values, and its feed-forward."""
    size = shape.itemsize
    norm, attention = shape.width * (8 + size), 4 * shape.heads * shape.head_dim * size
    inner = max(tokens * norm, tokens * attention + gathered, tokens * 3 * shape.ffn * size)
    return tokens * 2 * shape.width * size + inner


def cache_bytes(shape: Shape, slots: int, longest: int) -> int:
    """Bytes of `srl.rollout.kv_cache` once an episode has had `longest` tokens: whole blocks of positions
    for every slot and a spare one."""
    return (slots + 1) * -(-longest // BLOCK) * BLOCK * shape.kv_bytes


def _update(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """Temporaries of the largest pass, or of the optimiser's step on verl if that is larger."""
    candidates = [_pass(shape, config, layout, config.actor)]
    if shape.critic:
        candidates.append(_pass(shape, config, layout, config.critic))
    if layout.kind != "local":
        step = -(-STEP * max(shape.trainable, shape.critic_trained) // layout.optimiser_shards)
        how = "gradients and a square root of moments in float32"
        candidates.append([Part("optimiser step", 0, step, how)])
    return max(candidates, key=lambda parts: sum(part.update for part in parts))


def _pass(shape: Shape, config: Config, layout: Layout, section: Actor | Critic) -> list[Part]:
    """What one forward and backward pass of a network holds until it ends. During one layer's backward pass,
    its forward pass is repeated first where activations are not kept."""
    size, tokens, rank = shape.itemsize, pass_tokens(config, layout, section), _rank(config, section)
    again = layer_bytes(shape, config, layout, rank) if config.model.gradient_checkpointing else 0
    layer = tokens * (again + 2 * (shape.ffn + shape.width) * size + 8 * shape.width)
    logits = logits_bytes(shape, config, layout, tokens) if section is config.actor else 0
    if layout.kind == "local" and not rank:  # a weight's gradient, before it is accumulated
        head = shape.width * size * shape.vocabulary if logits else 0
        layer += shape.width * size * shape.ffn + (head if shape.tied else 0)
        logits += head
    if logits and config.model.cast_lm_head_to_fp32 and size < 4:
        logits += 2 * 4 * shape.width * shape.vocabulary  # the head in float32, and its gradient
    gathered = _gathered_bytes(shape) if layout.kind == "fsdp" else 0
    kept = activation_bytes(shape, config, layout, rank)
    at_once = f"up to {CHUNK:,} tokens at once" if _chunked(shape, layout, tokens) else "all tokens at once"
    largest = f"logits of {at_once}" if logits > layer else "one layer and its gradients"
    who = "policy" if section is config.actor else "critic"
    layers = "the input of each of" if config.model.gradient_checkpointing else "all of"
    how = f"{who}: {tokens:,} tokens × {kept:,} bytes: {layers} {shape.layers} layers"
    return [
        Part("gathered weights", 0, gathered, "embedding, head, two layers and one layer's gradients"),
        Part("activations", 0, tokens * kept // layout.model_parts, how),
        Part("backward buffers", 0, max(logits, layer) // layout.model_parts, largest),
    ]


def _logprobs(shape: Shape, config: Config, layout: Layout) -> Part:
    """A pass without gradients: one layer at a time, or the logits of a chunk beside the states."""
    tokens, size = pass_tokens(config, layout, config.actor), shape.itemsize
    if shape.critic:
        tokens = max(tokens, pass_tokens(config, layout, config.critic))
    chunk = min(CHUNK, tokens) * shape.vocabulary
    logits = tokens * shape.width * size + chunk * size + FORWARD_LOGIT * _in_float32(chunk, layout)
    layer = _forward_layer(shape, tokens)
    largest = f"logits of up to {CHUNK:,} tokens at once" if logits > layer else "one layer"
    return Part("log-prob buffers", 0, 0, f"{tokens:,} tokens: {largest}", logprobs=max(layer, logits))


def _saved(shape: Shape, layout: Layout) -> Part:
    """What a checkpoint takes. Saving a policy with an adapter: the largest matrix in float32, its change
    twice, the matrix before it; and without a GPU the shard that is being written. After the first, the saved
    model, of which a GPU has the embeddings and one layer."""
    largest = shape.width * shape.ffn * (FLOAT32 + 3 * shape.itemsize) if shape.adapter else 0
    shard = min(SHARD, shape.parameters * shape.itemsize) if shape.adapter and layout.cpu else 0
    on_gpu = shape.parameters - shape.body + shape.body // shape.layers
    compared = 4 * 16 * shape.vocabulary * FLOAT32 + _forward_layer(shape, 16)  # logits of 16 tokens
    loaded = (shape.parameters if layout.cpu else on_gpu) * shape.itemsize + compared
    how = "the first is loaded anew" + ("" if layout.cpu else ", one layer at a time")
    return Part("saved model", 0, 0, how, checkpoint=max(largest + shard, loaded))


def _rank(config: Config, section: Actor | Critic) -> int:
    """The rank of a network's adapter, 0 where all its weights are trained."""
    return config.model.lora_rank if section is config.actor else config.critic.lora_rank


def pass_tokens(config: Config, layout: Layout, section: Actor | Critic) -> int:
    """The most tokens, padding included, of one forward and backward pass of a worker."""
    longest = config.data.max_episode_tokens
    rows = min(section.ppo_mini_batch_size, config.data.train_batch_size) * config.rollout.n
    return min(
        max(section.ppo_max_token_len, longest), max(1, rows * layout.model_parts // layout.workers) * longest
    )


def activation_bytes(shape: Shape, config: Config, layout: Layout, rank: int) -> int:
    """Bytes per token kept until the backward pass: layers (their input alone with gradient checkpointing),
    last norm, and a mask where rows are padded. `rank` is that of the network's adapter."""
    size, longest = shape.itemsize, config.data.max_episode_tokens
    checkpointed = config.model.gradient_checkpointing
    layer = shape.width * size if checkpointed else layer_bytes(shape, config, layout, rank)
    mask = 0 if packed(shape, layout) else longest * (1 + size)
    return shape.layers * layer + shape.width * (4 + 2 * size) + mask


def packed(shape: Shape, layout: Layout) -> bool:
    """Whether the local backend packs the rows of an update, which takes no padding and no mask."""
    return layout.kind == "local" and shape.attention == "sdpa"


def layer_bytes(shape: Shape, config: Config, layout: Layout, rank: int) -> int:
    """Bytes per token that one decoder layer keeps for its backward pass.

    Two norms (their input in float32, and their output, twice where their weight is trained); queries and the
    attention's output; keys and values for each query head, or where rows are packed the output once more;
    the original keys and values, and the softmax's normaliser; the four tensors of the gated feed-forward;
    the inner activations of seven LoRA adapters. Eager attention also keeps its weights, in float32 and in
    the model's precision.
    """
    size, heads = shape.itemsize, shape.heads * shape.head_dim
    norms = 2 * shape.width * (4 + (size if rank else 2 * size))
    wide = 3 if packed(shape, layout) else 4
    attention = (wide * heads + 2 * shape.kv_heads * shape.head_dim) * size + 4 * shape.heads
    if shape.attention == "eager":
        attention += shape.heads * config.data.max_episode_tokens * (4 + size)
    return norms + attention + (4 * shape.ffn + 7 * rank) * size


def _chunked(shape: Shape, layout: Layout, tokens: int) -> bool:
    """Whether an update holds the logits of one chunk at a time: locally, if chunks are too large to keep."""
    return layout.kind == "local" and min(CHUNK, tokens) * shape.vocabulary > KEPT_LOGITS


def logits_bytes(shape: Shape, config: Config, layout: Layout, tokens: int) -> int:
    """Bytes of the logits of `tokens` tokens and of what is computed from them.

    verl has those of a pass all at once. Locally there is one chunk at a time with its gradient, recomputed
    in the backward pass, and a part of it in float32; small chunks are kept.
    """
    entropy = config.actor.entropy_coeff != 0
    size = FLOAT32 if config.model.cast_lm_head_to_fp32 else shape.itemsize
    if layout.kind != "local":
        per_logit = (VERL_LOGIT_WITH_ENTROPY if entropy else VERL_LOGIT)[shape.itemsize]
        if "flash" in config.model.attn_implementation:
            per_logit = FUSED_LOGIT * shape.itemsize
        return per_logit * tokens * shape.vocabulary
    chunk = min(CHUNK, tokens) * shape.vocabulary
    held = chunk if _chunked(shape, layout, tokens) else tokens * shape.vocabulary
    per_number = LOGIT + (ENTROPY if entropy else 0)
    return (held + chunk) * size + per_number * _in_float32(chunk, layout)


def _in_float32(logits: int, layout: Layout) -> int:
    """How many of `logits` the local backend has in float32 at the same time."""
    return min(logits, FLOAT32_LOGITS["cpu" if layout.cpu else "cuda"])


def _gathered_bytes(shape: Shape) -> int:
    """Bytes that FSDP holds unsharded: embedding and head, two layers, and one layer's gradients."""
    layer, root = shape.body // shape.layers, shape.parameters - shape.body
    gradients = 0 if shape.adapter else (root + layer) * (shape.itemsize + 4)
    return (root + 2 * layer) * shape.itemsize + gradients


@dataclass(frozen=True, slots=True)
class GenerationMemory:
    """Bytes of generation on one GPU: weights, the KV cache of one token, and the server's own."""

    weights: int
    token: int
    own: int

    @property
    def before_the_cache(self) -> int:
        """Bytes while new weights come."""
        return self.weights + self.own + BUCKET

    def episodes(self, memory: float, tokens: int) -> int:
        """How many episodes of `tokens` fit beside the weights into `memory` bytes."""
        return max(0, int((memory - self.weights - self.own) // (self.token * tokens)))


def generation(shape: Shape, config: Config, layout: Layout) -> GenerationMemory:
    """One GPU of a copy that generates: its share of the weights and of the KV cache of a token."""
    size, gpus, seqs = shape.itemsize, layout.copy_gpus, config.rollout.max_num_seqs
    kv_heads = -(-shape.kv_heads // gpus)
    prompts = max(VLLM_TOKENS, seqs) * (2 * shape.ffn + 4 * shape.width) * size // gpus
    return GenerationMemory(
        weights=-(-(shape.parameters + shape.adapter) * size // gpus),
        token=2 * shape.layers * kv_heads * shape.head_dim * size,
        own=SERVER + max(prompts, SAMPLED_LOGIT * seqs * shape.vocabulary),
    )


def machine_memory(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """What one of verl's machines holds in its memory beside the workers' parts: with GPUs, while weights
    load (`rollout`) and after (`update`); without, throughout the run."""
    cluster, nodes, copies = config.cluster, layout.nodes, layout.copies
    held, trained = shape.parameters + shape.adapter + shape.critic, shape.trainable + shape.critic_trained
    reference = 0 if layout.kind == "megatron" else shape.reference * FLOAT32 // nodes
    processes = f"{layout.processes} × {PROCESS / GIB:.1f} GiB"
    off_gpus = "" if layout.cpu else "; FSDP keeps it off the GPUs"
    rows = [
        ("reference weights", reference, f"float32{off_gpus}"),
        ("processes", layout.processes * PROCESS, processes),
    ]
    loading = []
    if layout.cpu:
        cache = cache_bytes(shape, config.rollout.max_num_seqs, config.data.max_episode_tokens)
        weights = shape.parameters * shape.itemsize
        rows.append(("engine weights", copies * weights, f"{copies} × all weights"))
        rows.append(("KV cache", copies * cache, f"{copies} × the cache"))
    else:
        tied = shape.parameters - shape.body <= shape.vocabulary * shape.width
        readers = layout.workers // nodes if tied else 1  # verl reads a tied model in every worker
        size = readers * shape.parameters * FLOAT32
        loading.append(Part("loading", size, 0, f"{readers} × all weights in float32"))
        if shape.adapter and cluster.rollout != "sglang":
            size = layout.copies * shape.parameters * shape.itemsize // nodes
            loading.append(Part("sleeping weights", 0, size, f"{layout.copies} × what vLLM adds adapters to"))
        if cluster.param_offload:
            rows.append(("offloaded weights", held * FLOAT32 // nodes, "cluster.param_offload, float32"))
        if cluster.optimizer_offload:
            rows.append(
                ("offloaded optimiser", trained * MOMENTS // nodes, "cluster.optimizer_offload, float32")
            )
    return [*(Part(name, size, size, how) for name, size, how in rows if size), *loading]


def checkpoint_bytes(shape: Shape, layout: Layout) -> int:
    """Bytes on disk of one checkpoint: the local backend's merged model and the state to resume from;
    verl's weights and moments of policy and critic in float32."""
    trained, size = shape.trainable + shape.critic_trained, shape.itemsize
    if layout.kind == "local":
        beside = 2 * shape.adapter + shape.critic_trained  # an adapter is saved to resume, and for others
        return (shape.parameters + beside) * size + trained * layout.state_bytes(size)[2]
    return (shape.parameters + shape.adapter + shape.critic) * FLOAT32 + trained * MOMENTS
