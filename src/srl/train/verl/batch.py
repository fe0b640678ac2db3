"""A step's batch between verl and `srl.train.compute_advantages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from srl.train.compute_advantages import StepBatch, StepResult, spread
from srl.update.rollout_correction import NO_CORRECTION, RolloutCorrection

Extra = Mapping[str, Any]
"""What the agent loop adds to an episode's row: see `srl.train.verl.agent_loop.to_output`."""


def step_batch(
    fields: Mapping[str, Tensor],
    extra: Sequence[Extra],
    padding: Sequence[bool],
    correction: RolloutCorrection = NO_CORRECTION,
) -> StepBatch:
    """verl's padded fields, (B, T) over the tokens after the prompt, as one step.

    `padding` is True for the rows that only fill the batch up; each is a group of its own.
    """
    rows = list(zip(extra, padding, strict=True))
    valid = torch.tensor([bool(item["srl_valid"]) and not fill for item, fill in rows])
    mask = fields["response_mask"] * valid[:, None]
    return StepBatch(
        groups=[f"\0{n}" if fill else item["srl_group"] for n, (item, fill) in enumerate(rows)],
        scores=fields["rm_scores"].float().sum(-1),
        per_turn=[item["srl_per_turn"] for item in extra],
        turn_ends=[item["srl_turn_ends"] for item in extra],
        valid=valid, mask=mask, loss_mask=mask,
        old_logprobs=fields["old_log_probs"].float(),
        sampler_logprobs=_float(fields.get("rollout_log_probs")),
        ref_logprobs=_float(fields.get("ref_log_prob")),
        values=fields.get("values"),
        correction=correction,
    )  # fmt: skip


def update_fields(batch: StepBatch, result: StepResult) -> dict[str, Tensor]:
    """The fields (B, T) that verl's update reads; the mask is without the rows that are out."""
    fields = {
        "advantages": result.advantages,
        "returns": result.returns,
        "token_level_rewards": result.rewards,
        "response_mask": result.mask,
    }
    if result.mask is not batch.mask:
        fields["loss_mask"] = result.mask  # by which verl counts the tokens and rows of a mini-batch
    return fields if result.weights is None else {**fields, "rollout_is_weights": result.weights}


def returns_and_values(batch: StepBatch, result: StepResult) -> dict[str, float]:
    """Two of verl's own metrics, over the rows that count only."""
    mask = batch.mask.bool()
    if not bool(mask.any()):
        return {}
    values = {} if batch.values is None else spread("critic/values", batch.values[mask])
    return spread("critic/returns", result.returns[mask]) | values


def token_columns(batch: StepBatch, result: StepResult, entropy: Tensor | None) -> dict[str, Tensor]:
    """What the log keeps for each token, (B, T) by the name of the field of `srl.store.Record`."""
    columns = {"advantages": result.advantages, "returns": result.returns}
    if batch.old_logprobs is not None:
        columns["trainer_logprobs"] = batch.old_logprobs
    return columns if entropy is None else {**columns, "entropies": entropy.float()}


def tokens_by_trajectory(
    columns: Mapping[str, Tensor], extra: Sequence[Extra], padding: Sequence[bool], lengths: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """The `columns` of each trajectory by its id, cut to its own length, for the log."""
    rows = enumerate(zip(extra, padding, lengths, strict=True))
    return {
        item["srl_id"]: {name: values[row, :length].tolist() for name, values in columns.items()}
        for row, (item, fill, length) in rows
        if not fill and item["srl_turn_ends"]  # without a turn it has no token but the one for verl
    }


def _float(field: Tensor | None) -> Tensor | None:
    return None if field is None else field.float()
