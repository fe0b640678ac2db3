"""What every algorithm's estimator must do, checked on a small batch with retrieved spans in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from srl.advantage import Advantages, Algorithm
from srl.testing.checks import Check, expect, run

Batch = dict[str, Any]
ROWS = ("token_level_rewards", "response_mask", "group_ids", "valid", "values")
COLUMNS = ("token_level_rewards", "response_mask", "values")
INVALID, SURVIVOR = 2, 6
"""The row with `valid` 0, and the only valid row of its group."""


@dataclass
class Trial:
    """An algorithm under test."""

    make: Callable[[], Any]

    def estimate(self, batch: Batch) -> Advantages:
        algorithm = self.make()
        values = batch["values"] if algorithm.needs_critic else None
        return algorithm.estimator(**{**batch, "values": values})


def checks(make: Callable[[], Any]) -> list[Check]:
    """The outcome of every check."""
    return run(CHECKS, Trial(make))


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


def _is_an_algorithm_with_dotted_defaults(trial: Trial) -> None:
    algorithm = trial.make()
    expect(isinstance(algorithm, Algorithm), f"{algorithm!r:.60} is not an srl.advantage.Algorithm")
    expect(algorithm.name and callable(algorithm.estimator), "the name or the estimator is missing")
    keys = list(algorithm.defaults)
    expect(all("." in key for key in keys), f"defaults are dotted config keys, found {keys}")


def _returns_two_tensors_as_large_as_the_rewards(trial: Trial) -> None:
    for name, tensor in zip(Advantages._fields, trial.estimate(batch()), strict=True):
        expect(tensor.shape == (7, 12), f"{name} has shape {tuple(tensor.shape)}, expected (7, 12)")
        expect(not tensor.requires_grad, f"{name} carries a gradient")


def _keeps_the_dtype_of_the_rewards(trial: Trial) -> None:
    for dtype in (torch.float32, torch.float64):
        found = {tensor.dtype for tensor in trial.estimate(batch(dtype))}
        expect(found == {dtype}, f"rewards of {dtype} gave {found}")


def _is_0_where_the_policy_did_not_write(trial: Trial) -> None:
    given = batch()
    for name, tensor in zip(Advantages._fields, trial.estimate(given), strict=True):
        expect(not tensor[given["response_mask"] == 0].any(), f"{name} are not 0 where the mask is 0")


def _is_0_on_invalid_rows(trial: Trial) -> None:
    for name, tensor in zip(Advantages._fields, trial.estimate(batch()), strict=True):
        expect(not tensor[INVALID].any(), f"{name} of an invalid row are not 0")


def _takes_masks_of_any_dtype(trial: Trial) -> None:
    given = batch()
    for dtype in (torch.bool, torch.float32):
        masks = {name: given[name].to(dtype) for name in ("response_mask", "valid")}
        _expect_close(trial.estimate({**given, **masks}), trial.estimate(given), f"with masks of {dtype}")


def _an_invalid_row_changes_no_other(trial: Trial) -> None:
    given = batch()
    changed = _with(given, token_level_rewards=50.0, values=-70.0, row=INVALID)
    _expect_close(trial.estimate(changed), trial.estimate(given), "with other numbers on an invalid row")
    kept = [row for row in range(7) if row != INVALID]
    _expect_close(
        trial.estimate(_rows(given, kept)), _take(trial.estimate(given), kept), "without the invalid row"
    )


def _does_not_depend_on_the_order_of_rows(trial: Trial) -> None:
    given, order = batch(), [3, 6, 0, 5, 2, 4, 1]
    _expect_close(
        trial.estimate(_rows(given, order)), _take(trial.estimate(given), order), "in another order"
    )


def _group_ids_are_only_labels(trial: Trial) -> None:
    given = batch()
    labels = {11: 0, 5: 10**12, 900: 3}
    renamed = torch.tensor([labels[group] for group in given["group_ids"].tolist()])
    _expect_close(
        trial.estimate({**given, "group_ids": renamed}), trial.estimate(given), "with other group ids"
    )


def _padding_changes_nothing(trial: Trial) -> None:
    given = batch()
    found = trial.estimate(_with_columns(given, 12, fill=0.0))
    _expect_close(
        Advantages(*(tensor[:, :12] for tensor in found)), trial.estimate(given), "with more padding"
    )


def _a_retrieved_span_changes_nothing(trial: Trial) -> None:
    given = batch()
    rows = [_with_columns(_rows(given, [row]), 3 + row % 4, fill=30.0) for row in range(7)]
    longer = {**given, **{name: torch.cat([row[name] for row in rows]) for name in COLUMNS}}
    found = trial.estimate(longer)
    kept = [[*range(3 + row % 4), *range(6 + row % 4, 15)] for row in range(7)]
    without = Advantages(*(tensor.gather(1, torch.tensor(kept)) for tensor in found))
    _expect_close(without, trial.estimate(given), "with three more tokens that the policy only read")


def _a_lone_survivor_is_no_nan(trial: Trial) -> None:
    for size in (4, 1):
        alone = _rows({**batch(), "group_size": size}, [SURVIVOR])
        _expect_finite(trial.estimate(alone), f"for one row and group_size {size}")


def _a_group_that_agrees_is_no_nan(trial: Trial) -> None:
    given = batch()
    for reward in (0.0, 1.0, 1 / 3):
        equal = torch.zeros_like(given["token_level_rewards"])
        equal[:, 0] = reward
        _expect_finite(
            trial.estimate({**given, "token_level_rewards": equal}), f"when every score is {reward:.3}"
        )


def _nothing_to_learn_from_is_no_nan(trial: Trial) -> None:
    given = batch()
    _expect_finite(
        trial.estimate({**given, "valid": torch.zeros(7, dtype=torch.bool)}), "when no row is valid"
    )
    silent = given["response_mask"].clone()
    silent[0] = 0
    found = trial.estimate({**given, "response_mask": silent})
    _expect_finite(found, "when the policy wrote nothing in a row")


def _leaves_its_inputs_as_they_were(trial: Trial) -> None:
    given, before = batch(), batch()
    trial.estimate(given)
    for name in ROWS:
        expect(torch.equal(given[name], before[name]), f"{name} was changed")


CHECKS = [
    _is_an_algorithm_with_dotted_defaults,
    _returns_two_tensors_as_large_as_the_rewards,
    _keeps_the_dtype_of_the_rewards,
    _is_0_where_the_policy_did_not_write,
    _is_0_on_invalid_rows,
    _takes_masks_of_any_dtype,
    _an_invalid_row_changes_no_other,
    _does_not_depend_on_the_order_of_rows,
    _group_ids_are_only_labels,
    _padding_changes_nothing,
    _a_retrieved_span_changes_nothing,
    _a_lone_survivor_is_no_nan,
    _a_group_that_agrees_is_no_nan,
    _nothing_to_learn_from_is_no_nan,
    _leaves_its_inputs_as_they_were,
]


def _rows(given: Batch, rows: list[int]) -> Batch:
    return {**given, **{name: given[name][rows] for name in ROWS}}


def _take(found: Advantages, rows: list[int]) -> Advantages:
    return Advantages(*(tensor[rows] for tensor in found))


def _with(given: Batch, row: int, **numbers: float) -> Batch:
    """`given` with a number on every policy token of one row."""
    changed = {name: given[name].clone() for name in numbers}
    for name, number in numbers.items():
        changed[name][row, given["response_mask"][row] == 1] = number
    return {**given, **changed}


def _with_columns(given: Batch, at: int, fill: float) -> Batch:
    """`given` with three columns before column `at` that the policy did not write."""
    wider = dict(given)
    for name in COLUMNS:
        tensor: Tensor = given[name]
        number = 0 if name == "response_mask" else fill
        columns = torch.full((len(tensor), 3), number, dtype=tensor.dtype)
        wider[name] = torch.cat([tensor[:, :at], columns, tensor[:, at:]], dim=1)
    return wider


def _expect_close(found: Advantages, expected: Advantages, when: str) -> None:
    for name, one, other in zip(Advantages._fields, found, expected, strict=True):
        close = torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        expect(close, f"{name} differ by {(one - other).abs().max():.2g} {when}")


def _expect_finite(found: Advantages, when: str) -> None:
    for name, tensor in zip(Advantages._fields, found, strict=True):
        expect(tensor.isfinite().all(), f"{name} are not finite {when}")
