"""How much memory a run takes: on each device, on each machine and on disk.

Both backends are counted by the same parts; a `Layout` says how a backend spreads them. Weights, gradients,
optimiser states and the KV cache are counted as they are allocated. FSDP shards float32 weights, gradients
and moments over the workers. Megatron's distributed optimiser is counted as its documentation says; no run
of it has been measured. Activations are an upper estimate: the accounting of Korthikanti et al. 2022 (arXiv
2205.05198, section 4), for a layer with RMSNorm, rotary positions, grouped-query attention and a gated
feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from srl.config import Config
from srl.config.sections import Actor, Critic
from srl.rollout.cached_forward import PADDED_TOKENS
from srl.rollout.kv_cache import BLOCK
from srl.train.dry_run.model_size import Shape
from srl.train.verl.translate import VLLM_TOKENS
from srl.update.logprobs import CHUNK, KEPT_LOGITS

GIB = 2**30
FLOAT32 = 4
MOMENTS, STEP = 8, 8
"""Bytes per trained number: AdamW's two moments in float32, and the temporaries of its step on verl."""
LOGIT, ENTROPY = 12, 20
"""Bytes per logit of a local update: three float32 tensors at once (logits, softmax, log-softmax; in the
backward pass the log-softmax and two gradients), and five more where the entropy has a gradient too."""
VERL_LOGIT = {2: 12, 4: 20}
VERL_LOGIT_WITH_ENTROPY = {2: 26, 4: 28}
"""Bytes per logit of an update in verl, by the bytes of a number of the pass: logits, their copy without
padding, softmax and log-softmax in float32, gradients; more where the entropy has a gradient too."""
FUSED_LOGIT = 4
"""Numbers per logit with flash attention, which brings fused kernels: logits, two gradients, their sum."""
SAMPLED_LOGIT = 20
"""Bytes per logit of the rollout: logits, log-probs and probabilities in float32, their cumulative sum in
float64."""
SERVER = 2 * GIB
"""Allowance for a vLLM server beside weights and cache: CUDA context, graphs, buffers."""
PROCESS = 3 * GIB // 5
"""Each process that imports verl, Ray and torch: 0.55 GiB measured on Linux, rounded up."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a backend spreads a run over machines and devices.

    `workers` are the devices that train. Megatron cuts a network into `model_parts`. In generation, a copy of
    the policy is spread over `copy_gpus`. `episode_workers` and `single_processes` are verl's: processes that
    run episodes, spread over the machines, and those that run once, on one machine.
    """

    kind: Literal["local", "fsdp", "megatron"]
    cpu: bool = False
    workers: int = 1
    nodes: int = 1
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
        return self.workers if self.kind == "fsdp" else self.model_parts

    def state_bytes(self, itemsize: int) -> tuple[int, int, int]:
        """Bytes per number of weights, of gradients and of AdamW's state: the moments, and a float32 copy of
        other weights. `itemsize` is that of the passes."""
        weight = FLOAT32 if self.kind == "fsdp" else itemsize
        copied = self.kind == "megatron" or weight < FLOAT32
        return weight, FLOAT32, MOMENTS + (FLOAT32 if copied else 0)


@dataclass(frozen=True, slots=True)
class Part:
    """One use of memory: its bytes at the peak of a rollout and of an update, and how they are counted."""

    name: str
    rollout: int
    update: int
    how: str


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


def footprint(shape: Shape, config: Config, layout: Layout) -> Footprint:
    """The memory of one device, or of the whole machine where verl runs without a GPU.

    On verl's GPUs the engine comes on top (`generation`): it takes a fixed share of each GPU.
    """
    generating = _rollout(shape, config, layout) if layout.kind == "local" else []
    parts = [*_states(shape, config, layout), *generating, *_update(shape, config, layout)]
    if layout.cpu and layout.kind != "local":
        count, each = layout.workers, f"{layout.workers} workers × "
        parts = [Part(p.name, p.rollout * count, p.update * count, f"{each}({p.how})") for p in parts]
        parts += machine_memory(shape, config, layout)
    return Footprint(tuple(part for part in parts if part.rollout or part.update))


