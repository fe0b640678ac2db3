"""Statistics over groups, the rows that answer the same question, without the rows with `valid` 0, whose
episode failed (`Trajectory.valid`).

Each function returns one number (B,) for each row, that of the row's group. Group ids may be any integers
in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_ids(questions: Sequence[str]) -> Tensor:
    """A number (B,) for the question of each row, by its id."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(questions))}
    return torch.tensor([numbers[name] for name in questions])


def group_count(group_ids: Tensor, valid: Tensor) -> Tensor:
    """How many valid rows the row's group has."""
    return _group_sum(valid.long(), group_ids, valid)  # (B,)


def group_mean(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Mean score of the group's valid rows; 0 for a group without any.

    Computed as smallest + mean(score − smallest), so that the mean of equal scores is that score
    exactly. A rounding error of 1e-9 would otherwise be divided by GRPO's ε of 1e-6.
    """
    smallest = _group_smallest(scores, group_ids, valid)
    count = group_count(group_ids, valid).clamp(min=1)
    return smallest + _group_sum(scores - smallest, group_ids, valid) / count  # (B,)


def group_std(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Unbiased standard deviation (n − 1) of the group's valid rows; 0 for fewer than two."""
    squares = (scores - group_mean(scores, group_ids, valid)).square()
    count = group_count(group_ids, valid)
    return (_group_sum(squares, group_ids, valid) / (count - 1).clamp(min=1)).sqrt()  # (B,)


def leave_one_out_mean(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Mean score of the group's other valid rows; the row's own score when it has no other.

    From mean − (score − mean)/(n − 1), which is exact for equal scores.
    """
    mean = group_mean(scores, group_ids, valid)
    others = (group_count(group_ids, valid) - 1).clamp(min=1)
    return mean - (scores - mean) / others  # (B,)


def _group_sum(values: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    group = _group_index(group_ids)
    kept = values.masked_fill(~valid.bool(), 0)
    return torch.zeros_like(kept).index_add(0, group, kept)[group]  # (B,)


def _group_smallest(scores: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    group = _group_index(group_ids)
    kept = scores.masked_fill(~valid.bool(), torch.inf)
    smallest = torch.full_like(kept, torch.inf).scatter_reduce(0, group, kept, "amin")[group]
    return smallest.masked_fill(smallest.isinf(), 0)  # (B,)


def _group_index(group_ids: Tensor) -> Tensor:
    return torch.unique(group_ids, return_inverse=True)[1]  # (B,), 0 to number of groups - 1
