"""How long a step takes on this device: a short measurement, and the arithmetic of a step.

A forward pass takes 2 operations a parameter and token, a backward pass 2 for the gradient that passes
through and 2 for each number that is trained (Kaplan et al. 2020, arXiv 2001.08361, section 2.1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from srl.config import Config
from srl.model import add_lora, new_model
from srl.rollout.engine import Sampling
from srl.rollout.forward import CachedForward
from srl.rollout.slots import SlotTable
from srl.train.dry_run.model_size import Shape

PRODUCT = 500_000_000
"""Operations of the product that is timed on a CPU; a hundred times as many on a GPU."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What the device does, measured: operations a second in products of the model's own width,
    bytes a second read and written, and seconds of a forward of one token through as many layers of
    next to no width, which is what Python and the launching of kernels take."""

    operations: float
    bandwidth: float
    forward_s: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a mean episode, by who put them there."""

    prompt: int
    written: int
    read: int

    @property
    def episode(self) -> int:
        return self.prompt + self.written + self.read


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the parts of one step, and of all steps."""

    rollout_s: float
    logprobs_s: float
    update_s: float
    total_s: float

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.logprobs_s + self.update_s


def half_of_the_budgets(config: Config) -> Lengths:
    """A mean episode that uses half of each budget: of the prompt, of the turns, of what is read."""
    turns = config.rollout.max_turns + 1
    written = min(turns * config.rollout.max_turn_tokens, config.data.max_response_length)
    read = config.data.max_response_length - written if config.rollout.search else 0
    return Lengths(*(math.ceil(part / 2) for part in (config.data.max_prompt_length, written, read)))


def measure(shape: Shape, device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> Speed:
    """Three measurements of about `seconds` each, in the precision of the run."""
    wanted = PRODUCT if device.type == "cpu" else 100 * PRODUCT
    rows = min(max(wanted // (2 * shape.width * shape.ffn), 64), 16384)
    left = torch.ones(rows, shape.width, device=device, dtype=dtype)
    right = torch.ones(shape.width, shape.ffn, device=device, dtype=dtype)
    memory = torch.zeros(2**30 if device.type == "cuda" else 2**25, device=device, dtype=torch.uint8)
    target = torch.empty_like(memory)
    with torch.no_grad():
        product = _seconds(lambda: left @ right, device, seconds)
        copy = _seconds(lambda: target.copy_(memory), device, seconds)
        forward = _seconds(_decoding(shape, device, dtype), device, seconds)
    return Speed(2 * rows * shape.width * shape.ffn / product, 2 * len(memory) / copy, forward)


def _seconds(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of one call of `work`, the mean over `seconds` after one to warm up."""
    work()
    _wait(device)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not count:
        work()
        _wait(device)
        count += 1
    return elapsed / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _decoding(shape: Shape, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """One token of one episode through a model of the run's depth and next to no width."""
    model: Any = new_model("qwen2", vocab_size=64, layers=shape.layers, width=16, heads=2, ffn=16)
    if shape.adapter:
        add_lora(model, 1)
    forward, table = CachedForward(model.to(device, dtype), 1, 64), SlotTable(1)
    row = np.zeros(1, dtype=np.int64)

    def step() -> None:
        if table.known[0] % 64 == 0:
            table.clear(0)
            table.begin(0, [1], Sampling(max_tokens=63), 0)
        forward.feed(table, row)
        table.append(row, row, np.zeros(1, dtype=np.float32))

    return step


def times(shape: Shape, config: Config, speed: Speed, lengths: Lengths) -> Times:
    """Seconds of a step of `config` with episodes of `lengths`. Searches take no time here."""
    rollout = _rollout_s(shape, config, speed, lengths)
    logprobs = _logprobs_operations(shape, config, lengths) / speed.operations
    update = _update_operations(shape, config, lengths) / speed.operations
    total = config.trainer.total_training_steps * (rollout + logprobs + update)
    return Times(rollout, logprobs, update, total)


def episodes_of(config: Config) -> int:
    """Episodes of one step."""
    return config.data.train_batch_size * config.rollout.n


def _forward_operations(shape: Shape, lengths: Lengths) -> float:
    """Operations of one forward of one episode's tokens: weights and adapter, then attention over the
    whole width of its rows, which the mask hides half of but does not save."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim * lengths.episode
    return lengths.episode * (2 * (shape.body + shape.adapter) + attention)


def _head_operations(shape: Shape, lengths: Lengths) -> float:
    """Operations of the logits of the tokens that the policy wrote."""
    return 2 * shape.width * shape.vocabulary * lengths.written


def _logprobs_operations(shape: Shape, config: Config, lengths: Lengths) -> float:
    """The policy's own log-probs, the reference's where there is a KL, the critic's values."""
    forward, head = _forward_operations(shape, lengths), _head_operations(shape, lengths)
    passes = 1 + (config.algorithm.use_kl_in_reward or config.actor.use_kl_loss)
    values = forward if shape.critic else 0
    return episodes_of(config) * (passes * (forward + head) + values)


def _update_operations(shape: Shape, config: Config, lengths: Lengths) -> float:
    """Forward and backward of actor and critic, and the second forward of what is not kept."""
    forward, head = _forward_operations(shape, lengths), _head_operations(shape, lengths)
    again = 1 + int(config.model.gradient_checkpointing)
    trained = shape.trainable if shape.adapter else shape.body
    actor = (again + 1) * forward + 2 * trained * lengths.episode + 3 * head
    head_trained = 0 if shape.adapter else head
    critic = (again + 2) * forward if shape.critic else 0
    epochs = config.actor.ppo_epochs, config.critic.ppo_epochs
    return episodes_of(config) * (epochs[0] * (actor + head_trained) + epochs[1] * critic)


def _rollout_s(shape: Shape, config: Config, speed: Speed, lengths: Lengths) -> float:
    """Prompts (one a question) and observations at the speed of products; then one forward a token.

    Beside its launch a decoding step reads all weights, and the keys and values of every episode in
    flight, which are written and read once more for each query head; or its operations take longer.
    """
    episodes = episodes_of(config)
    fed = config.data.train_batch_size * lengths.prompt + episodes * lengths.read
    feeding = 2 * (shape.body + shape.adapter) * fed / speed.operations
    longest = 2 * lengths.written
    steps = max(longest, math.ceil(episodes * lengths.written / config.rollout.max_num_seqs))
    flight = episodes * lengths.written / steps
    moved = (shape.parameters + shape.adapter) * shape.itemsize + flight * _moved_bytes(shape, lengths)
    operations = flight * (_forward_operations(shape, lengths) / lengths.episode
                           + 2 * shape.width * shape.vocabulary)  # fmt: skip
    step = speed.forward_s + max(moved / speed.bandwidth, operations / speed.operations)
    return feeding + steps * step


def _moved_bytes(shape: Shape, lengths: Lengths) -> float:
    """Bytes that one episode's token moves: half of its keys and values, and its logits."""
    copies = 1 + (2 * shape.repeats if shape.repeats > 1 else 0)
    return shape.kv_bytes * lengths.episode / 2 * copies + 40 * shape.vocabulary
