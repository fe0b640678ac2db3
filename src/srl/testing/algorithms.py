"""What every algorithm's estimator must do, checked on a small batch with retrieved spans in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from srl.advantage import Advantages, Algorithm
from srl.testing import Check, expect, run

Batch = dict[str, Any]
COLUMNS = ("token_level_rewards", "response_mask", "values")
ROWS = (*COLUMNS, "group_ids", "valid")
INVALID, SURVIVOR = 2, 6
"""The row with `valid` 0, and the only valid row of its group."""


def checks(make: Callable[[], Any]) -> list[Check]:
    """The outcome of every check."""
    return run(CHECKS, make())


def batch(dtype: torch.dtype = torch.float32) -> Batch:
    """Seven rows of three groups, each row with a span that the policy did not write."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(7, 12, dtype=torch.long)
    for row in range(7):
        mask[row, 2 + row % 4 : 4 + row % 4] = 0
        mask[row, 8 + row % 5 :] = 0
    rewards = torch.randn(7, 12, generator=generator, dtype=dtype) * 0.1 * mask
    scores = torch.tensor([1, 0, 1, 0, 1, 0, 1], dtype=dtype)
    for row, last in enumerate((mask * torch.arange(12)).amax(dim=1).tolist()):
        rewards[row, last] += scores[row]
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "group_ids": torch.tensor([11, 11, 11, 11, 5, 5, 900]),
        "valid": torch.arange(7) != INVALID,
        "values": torch.randn(7, 12, generator=generator, dtype=dtype) * mask,
        "group_size": 4,
        "gamma": 0.9,
        "lam": 0.8,
    }


def _estimate(algorithm: Algorithm, batch: Batch, **changes: Any) -> Advantages:
    values = batch["values"] if algorithm.needs_critic else None
    return algorithm.estimator(**{**batch, "values": values, **changes})


def _is_an_algorithm_with_dotted_defaults(algorithm: Any) -> None:
    expect(isinstance(algorithm, Algorithm), f"{algorithm!r:.60} is not an srl.advantage.Algorithm")
    expect(algorithm.name and callable(algorithm.estimator), "the name or the estimator is missing")
    keys = list(algorithm.defaults)
    expect(all("." in key for key in keys), f"defaults are dotted config keys, found {keys}")


def _returns_two_tensors_of_the_shape_and_dtype_of_the_rewards(algorithm: Algorithm) -> None:
    for dtype in (torch.float32, torch.float64):
        for name, tensor in _estimate(algorithm, batch(dtype))._asdict().items():
            expect(tensor.shape == (7, 12), f"{name} has shape {tuple(tensor.shape)}, expected (7, 12)")
            expect(tensor.dtype == dtype, f"{name} has dtype {tensor.dtype} for rewards of {dtype}")
            expect(not tensor.requires_grad, f"{name} carries a gradient")


def _is_0_on_invalid_rows_and_where_the_policy_did_not_write(algorithm: Algorithm) -> None:
    mask = batch()["response_mask"]
    for name, tensor in _estimate(algorithm, batch())._asdict().items():
        expect(not tensor[mask == 0].any(), f"{name} are not 0 where the mask is 0")
        expect(not tensor[INVALID].any(), f"{name} of an invalid row are not 0")


def _an_invalid_row_changes_no_other(algorithm: Algorithm) -> None:
    changed = batch()
    for name, number in (("token_level_rewards", 50.0), ("values", -70.0)):
        changed[name][INVALID, changed["response_mask"][INVALID] == 1] = number
    _expect_unchanged(algorithm, _estimate(algorithm, changed), "with other numbers on an invalid row")
    rows = [row for row in range(7) if row != INVALID]
    without = _estimate(algorithm, _rows(batch(), rows))
    _expect_unchanged(algorithm, without, "without the invalid row", rows)


def _does_not_depend_on_the_order_of_rows(algorithm: Algorithm) -> None:
    order = [3, 6, 0, 5, 2, 4, 1]
    _expect_unchanged(algorithm, _estimate(algorithm, _rows(batch(), order)), "in another order", order)