def gib(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.1f} MiB"


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def _states(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """Weights, optimiser states and gradients; the offloaded ones only in an update. FSDP keeps the reference
    in the machine's memory. verl has the gradients of one network at a time."""
    local, trained = layout.kind == "local", (shape.trainable, shape.critic)
    weight, gradient, optimiser = layout.state_bytes(shape.itemsize)
    weights_away = not local and config.cluster.param_offload
    states_away = not local and config.cluster.optimizer_offload
    reference = 0 if layout.kind == "fsdp" else shape.reference
    adamw, one = ", AdamW in float32", "" if local or not shape.critic else "; of one network at a time"
    rows = (
        ("policy weights", "", shape.parameters, weight, layout.shards, weights_away),
        ("adapter weights", "", shape.adapter, weight, layout.shards, weights_away),
        ("critic weights", "", shape.critic, weight, layout.shards, weights_away),
        ("reference weights", "", reference, weight, layout.shards, weights_away),
        ("policy optimiser", adamw, shape.trainable, optimiser, layout.workers, states_away),
        ("critic optimiser", adamw, shape.critic, optimiser, layout.workers, states_away),
        ("gradients", one, sum(trained) if local else max(trained), gradient, layout.shards, False),
    )
    parts = []
    for name, note, count, size, shards, offloaded in rows:
        share = -(-count * size // shards)
        how = f"{millions(count)} × {size} bytes" + (f" / {shards}" if shards > 1 else "") + note
        how += "; offloaded during the rollout" if offloaded else ""
        parts.append(Part(name, 0 if offloaded or name == "gradients" else share, share, how))
    return parts


def _rollout(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """The local engine's KV cache, which a GPU gives back before the update, and the temporaries of one
    forward pass. The largest of three: sampling a token for every episode, repeating keys and values for each
    query head, and the forward pass of the prompts."""
    slots, longest, size = config.rollout.max_num_seqs, config.data.max_episode_tokens, shape.itemsize
    sampling = SAMPLED_LOGIT * slots * shape.vocabulary
    repeated = 2 * slots * shape.heads * shape.head_dim * longest * size if shape.repeats > 1 else 0
    prompts = PADDED_TOKENS * (3 * shape.ffn * size + shape.width * (8 + 4 * size) + longest * size)
    cache = cache_bytes(shape, slots, longest)
    how = f"{slots} episodes × {longest:,} tokens × {shape.kv_bytes:,} bytes"
    return [
        Part("KV cache", cache, cache if layout.cpu else 0, how),
        Part("rollout buffers", max(sampling, repeated, prompts), 0, "logits, repeated keys, prompts"),
    ]


def cache_bytes(shape: Shape, slots: int, longest: int) -> int:
    """Bytes of `srl.rollout.kv_cache` once an episode has had `longest` tokens: whole blocks of positions
    for every slot and a spare one."""
    return (slots + 1) * -(-longest // BLOCK) * BLOCK * shape.kv_bytes


def _update(shape: Shape, config: Config, layout: Layout) -> list[Part]:
    """Temporaries of the largest pass, or of the optimiser's step if that is larger."""
    numbers = 0 if layout.kind == "local" else max(shape.trainable, shape.critic)
    step = -(-STEP * numbers // layout.workers)
    candidates = [
        _pass(shape, config, layout, config.actor),
        [Part("optimiser step", 0, step, "gradients and a square root of moments in float32")],
    ]
    if shape.critic:
        candidates.append(_pass(shape, config, layout, config.critic))
    return max(candidates, key=lambda parts: sum(part.update for part in parts))


def _pass(shape: Shape, config: Config, layout: Layout, section: Actor | Critic) -> list[Part]:
    """What one forward and backward pass of a network holds until it ends. During one layer's backward pass,
    its forward pass is repeated first where activations are not kept."""
    size, tokens = shape.itemsize, pass_tokens(config, layout, section)
    again = layer_bytes(shape, config) if config.model.gradient_checkpointing else 0
    layer = tokens * (again + 2 * (shape.ffn + shape.width) * size + 8 * shape.width)
    logits = logits_bytes(shape, config, layout, tokens) if section is config.actor else 0
    if layout.kind == "local" and not shape.adapter:  # a weight's gradient, before it is accumulated
        layer += shape.width * size * shape.ffn
        logits += shape.width * size * shape.vocabulary if logits else 0
    if logits and config.model.cast_lm_head_to_fp32 and size < 4:
        logits += 2 * 4 * shape.width * shape.vocabulary  # the head in float32, and its gradient
    gathered, kept = _gathered_bytes(shape) if layout.kind == "fsdp" else 0, activation_bytes(shape, config)
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


def pass_tokens(config: Config, layout: Layout, section: Actor | Critic) -> int:
    """The most tokens, padding included, of one forward and backward pass of a worker."""
    longest = config.data.max_episode_tokens
    rows = min(section.ppo_mini_batch_size, config.data.train_batch_size) * config.rollout.n
    return min(
        max(section.ppo_max_token_len, longest), max(1, rows * layout.model_parts // layout.workers) * longest
    )


def activation_bytes(shape: Shape, config: Config) -> int:
    """Bytes per token kept until the backward pass: layers (their input alone with gradient checkpointing),
    last norm, mask."""
    size, longest = shape.itemsize, config.data.max_episode_tokens
    checkpointed = config.model.gradient_checkpointing
    layer = shape.width * size if checkpointed else layer_bytes(shape, config)
    return shape.layers * layer + shape.width * (4 + 2 * size) + longest * (1 + size)


def layer_bytes(shape: Shape, config: Config) -> int:
    """Bytes per token that one decoder layer keeps for its backward pass.

    Two norms (their input in float32, and their output, twice where their weight is trained); queries, keys
    and values for each query head, the attention's output, the original keys and values, and the softmax's
    normaliser; the four tensors of the gated feed-forward; the inner activations of seven LoRA adapters.
    Eager attention also keeps its weights, in float32 and in the model's precision.
    """
    size, heads = shape.itemsize, shape.heads * shape.head_dim
    norms = 2 * shape.width * (4 + (size if shape.adapter else 2 * size))
    attention = (4 * heads + 2 * shape.kv_heads * shape.head_dim) * size + 4 * shape.heads
    if config.model.attn_implementation == "eager":
        attention += shape.heads * config.data.max_episode_tokens * (4 + size)
    return norms + attention + (4 * shape.ffn + 7 * config.model.lora_rank) * size


def _chunked(shape: Shape, layout: Layout, tokens: int) -> bool:
    """Whether an update holds the logits of one chunk at a time: locally, if chunks are too large to keep."""
    return layout.kind == "local" and min(CHUNK, tokens) * shape.vocabulary > KEPT_LOGITS


def logits_bytes(shape: Shape, config: Config, layout: Layout, tokens: int) -> int:
    """Bytes of the logits of `tokens` tokens and of what is computed from them.

    verl has those of a pass all at once. Locally there is one chunk at a time, recomputed in the backward
    pass; small chunks are kept.
    """
    entropy = config.actor.entropy_coeff != 0
    if layout.kind != "local":
        per_logit = (VERL_LOGIT_WITH_ENTROPY if entropy else VERL_LOGIT)[shape.itemsize]
        if "flash" in config.model.attn_implementation:
            per_logit = FUSED_LOGIT * shape.itemsize
        return per_logit * tokens * shape.vocabulary
    chunk, more = min(CHUNK, tokens) * shape.vocabulary, ENTROPY if entropy else 0
    if _chunked(shape, layout, tokens):
        return (LOGIT + more) * chunk
    return LOGIT * tokens * shape.vocabulary + max(more, 4) * chunk


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
    held, trained = shape.parameters + shape.adapter + shape.critic, shape.trainable + shape.critic
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
    trained, size = shape.trainable + shape.critic, shape.itemsize
    if layout.kind == "local":
        return shape.parameters * size + trained * (size + layout.state_bytes(size)[2])
    return (shape.parameters + shape.adapter + shape.critic) * FLOAT32 + trained * MOMENTS
