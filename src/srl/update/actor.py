"""The policy's update: mini-batches of whole groups, micro-batches by token budget, one loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

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

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The scored episodes of one step, a row each: what advantages are computed from and the update learns.

    Tensors are (B, T) unless said; T may count the prompt or not, but for all fields alike. A row with
    `valid` 0 (its search failed, or it only fills a batch up) has masks of zeros: it is out of the loss, of
    every mean and of its group's baseline. Without `old_logprobs` those of the update are the old ones, and
    the importance weights come from them too: for one optimiser step only.
    """

    tokens: Batch | None
    """None on verl, whose workers have them."""
    valid: Tensor  # (B,) bool
    group_ids: Tensor  # (B,) one number for each question
    mask: Tensor  # 1 on the policy's tokens
    loss_mask: Tensor  # as `mask`, or wider where observations are trained on too
    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    """Advantages and returns are the rewards until `srl.train.compute_advantages` has estimated them."""
    old_logprobs: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None  # in the critic's precision
    entropies: Tensor | None = None
    """Of the distributions of `old_logprobs`; for the log only."""
    weights: Tensor | None = None
    """Importance weights for a sampler that is not the trainer."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What describes the rows, for the log."""

    @property
    def batch(self) -> Batch:
        assert self.tokens is not None, "only verl's experience is without tokens, and verl updates"
        return self.tokens

    def rows(self, index: Tensor) -> Experience:
        batch = self.batch.rows(index)
        width = batch.input_ids.shape[1]
        columns: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)}
        cut: dict[str, Any] = {
            name: value[index, :width] if value.dim() > 1 else value[index]
            for name, value in columns.items()
            if isinstance(value, Tensor)
        }
        return replace(self, tokens=batch, **cut)


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

    @property
    def of_policy(self) -> dict[str, Any]:
        """What `policy_loss` takes of these."""
        return {
            "clip_low": self.clip_low, "clip_high": self.clip_high, "clip_c": self.clip_c,
            "normalise": self.normalise, "loss_mode": self.loss_mode,
        }  # fmt: skip


def mini_batches(rows: int, size: int) -> list[Tensor]:
    """Row indices in runs of `size`; the rows of a group are adjacent, so they stay together."""
    return list(torch.arange(rows).split(size))


def update(
    network: str, optimiser: Optimiser, experience: Experience, accumulate: Callable[[Experience], Metrics],
    mini_batch_rows: int, epochs: int,
) -> Metrics:  # fmt: skip
    """`epochs` passes with one optimiser step for each mini-batch, whose backward pass `accumulate` makes.

    The mean of each metric over the steps that have it, and how many optimiser steps of `network` were
    skipped because the gradient's norm was not finite.
    """
    steps = list[Metrics]()
    for _ in range(epochs):
        for index in mini_batches(len(experience.batch), mini_batch_rows):
            part = experience.rows(index)
            if bool(part.mask.any()):
                metrics = accumulate(part)
                lr = optimiser.lr
                steps.append({**metrics, f"{network}/lr": lr, f"{network}/grad_norm": optimiser.step()})
    means = dict[str, float]()
    for name in dict.fromkeys(name for step in steps for name in step):
        values = [step[name] for step in steps if name in step]
        means[name] = sum(values) / len(values)
    skipped = sum(not isfinite(step[f"{network}/grad_norm"]) for step in steps)
    return means | {f"{network}/skipped_steps": float(skipped)}


def update_actor(
    model: PreTrainedModel,
    optimiser: Optimiser,
    experience: Experience,
    *,
    loss: ActorLoss,
    mini_batch_rows: int,
    epochs: int = 1,
    max_tokens: int = 16384,
    stats: TokenStats | None = None,
) -> Metrics:
    """The `update` of the policy; `stats` is filled with the log-probs and entropies of a single mini-batch,
    the whole experience."""

    def accumulate(part: Experience) -> Metrics:
        share = 1 - float(rows_with_gradient(part, loss).float().mean())
        metrics = accumulate_actor(model, part, loss=loss, max_tokens=max_tokens, stats=stats)
        return metrics | {"actor/no_gradient_share": share}

    return update("actor", optimiser, experience, accumulate, mini_batch_rows, epochs)


