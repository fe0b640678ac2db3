"""How long a step takes: a short measurement of this device, and the operations of a step.

A forward pass takes 2 operations per parameter and token. A backward pass takes 2 more for the gradient that
passes through, and 2 for each parameter that is trained (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from srl.config import Config
from srl.model import add_lora, new_model
from srl.train.compute_advantages import needs_old_logprobs, rollout_correction
from srl.train.dry_run.model_size import Shape

PRODUCT = 500_000_000
"""Operations of the matrix product that is timed on a CPU; a hundred times as many on a GPU."""


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What the device does, measured: operations per second in matrix products of the model's width, bytes
    per second read and written, and seconds to launch a forward pass of the model's depth."""

    operations: float
    bandwidth: float
    forward_s: float


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """Tokens of a mean episode: of its prompt, written by the policy, read from searches."""

    prompt: int
    written: int
    read: int

    @property
    def episode(self) -> int:
        return self.prompt + self.written + self.read


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the parts of one step, and of all steps."""

    rollout_s: float
    logprobs_s: float
    update_s: float
    total_s: float

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.logprobs_s + self.update_s


def half_of_the_budgets(config: Config) -> EpisodeTokens:
    """An episode that uses half of each budget: of the prompt, of the turns, of what searches return."""
    rollout, longest = config.rollout, config.data.max_response_length
    written = min((rollout.max_turns + 1) * rollout.max_turn_tokens, longest)
    read = min(rollout.max_turns * rollout.max_obs_length, longest - written) if rollout.search else 0
    return EpisodeTokens(*(math.ceil(part / 2) for part in (config.data.max_prompt_length, written, read)))


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> DeviceSpeed:
    """Three measurements of about `seconds` each, in the precision of the run."""
    operations = PRODUCT if device.type == "cpu" else 100 * PRODUCT
    rows = min(max(operations // (2 * shape.width * shape.ffn), 64), 16384)
    left = torch.ones(rows, shape.width, device=device, dtype=dtype)
    right = torch.ones(shape.width, shape.ffn, device=device, dtype=dtype)
    source = torch.zeros(2**30 if device.type == "cuda" else 2**25, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    with torch.no_grad():
        product = _seconds(lambda: left @ right, device, seconds)
        copy = _seconds(lambda: target.copy_(source), device, seconds)
        forward = _seconds(_small_forward(shape, device, dtype), device, seconds)
    return DeviceSpeed(2 * rows * shape.width * shape.ffn / product, 2 * len(source) / copy, forward)


def _seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Mean seconds of one call of `work`, repeated for `seconds` after a first call to warm up."""

    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not count:
        run()
        count += 1
    return elapsed / count


def _small_forward(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """One token through a model as deep as the run's and only 16 wide, which takes launches alone."""
    model: Any = new_model("qwen2", vocab_size=64, layers=shape.layers, width=16, heads=2, ffn=16)
    if shape.adapter:
        add_lora(model, 1)
    model, token = model.to(device, dtype), torch.ones(1, 1, dtype=torch.long, device=device)
    return lambda: model(input_ids=token, use_cache=False)


def step_times(shape: Shape, config: Config, speed: DeviceSpeed, tokens: EpisodeTokens) -> StepTimes:
    """Seconds of a step with mean episodes of `tokens`. Searches take no time here.

    `forward` are the operations of one forward pass of one episode, `head` those of the logits of the tokens
    that the policy wrote. Attention is over the whole width of its rows: the causal mask saves nothing.
    """
    attention = 4 * shape.layers * shape.heads * shape.head_dim * tokens.episode
    forward = tokens.episode * (2 * (shape.body + shape.adapter) + attention)
    head = 2 * shape.width * shape.vocabulary * tokens.written
    # Log-probs: the policy where the update's own do not serve, the reference where there is a KL, and the
    # critic's values.
    correction = rollout_correction(config, same_weights=True)
    passes = needs_old_logprobs(config, correction) + config.needs_reference
    logprobs = passes * (forward + head) + (forward if shape.critic else 0)
    # Update: gradient checkpointing repeats the forward pass; a trained head has a gradient too.
    forwards = 2 if config.model.gradient_checkpointing else 1
    trained = shape.trainable if shape.adapter else shape.body
    actor = (forwards + 1) * forward + 2 * trained * tokens.episode + (3 if shape.adapter else 4) * head
    own = config.critic.lora_rank > 0
    critic = (forwards + 1) * forward + 2 * (shape.critic_trained if own else shape.body) * tokens.episode
    update = config.actor.ppo_epochs * actor + config.critic.ppo_epochs * critic * (shape.critic > 0)
    rollout = _rollout_s(shape, config, speed, tokens, forward)
    episodes = config.data.train_batch_size * config.rollout.n
    logprobs_s, update_s = (episodes * operations / speed.operations for operations in (logprobs, update))
    total = config.trainer.total_training_steps * (rollout + logprobs_s + update_s)
    return StepTimes(rollout, logprobs_s, update_s, total)


def _rollout_s(
    shape: Shape, config: Config, speed: DeviceSpeed, tokens: EpisodeTokens, forward: int
) -> float:
    """Seconds to read the prompts (once per question) and search results, and to decode token by token.

    A decoding step takes its launch, and the longer of two: moving all weights, and for every episode in
    flight its logits and mean KV cache; or its operations. The longest episode writes twice as much as the
    mean.
    """
    episodes = config.data.train_batch_size * config.rollout.n
    read = config.data.train_batch_size * tokens.prompt + episodes * tokens.read
    reading = 2 * (shape.body + shape.adapter) * read / speed.operations
    steps = max(2 * tokens.written, math.ceil(episodes * tokens.written / config.rollout.max_num_seqs))
    in_flight = episodes * tokens.written / steps
    per_episode = shape.kv_bytes * tokens.episode / 2 + 40 * shape.vocabulary
    moved = (shape.parameters + shape.adapter) * shape.itemsize + in_flight * per_episode
    operations = in_flight * (forward / tokens.episode + 2 * shape.width * shape.vocabulary)
    return reading + steps * (speed.forward_s + max(moved / speed.bandwidth, operations / speed.operations))
