"""A step's batch between verl and `srl.train.compute_advantages`, and the order of its rows.

verl gives the first part of a batch to its first worker, the next part to the second, and each worker cuts
its part into mini-batches. verl's own order mixes questions, which spreads a group over several optimiser
steps. `balanced_order` makes the mini-batches of the local backend, shared evenly by tokens. An episode that
failed has a mask of zeros from `agent_loop.py` on; `step_batch` has it as not valid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from srl.advantage.groups import group_ids
from srl.train.compute_advantages import token_rewards
from srl.update.actor import Experience

Extra = Mapping[str, Any]
"""What the agent loop adds to an episode's row: see `srl.train.verl.agent_loop.to_output`."""
Place = tuple[int, int]
"""A row's question, by its position in the step, and its sample."""


def step_batch(fields: Mapping[str, Tensor], extra: Sequence[Extra], padding: Sequence[bool]) -> Experience:
    """verl's padded fields, (B, T) over the tokens after the prompt, as one step.

    `padding` is True for the rows that only fill the batch up; each is a group of its own.
    """
    rows = list(zip(extra, padding, strict=True))
    valid = torch.tensor([bool(row["srl_valid"]) and not fill for row, fill in rows])
    mask = fields["response_mask"] * valid[:, None]
    floats = {name: fields[name].float() for name in ("rollout_log_probs", "ref_log_prob") if name in fields}
    scores = fields["rm_scores"].float().sum(-1)
    per_turn, ends = ([row[name] for row in extra] for name in ("srl_per_turn", "srl_turn_ends"))
    rewards = token_rewards(scores, per_turn, ends, mask)
    groups = [f"\0{n}" if fill else row["srl_group"] for n, (row, fill) in enumerate(rows)]
    return Experience(
        tokens=None, valid=valid, group_ids=group_ids(groups), mask=mask, loss_mask=mask,
        rewards=rewards, advantages=rewards, returns=rewards,
        old_logprobs=fields["old_log_probs"].float(),
        sampler_logprobs=floats.get("rollout_log_probs"),
        ref_logprobs=floats.get("ref_log_prob"),
        values=fields.get("values"),
    )  # fmt: skip


def update_fields(result: Experience) -> dict[str, Tensor]:
    """The fields (B, T) that verl's update reads; the mask is without the rows that are out."""
    fields = {
        "advantages": result.advantages,
        "returns": result.returns,
        "token_level_rewards": result.rewards,
        "response_mask": result.mask,
    }
    return fields if result.weights is None else {**fields, "rollout_is_weights": result.weights}


def tokens_by_trajectory(
    result: Experience, entropy: Tensor | None, extra: Sequence[Extra], padding: Sequence[bool],
    lengths: Sequence[int],
) -> dict[str, dict[str, list[float]]]:  # fmt: skip
    """What the log keeps for each token, by the trajectory's id and the name of the field of `Record`."""
    columns = {"advantages": result.advantages, "returns": result.returns}
    if result.old_logprobs is not None:
        columns["trainer_logprobs"] = result.old_logprobs
    if entropy is not None:
        columns["entropies"] = entropy.float()
    return {
        columns_of_row["srl_id"]: {name: values[row, :length].tolist() for name, values in columns.items()}
        for row, (columns_of_row, fill, length) in enumerate(zip(extra, padding, lengths, strict=True))
        if not fill and columns_of_row["srl_turn_ends"]  # without a turn it has no token but the one for verl
    }


def balanced_order(places: Sequence[Place], lengths: Sequence[int], *, workers: int, block: int) -> list[int]:
    """Indices of the rows in the order in which verl hands them to its workers.

    Rows are sorted by question and sample. Each worker gets the same number of rows from every `block`, with
    similar totals of tokens, so that the workers' k-th mini-batches together hold the step's k-th questions.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    blocks = [order[start : start + block] for start in range(0, len(order), block)]
    shares = [share_out(rows, lengths, workers) for rows in blocks]
    return [row for worker in range(workers) for share in shares for row in share[worker]]


def share_out(rows: Sequence[int], lengths: Sequence[int], workers: int) -> list[list[int]]:
    """The rows as `workers` lists of equal size: the longest row left goes to the list with fewest tokens."""
    size = len(rows) // workers
    assert size * workers == len(rows), f"{len(rows)} rows do not divide by {workers} workers"
    shares: list[list[int]] = [[] for _ in range(workers)]
    tokens = [0] * workers
    for row in sorted(rows, key=lambda row: -lengths[row]):
        worker = min((w for w in range(workers) if len(shares[w]) < size), key=tokens.__getitem__)
        shares[worker].append(row)
        tokens[worker] += lengths[row]
    return [sorted(share, key=rows.index) for share in shares]


def block_of(actor: int, critic: int | None, workers: int) -> int:
    """Rows to share out at a time: a mini-batch, or with two sizes the largest size that divides both.

    If that is not a multiple of `workers`, it is the actor's mini-batch, and the critic's mini-batches mix
    questions.
    """
    both = actor if critic is None else math.gcd(actor, critic)
    return actor if both % workers else both
