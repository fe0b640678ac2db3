"""How much memory a run on verl takes on each GPU, on each machine, and on disk.

What is sharded is counted as FSDP shards it: float32 weights, gradients and AdamW's two moments, each worker
its part. What a pass takes is counted as for the local backend (`srl.train.dry_run.memory`), with the logits
that verl keeps whole. Under Megatron the numbers are split as its documentation says of the distributed
optimiser; no run of it has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from srl.config import Config
from srl.config.sections import Actor, Critic
from srl.train.dry_run.memory import (
    DRAWN,
    MASTER,
    MOMENTS,
    STEP,
    Footprint,
    Part,
    cache_bytes,
    kept_bytes,
    millions,
    one_layer_bytes,
)
from srl.train.dry_run.model_size import Shape
from srl.train.verl.setting import at_least_one_episode, longest
from srl.train.verl.translate_acting import VLLM_TOKENS

GIB = 2**30
LOGIT = {2: 12, 4: 20}
LOGIT_WITH_ENTROPY = {2: 26, 4: 28}
"""Bytes a logit in a pass of verl's, by the bytes of a number of the pass: logits, their copy without
padding, softmax and log-softmax in float32, gradients; more where the entropy has one too."""
FUSED_LOGIT = 4
"""Numbers a logit with flash attention, which brings fused kernels: the logits, two gradients, their sum."""
SERVER = 2 * GIB
"""Allowed for what a server of vLLM's holds beside weights and cache: CUDA's context, graphs, buffers."""
PROCESS = 3 * GIB // 5
"""Of each process that imports verl, Ray and torch: measured on Linux, 0.55 GiB, and rounded up."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a run is spread: workers that train, GPUs that share a copy, and bytes of a number in a pass.

    `parts` is how many pieces Megatron cuts a network into; FSDP shards over all workers.
    """

    workers: int
    nodes: int
    copy_gpus: int
    itemsize: int
    megatron: bool = False
    parts: int = 1
    cpu: bool = False

    @property
    def copies(self) -> int:
        return self.workers // self.copy_gpus

    @property
    def ranks(self) -> int:
        """Workers that get different rows."""
        return self.workers // self.parts


@dataclass(frozen=True, slots=True)
class Generation:
    """What one GPU does in generation: bytes of weights, of a token's keys and values, and of the rest."""

    weights: int
    token: int
    own: int

    def episodes(self, memory: float, tokens: int) -> int:
        """How many episodes of `tokens` fit beside the weights into `memory` bytes."""
        return max(0, int((memory - self.weights - self.own) // (self.token * tokens)))


def training(shape: Shape, config: Config, split: Split) -> Footprint:
    """Bytes of training on one GPU: while the policy generates (`rollout`), and at the peak of an update.

    What generates comes on top of the first.
    """
    parts = [*_held(shape, config, split), *_passing(shape, config, split)]
    return Footprint(tuple(part for part in parts if part.rollout or part.update))


def _held(shape: Shape, config: Config, split: Split) -> list[Part]:
    """Weights, gradients and moments of policy and critic; offloaded ones are there in an update only."""
    networks = {"policy": (shape.parameters + shape.adapter, shape.trainable)}
    if shape.critic:
        networks["critic"] = (shape.critic, shape.critic)
    param, optimizer = config.cluster.param_offload, config.cluster.optimizer_offload
    held = [_weights(name, count, param, split) for name, (count, _) in networks.items()]
    held += [_moments(name, trained, optimizer, split) for name, (_, trained) in networks.items()]
    if split.megatron and shape.reference:
        held.append(_weights("reference", shape.reference, param, split))
    trained = max(trained for _, trained in networks.values())
    gradients = _share(trained * 4, split.parts if split.megatron else split.workers)
    return [*held, Part("gradients", 0, gradients, f"{_of(trained, 4, split)}; of one network at a time")]


def _weights(name: str, count: int, offload: bool, split: Split) -> Part:
    size = split.itemsize if split.megatron else MASTER
    here = _share(count * size, split.parts if split.megatron else split.workers)
    where = "; not while the policy generates" if offload else ""
    return Part(f"{name}'s weights", 0 if offload else here, here, f"{_of(count, size, split)}{where}")


def _moments(name: str, trained: int, offload: bool, split: Split) -> Part:
    """AdamW's state, with Megatron's float32 copy of the weights."""
    size = MOMENTS + (MASTER if split.megatron else 0)
    here = _share(trained * size, split.workers)
    where = "; not while the policy generates" if offload else ""
    how = f"{millions(trained)} × {size} bytes / {split.workers}{where}"
    return Part(f"{name}'s optimiser", 0 if offload else here, here, how)


def _of(count: int, size: int, split: Split) -> str:
    return f"{millions(count)} × {size} bytes / {split.parts if split.megatron else split.workers}"


def _share(total: int, among: int) -> int:
    return -(-total // among)


def _passing(shape: Shape, config: Config, split: Split) -> list[Part]:
    """What comes and goes in an update of the network that takes more, or the optimiser's step if larger."""
    passes = [_pass(shape, config, split, config.actor, logit_bytes(_inside(shape, split), config))]
    if shape.critic:
        passes.append(_pass(shape, config, split, config.critic, 0))
    largest = max(passes, key=lambda parts: sum(part.update for part in parts))
    step = _share(STEP * max(shape.trainable, shape.critic), split.workers)
    if step > sum(part.update for part in largest):
        return [Part("optimiser's step", 0, step, "gradients and a root of moments in float32")]
    return largest


def _pass(shape: Shape, config: Config, split: Split, section: Actor | Critic, logit: int) -> list[Part]:
    """Gathered weights, activations and logits of one forward and backward pass."""
    inside = _inside(shape, split)
    tokens = pass_tokens(config, split, section)
    kept, how = kept_bytes(inside, config)
    logits, layer = tokens * logit, tokens * one_layer_bytes(inside, config)
    who = "policy" if section is config.actor else "critic"
    gathered = 0 if split.megatron else _gathered(inside)
    words = f"{who}: {tokens:,} tokens × {kept:,} bytes: {how}"
    own = "logits of all tokens" if logits > layer else "one layer and its gradients"
    return [
        Part("gathered weights", 0, gathered, "embedding, head and two layers whole, and gradients of one"),
        Part("activations", 0, tokens * kept // split.parts, words),
        Part("backward's own", 0, max(logits, layer) // split.parts, own),
    ]


def _inside(shape: Shape, split: Split) -> Shape:
    """The shape in the precision that passes compute in."""
    return replace(shape, itemsize=split.itemsize)


def pass_tokens(config: Config, split: Split, section: Actor | Critic) -> int:
    """The most tokens of one forward and backward pass of a worker, without padding."""
    asked = at_least_one_episode(section.ppo_max_token_len, config)
    rows = min(section.ppo_mini_batch_size, config.data.train_batch_size) * config.rollout.n
    return min(asked, max(1, rows // split.ranks) * longest(config))


def logit_bytes(shape: Shape, config: Config) -> int:
    """Bytes for one token of the logits and what is made of them: verl has those of a pass all at once."""
    if "flash" in config.model.attn_implementation:
        return FUSED_LOGIT * shape.itemsize * shape.vocabulary
    of_one = LOGIT_WITH_ENTROPY if config.actor.entropy_coeff else LOGIT
    return of_one[shape.itemsize] * shape.vocabulary


def _gathered(shape: Shape) -> int:
    """Bytes of what FSDP has whole: the root with embedding and head, two layers, a layer's gradients."""
    layer, root = shape.body // shape.layers, shape.parameters - shape.body
    gradients = 0 if shape.adapter else (root + layer) * (shape.itemsize + 4)
    return (root + 2 * layer) * shape.itemsize + gradients


def generation(shape: Shape, config: Config, split: Split) -> Generation:
    """One GPU of a copy that generates: its part of weights, and of the keys and values of a token."""
    size, among = split.itemsize, split.copy_gpus
    heads = -(-shape.kv_heads // among)
    seqs = config.rollout.max_num_seqs
    fed = max(VLLM_TOKENS, seqs) * (2 * shape.ffn + 4 * shape.width) * size // among
    return Generation(
        weights=_share((shape.parameters + shape.adapter) * size, among),
        token=2 * shape.layers * heads * shape.head_dim * size,
        own=SERVER + max(fed, DRAWN * seqs * shape.vocabulary),
    )


def host(shape: Shape, config: Config, split: Split, processes: int) -> tuple[Part, ...]:
    """Bytes in the memory of one machine: what is offloaded, the reference, and loading the weights."""
    cluster, nodes = config.cluster, split.nodes
    held = shape.parameters + shape.adapter + shape.critic
    trained = shape.trainable + shape.critic
    offloaded = (held * MASTER if cluster.param_offload else 0) // nodes
    moments = (trained * MOMENTS if cluster.optimizer_offload else 0) // nodes
    reference = 0 if split.megatron else shape.reference * MASTER // nodes
    readers = split.workers // nodes if is_tied(shape) else 1
    loading = shape.parameters * MASTER * readers
    parts = [
        Part("offloaded weights", offloaded, offloaded, "cluster.param_offload, float32"),
        Part("offloaded optimiser", moments, moments, "cluster.optimizer_offload, float32"),
        Part("reference", reference, reference, "float32; FSDP keeps it off the GPUs"),
        Part("loading", loading, 0, f"at the start: {readers} × all weights in float32"),
        Part("processes", processes * PROCESS, processes * PROCESS, f"{processes} × {gib_of(PROCESS)}"),
    ]
    return tuple(part for part in parts if part.rollout or part.update)


def is_tied(shape: Shape) -> bool:
    """Whether embedding and head are one table; then verl reads all weights in every worker, not in one."""
    return shape.parameters - shape.body <= shape.vocabulary * shape.width


def gib_of(count: float) -> str:
    return f"{count / GIB:.3g} GiB"


def checkpoint_bytes(shape: Shape) -> int:
    """Bytes on disk of one checkpoint: weights and AdamW's moments of policy and critic, in float32."""
    policy = (shape.parameters + shape.adapter) * MASTER + shape.trainable * MOMENTS
    return policy + shape.critic * (MASTER + MOMENTS)


def without_gpu(shape: Shape, config: Config, split: Split, processes: int) -> Footprint:
    """The memory of one machine without a GPU, whose workers share it, with the copies that generate."""
    each = training(shape, config, split)
    parts = [
        Part(
            part.name,
            part.rollout * split.workers,
            part.update * split.workers,
            f"{split.workers} × the part",
        )
        for part in each.parts
    ]
    copy = shape.parameters * split.itemsize
    cache = cache_bytes(replace(shape, itemsize=split.itemsize), config.rollout.max_num_seqs, longest(config))
    reference = shape.reference * MASTER
    rest = [
        Part(
            "copies that generate", split.copies * copy, split.copies * copy, f"{split.copies} × all weights"
        ),
        Part("keys and values", split.copies * cache, split.copies * cache, f"{split.copies} × the cache"),
        Part("reference", reference, reference, "float32"),
        Part("processes", processes * PROCESS, processes * PROCESS, f"{processes} × {gib_of(PROCESS)}"),
    ]
    return Footprint(tuple(part for part in [*parts, *rest] if part.rollout or part.update))
