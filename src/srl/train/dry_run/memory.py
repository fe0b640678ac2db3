"""How much memory a run takes: what is held exactly, what comes and goes as an upper estimate.

Weights, gradients, optimiser states and the cache of keys and values are counted as they are
allocated. Activations follow the accounting of Korthikanti et al. 2022 (arXiv 2205.05198, section 4),
done anew for a layer with RMSNorm, rotary positions, shared key heads and a gated feed-forward; that of
the logits counts the tensors of `srl.update.forward`.
"""

from __future__ import annotations

from dataclasses import dataclass

from srl.config import Config
from srl.rollout.forward import PADDED_TOKENS
from srl.rollout.kv_cache import BLOCK
from srl.train.dry_run.model_size import Shape
from srl.update.forward import CHUNK, KEPT_LOGITS

LOGIT, ENTROPY = 12, 20
"""Bytes a logit of the update: three tensors in float32 at once (logits, softmax, log-softmax; in the
backward pass the log-softmax and two gradients), and five more where the entropy has a gradient too."""
DRAWN = 20
"""Bytes a logit of the rollout: the logits, log-probs and probabilities in float32, their running sum
in float64."""
MOMENTS, MASTER, STEP = 8, 4, 8
"""Bytes a trained number: AdamW's two moments in float32, a float32 copy of one with fewer bits, and what
a step of it takes for a moment."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory: its bytes at the peak of a rollout, and of an update."""

    name: str
    rollout: int
    update: int
    how: str


@dataclass(frozen=True, slots=True)
class Footprint:
    """All parts, and what they add up to."""

    parts: tuple[Part, ...]

    @property
    def rollout(self) -> int:
        return sum(part.rollout for part in self.parts)

    @property
    def update(self) -> int:
        return sum(part.update for part in self.parts)


def footprint(shape: Shape, config: Config, *, keeps_cache: bool) -> Footprint:
    """The memory of a run; `keeps_cache` where keys and values stay during the update, as on the CPU."""
    cache = cache_bytes(shape, config.rollout.max_num_seqs, longest_episode(config))
    parts = [
        *_held(shape),
        Part("keys and values", cache, cache if keeps_cache else 0, _cache_how(shape, config)),
        Part("rollout's own", _generation_bytes(shape, config), 0, "logits, repeated keys, fed prompts"),
        *_passing(shape, config),
    ]
    return Footprint(tuple(part for part in parts if part.rollout or part.update))


def longest_episode(config: Config) -> int:
    """The tokens of the longest episode that may be."""
    return config.data.max_prompt_length + config.data.max_response_length