def _group_ids_are_only_labels(algorithm: Algorithm) -> None:
    labels = {11: 0, 5: 10**12, 900: 3}
    renamed = torch.tensor([labels[group] for group in batch()["group_ids"].tolist()])
    _expect_unchanged(algorithm, _estimate(algorithm, batch(), group_ids=renamed), "with other group ids")


def _padding_or_a_retrieved_span_changes_nothing(algorithm: Algorithm) -> None:
    padded = _estimate(algorithm, _with_columns(batch(), 12, fill=0.0))
    _expect_unchanged(algorithm, [tensor[:, :12] for tensor in padded], "with more padding")
    rows = [_with_columns(_rows(batch(), [row]), 3 + row % 4, fill=30.0) for row in range(7)]
    longer = {name: torch.cat([row[name] for row in rows]) for name in COLUMNS}
    columns = torch.tensor([[*range(3 + row % 4), *range(6 + row % 4, 15)] for row in range(7)])
    without = [tensor.gather(1, columns) for tensor in _estimate(algorithm, {**batch(), **longer})]
    _expect_unchanged(algorithm, without, "with three more tokens that the policy only read")


def _is_finite_for_any_group(algorithm: Algorithm) -> None:
    """Of one row, of equal scores, without a valid row, with a row in which the policy wrote nothing."""
    for size in (4, 1):
        alone = _estimate(algorithm, _rows(batch(), [SURVIVOR]), group_size=size)
        _expect_finite(alone, f"for one row and group_size {size}")
    for reward in (0.0, 1.0, 1 / 3):
        equal = torch.zeros(7, 12)
        equal[:, 0] = reward
        advantages = _estimate(algorithm, batch(), token_level_rewards=equal)
        _expect_finite(advantages, f"when every score is {reward:.3}")
    none_valid = _estimate(algorithm, batch(), valid=torch.zeros(7, dtype=torch.bool))
    _expect_finite(none_valid, "when no row is valid")
    silent = batch()["response_mask"]
    silent[0] = 0
    nothing_written = _estimate(algorithm, batch(), response_mask=silent)
    _expect_finite(nothing_written, "when a row has nothing of the policy")


def _leaves_its_inputs_as_they_were(algorithm: Algorithm) -> None:
    inputs = batch()
    _estimate(algorithm, inputs)
    for name in ROWS:
        expect(torch.equal(inputs[name], batch()[name]), f"{name} was changed")


CHECKS = [
    _is_an_algorithm_with_dotted_defaults,
    _returns_two_tensors_of_the_shape_and_dtype_of_the_rewards,
    _is_0_on_invalid_rows_and_where_the_policy_did_not_write,
    _an_invalid_row_changes_no_other,
    _does_not_depend_on_the_order_of_rows,
    _group_ids_are_only_labels,
    _padding_or_a_retrieved_span_changes_nothing,
    _is_finite_for_any_group,
    _leaves_its_inputs_as_they_were,
]


def _rows(batch: Batch, rows: list[int]) -> Batch:
    return {**batch, **{name: batch[name][rows] for name in ROWS}}


def _with_columns(batch: Batch, place: int, fill: float) -> Batch:
    """The batch with three columns before column `place` that the policy did not write."""
    wider = dict(batch)
    for name in COLUMNS:
        tensor: Tensor = batch[name]
        columns = torch.full((len(tensor), 3), 0 if name == "response_mask" else fill, dtype=tensor.dtype)
        wider[name] = torch.cat([tensor[:, :place], columns, tensor[:, place:]], dim=1)
    return wider


def _expect_unchanged(
    algorithm: Algorithm, changed: Any, when: str, rows: list[int] | slice = slice(None)
) -> None:
    """`changed` is the estimate of these rows of the plain batch."""
    for name, now, plain in zip(Advantages._fields, changed, _estimate(algorithm, batch()), strict=True):
        close = torch.allclose(now, plain[rows], rtol=1e-4, atol=1e-5)
        expect(close, f"{name} differ by {(now - plain[rows]).abs().max():.2g} {when}")


def _expect_finite(advantages: Advantages, when: str) -> None:
    for name, tensor in advantages._asdict().items():
        expect(tensor.isfinite().all(), f"{name} are not finite {when}")
