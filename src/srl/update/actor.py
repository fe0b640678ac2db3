"""The policy's update: mini-batches of whole groups, micro-batches by token budget, one loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srl.update.batch import Batch
from srl.update.kl import kl_penalty
from srl.update.logits import micro_batches_of
from srl.update.logprobs import TokenStats, token_stats
from srl.update.losses import LossAggMode, LossMode, aggregate, count_for, policy_loss
from srl.update.optimiser import Optimiser
from srl.update.rollout_correction import NO_CORRECTION, RolloutCorrection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Experience:
    """What the update of one step learns from; all tensors are `(B, T)`.

    `mask` is 1 on the policy's tokens, and 0 throughout in rows with `valid` 0. `loss_mask` is the same, or
    wider where retrieved text is trained on too. Without `old_logprobs` those of the update are the old ones,
    and the importance weights come from them too: for one optimiser step only.
    """

    batch: Batch
    mask: Tensor
    loss_mask: Tensor
    advantages: Tensor
    returns: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    weights: Tensor | None = None
    entropies: Tensor | None = None
    """Of the distributions of `old_logprobs`; for the log only."""

    def rows(self, index: Tensor) -> Experience:
        batch = self.batch.rows(index)
        width = batch.input_ids.shape[1]

        def cut(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index, :width]

        return Experience(
            batch, self.mask[index, :width], self.loss_mask[index, :width], self.advantages[index, :width],
            self.returns[index, :width], cut(self.old_logprobs), cut(self.ref_logprobs),
            cut(self.values), cut(self.weights),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ActorLoss:
    """The coefficients of the policy's loss; the meaning of each is in `srl.update.losses`."""

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float | None = 3.0
    loss_mode: LossMode = "vanilla"
    normalise: LossAggMode = "token-mean"
    horizon: int | None = None
    entropy_coeff: float = 0.0
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    correction: RolloutCorrection = NO_CORRECTION


def mini_batches(rows: int, size: int) -> list[Tensor]:
    """Row indices in runs of `size`; the rows of a group are adjacent, so they stay together."""
    return list(torch.arange(rows).split(size))


def update_actor(
    model: PreTrainedModel,
    optimiser: Optimiser,
    experience: Experience,
    *,
    loss: ActorLoss,
    mini_batch_rows: int,
    epochs: int = 1,
    max_tokens: int = 16384,
    seen: TokenStats | None = None,
) -> dict[str, float]:
    """`epochs` passes with one optimiser step for each mini-batch; the mean metrics of the steps.

    `seen` is filled with the log-probs and entropies of a single mini-batch, the whole experience.
    """
    steps = []
    for _ in range(epochs):
        for index in mini_batches(len(experience.batch), mini_batch_rows):
            part = experience.rows(index)
            if not bool(part.mask.any()):
                continue
            metrics = accumulate_actor(model, part, loss=loss, max_tokens=max_tokens, seen=seen)
            metrics["actor/no_gradient_share"] = 1 - float(rows_with_gradient(part, loss).float().mean())
            steps.append({**metrics, "actor/lr": optimiser.lr, "actor/grad_norm": optimiser.step()})
    return mean_metrics(steps, "actor")


def rows_with_gradient(part: Experience, loss: ActorLoss) -> Tensor:
    """Which rows (B,) of a mini-batch its loss has a gradient in, as bool.

    Without KL and entropy every term of the loss is a multiple of its token's advantage. So rows whose
    advantages are all 0, those of a group with equal scores, have none. If no row has one, the shortest
    counts: the optimiser then steps on gradients of 0, which move the weights by its momentum.
    """
    counted = part.loss_mask.bool()
    kept = counted.any(dim=1)
    if loss.entropy_coeff or (loss.kl_loss_coef and part.ref_logprobs is not None):
        return kept
    found = (counted & (part.advantages != 0)).any(dim=1)
    if bool(found.any()) or not bool(kept.any()):
        return found
    lengths = part.batch.lengths.masked_fill(~kept, part.batch.input_ids.shape[1] + 1)
    found[lengths.argmin()] = True
    return found


def accumulate_actor(
    model: PreTrainedModel,
    part: Experience,
    *,
    loss: ActorLoss,
    max_tokens: int,
    seen: TokenStats | None = None,
) -> dict[str, float]:
    """Backward pass of one mini-batch; the losses of its micro-batches add up to its loss.

    Rows without a gradient (`rows_with_gradient`) go through no pass. They count in what the loss is divided
    by, and not in the metrics. `seen` (B, T) is filled with the log-probs and entropies of the others.
    """
    denominator = count_for(part.mask, loss.normalise, loss.horizon)
    (read,) = rows_with_gradient(part, loss).nonzero(as_tuple=True)
    tokens = float(part.mask[read].sum())
    total: dict[str, float] = {}
    if not len(read):
        return total
    for chosen in micro_batches_of(model, part.batch.rows(read), max_tokens):
        index = read[chosen]
        rows = part.rows(index)
        put = None if seen is None else partial(seen.put, index)
        value, metrics = actor_loss(model, rows, loss, denominator, tokens, put)
        value.backward()
        for name, number in metrics.items():
            total[name] = total.get(name, 0.0) + float(number.detach())
    return total


def actor_loss(
    model: PreTrainedModel,
    part: Experience,
    loss: ActorLoss,
    denominator: float,
    tokens: float,
    seen: Callable[[TokenStats], None] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss + β·KL − c·entropy of one micro-batch, divided by the mini-batch's `denominator`.

    `seen` is called with the log-probs and entropies.
    """
    known = bool(loss.entropy_coeff) or seen is not None
    stats = token_stats(model, part.batch, part.loss_mask, loss.temperature, entropy=known)
    if seen is not None:
        seen(stats)
    old, weights = part.old_logprobs, part.weights
    if old is None:
        old = stats.logprobs.detach()
        weights = loss.correction.weights(old, part.batch.sampler_logprobs, part.mask)
    policy, found = policy_loss(
        stats.logprobs, old, part.advantages, part.mask,
        clip_low=loss.clip_low, clip_high=loss.clip_high, clip_c=loss.clip_c, weights=weights,
        normalise=loss.normalise, denominator=denominator, tokens=tokens, loss_mask=part.loss_mask,
        loss_mode=loss.loss_mode,
    )  # fmt: skip
    metrics = {"actor/pg_loss": policy, **{f"actor/{name}": value for name, value in found.items()}}
    whole = policy
    if loss.entropy_coeff:
        entropy = aggregate(stats.entropy, part.mask, normalise=loss.normalise, denominator=denominator)
        metrics["actor/entropy_loss"] = entropy
        whole = whole - loss.entropy_coeff * entropy
    if loss.kl_loss_coef and part.ref_logprobs is not None:
        kl = kl_penalty(stats.logprobs, part.ref_logprobs, loss.kl_loss_type)
        kl_loss = aggregate(kl, part.mask, normalise=loss.normalise, denominator=denominator)
        metrics["actor/kl_loss"] = kl_loss
        whole = whole + loss.kl_loss_coef * kl_loss
    return whole, metrics


def mean_metrics(steps: Sequence[Mapping[str, float]], network: str) -> dict[str, float]:
    """The mean of each metric over the steps that have it, and how many optimiser steps of `network` were
    skipped because the gradient's norm was not finite."""
    names = dict.fromkeys(name for step in steps for name in step)
    means = {
        name: sum(step[name] for step in steps if name in step) / sum(name in step for step in steps)
        for name in names
    }
    skipped = sum(not isfinite(step[f"{network}/grad_norm"]) for step in steps)
    return means | {f"{network}/skipped_steps": float(skipped)}