def rows_with_gradient(part: Experience, loss: ActorLoss) -> Tensor:
    """Which rows (B,) of a mini-batch its loss has a gradient in, as bool.

    Without KL and entropy every term of the loss is a multiple of its token's advantage. So rows whose
    advantages are all 0, those of a group with equal scores, have none. If no row has one, the shortest
    counts: the optimiser then steps on gradients of 0, which move the weights by its momentum.
    """
    counted = part.loss_mask.bool()
    has_loss = counted.any(dim=1)
    if loss.entropy_coeff or (loss.kl_loss_coef and part.ref_logprobs is not None):
        return has_loss
    has_gradient = (counted & (part.advantages != 0)).any(dim=1)
    if bool(has_gradient.any()) or not bool(has_loss.any()):
        return has_gradient
    lengths = part.batch.lengths.masked_fill(~has_loss, part.batch.input_ids.shape[1] + 1)
    has_gradient[lengths.argmin()] = True
    return has_gradient


def accumulate_actor(
    model: PreTrainedModel,
    part: Experience,
    *,
    loss: ActorLoss,
    max_tokens: int,
    stats: TokenStats | None = None,
) -> dict[str, float]:
    """Backward pass of one mini-batch; the losses of its micro-batches add up to its loss.

    Rows without a gradient (`rows_with_gradient`) go through no pass. They count in what the loss is divided
    by, and not in the metrics. `stats` (B, T) is filled with the log-probs of the others, and with their
    entropies where these are old log-probs.
    """
    denominator = count_for(part.mask, loss.normalise, loss.horizon)
    (rows_read,) = rows_with_gradient(part, loss).nonzero(as_tuple=True)
    tokens = float(part.mask[rows_read].sum())
    total: dict[str, float] = {}
    if not len(rows_read):
        return total
    for micro_batch in micro_batches_of(model, part.batch.rows(rows_read), max_tokens):
        index = rows_read[micro_batch]
        rows = part.rows(index)
        value, metrics, rows_stats = actor_loss(model, rows, loss, denominator, tokens)
        value.backward()
        if stats is not None:
            stats.put(index, rows_stats)
        for name, number in metrics.items():
            total[name] = total.get(name, 0.0) + float(number.detach())
    return total


def actor_loss(
    model: PreTrainedModel,
    part: Experience,
    loss: ActorLoss,
    denominator: float,
    tokens: float,
) -> tuple[Tensor, dict[str, Tensor], TokenStats]:
    """Policy loss + β·KL − c·entropy of one micro-batch, divided by the mini-batch's `denominator`.

    Without old log-probs those of this pass are the old ones, and their entropies are computed for the log.
    """
    old, weights = part.old_logprobs, part.weights
    with_entropy = bool(loss.entropy_coeff) or old is None
    stats = token_stats(model, part.batch, part.loss_mask, loss.temperature, entropy=with_entropy)
    if old is None:
        assert part.sampler_logprobs is not None, "only verl has none, and verl updates"
        old = stats.logprobs.detach()
        weights = loss.correction.weights(old, part.sampler_logprobs, part.mask)
    policy, policy_metrics = policy_loss(
        stats.logprobs, old, part.advantages, part.mask, weights=weights, denominator=denominator,
        tokens=tokens, loss_mask=part.loss_mask, **loss.of_policy,
    )  # fmt: skip
    metrics = {"actor/pg_loss": policy, **{f"actor/{name}": value for name, value in policy_metrics.items()}}
    total = policy
    if loss.entropy_coeff:
        entropy = aggregate(stats.entropy, part.mask, normalise=loss.normalise, denominator=denominator)
        metrics["actor/entropy_loss"] = entropy
        total = total - loss.entropy_coeff * entropy
    if loss.kl_loss_coef and part.ref_logprobs is not None:
        kl = kl_penalty(stats.logprobs, part.ref_logprobs, loss.kl_loss_type)
        kl_loss = aggregate(kl, part.mask, normalise=loss.normalise, denominator=denominator)
        metrics["actor/kl_loss"] = kl_loss
        total = total + loss.kl_loss_coef * kl_loss
    return total, metrics, stats