def cache_bytes(shape: Shape, slots: int, longest: int) -> int:
    """Bytes of `srl.rollout.kv_cache` when an episode has been as long as it may: whole blocks of
    positions for every slot and a spare one."""
    return (slots + 1) * -(-longest // BLOCK) * BLOCK * shape.kv_bytes


def _cache_how(shape: Shape, config: Config) -> str:
    slots, longest = config.rollout.max_num_seqs, longest_episode(config)
    return f"{slots} episodes × {longest:,} tokens × {shape.kv_bytes:,} bytes"


def _held(shape: Shape) -> list[Part]:
    """What is there from the first step to the last, and the gradients."""
    size, trained = shape.itemsize, shape.trainable + shape.critic
    state = MOMENTS + (MASTER if size < 4 else 0)
    weights, adapter = shape.parameters * size, shape.adapter * size
    reference, critic = shape.reference * size, shape.critic * size
    optimiser, gradients = trained * state, trained * size
    return [
        Part("weights", weights, weights, f"{millions(shape.parameters)} × {size} bytes"),
        Part("adapter", adapter, adapter, f"{millions(shape.adapter)} × {size} bytes"),
        Part("reference", reference, reference, f"{millions(shape.reference)} × {size} bytes"),
        Part("critic", critic, critic, f"{millions(shape.critic)} × {size} bytes"),
        Part("optimiser", optimiser, optimiser, f"{millions(trained)} × {state} bytes, AdamW in float32"),
        Part("gradients", 0, gradients, f"{millions(trained)} × {size} bytes"),
    ]


def millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M"


def micro_batch_tokens(config: Config) -> int:
    """The most tokens, padding included, of one forward and backward pass."""
    longest, rows = longest_episode(config), config.actor.ppo_mini_batch_size * config.rollout.n
    return min(max(longest, config.actor.ppo_max_token_len), rows * longest)


def _passing(shape: Shape, config: Config) -> list[Part]:
    """What comes and goes in an update: activations and gradients, or the optimiser's step if larger."""
    tokens = micro_batch_tokens(config)
    kept, how = kept_bytes(shape, config)
    whole = 0 if shape.adapter else shape.width * shape.itemsize  # a weight's gradient, before it is added
    layer = tokens * one_layer_bytes(shape, config) + whole * shape.ffn
    logits = _logits_bytes(shape, config, tokens) + whole * shape.vocabulary
    own = f"logits, up to {CHUNK:,} tokens at once" if logits > layer else "one layer and its gradients"
    step = STEP * max(shape.trainable, shape.critic)
    if step > tokens * kept + max(layer, logits):
        return [Part("optimiser's step", 0, step, "gradients and a root of moments in float32")]
    return [
        Part("activations", 0, tokens * kept, f"{tokens:,} tokens × {kept:,} bytes: {how}"),
        Part("backward's own", 0, max(layer, logits), own),
    ]


def kept_bytes(shape: Shape, config: Config) -> tuple[int, str]:
    """Bytes for one token that stay until the backward pass: of the layers, the last norm, the mask."""
    size, longest = shape.itemsize, longest_episode(config)
    around = shape.width * (4 + 2 * size) + longest * (1 + size)
    if config.model.gradient_checkpointing:
        return shape.layers * shape.width * size + around, f"the input of each of {shape.layers} layers"
    return shape.layers * layer_bytes(shape, config) + around, f"all of {shape.layers} layers"


def layer_bytes(shape: Shape, config: Config) -> int:
    """Bytes for one token that one decoder layer keeps for its backward pass.

    Two norms (their input in float32, and their output, twice where their weight trains); queries, keys
    and values for each query head, the attention's output, keys and values as they were, and the
    softmax's normaliser; the four tensors of the gated feed-forward; what goes through seven adapters.
    Eager attention keeps its weights as well, in float32 and in the model's precision.
    """
    size, heads = shape.itemsize, shape.heads * shape.head_dim
    norms = 2 * shape.width * (4 + (size if shape.adapter else 2 * size))
    attention = (4 * heads + 2 * shape.kv_heads * shape.head_dim) * size + 4 * shape.heads
    if config.model.attn_implementation == "eager":
        attention += shape.heads * longest_episode(config) * (4 + size)
    return norms + attention + (4 * shape.ffn + 7 * config.model.lora_rank) * size


def one_layer_bytes(shape: Shape, config: Config) -> int:
    """Bytes for one token while one layer's backward pass runs, its forward pass repeated first where
    activations are not kept."""
    again = layer_bytes(shape, config) if config.model.gradient_checkpointing else 0
    return again + 2 * (shape.ffn + shape.width) * shape.itemsize + 8 * shape.width


def _logits_bytes(shape: Shape, config: Config, tokens: int) -> int:
    """Bytes of the logits of `tokens` tokens: of one chunk, computed again in the backward pass, or of
    all where chunks are small enough to be kept."""
    chunk, more = min(CHUNK, tokens) * shape.vocabulary, ENTROPY if config.actor.entropy_coeff else 0
    if chunk > KEPT_LOGITS:
        return (LOGIT + more) * chunk
    return LOGIT * tokens * shape.vocabulary + max(more, 4) * chunk


def _generation_bytes(shape: Shape, config: Config) -> int:
    """Bytes that one forward of the rollout takes and gives back: the largest of drawing a token for
    every episode, of their keys and values repeated for each query head, and of feeding prompts."""
    slots, longest, size = config.rollout.max_num_seqs, longest_episode(config), shape.itemsize
    drawing = DRAWN * slots * shape.vocabulary
    repeated = 2 * slots * shape.heads * shape.head_dim * longest * size if shape.repeats > 1 else 0
    feeding = PADDED_TOKENS * (3 * shape.ffn * size + shape.width * (8 + 4 * size) + longest * size)
    return max(drawing, repeated, feeding)
