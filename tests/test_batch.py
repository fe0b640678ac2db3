"""Batches: who wrote a token decides its mask, and micro-batches hold every row once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rows import trajectory

from srl.update.batch import collate, micro_batches

SPECS = ("ppaaoaa", "paaa", "ppppafffa")
CALMLY = settings(deadline=None, max_examples=40)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def test_the_mask_is_one_on_what_the_policy_wrote_and_nowhere_else():
    batch = collate([trajectory(spec) for spec in SPECS])
    assert batch.response_mask.tolist() == [
        [0, 0, 1, 1, 0, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 1],
    ]
    assert batch.after_prompt.tolist() == [
        [0, 0, 1, 1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1],
    ]
    assert batch.lengths.tolist() == [7, 4, 9]
    assert batch.attention_mask.sum(1).tolist() == [7, 4, 9]


@pytest.mark.parametrize("pad_id", [0, 2, 39])
def test_no_mask_depends_on_the_pad_id(pad_id):
    """Also where the pad id is a token that the policy wrote, such as an EOS that pads."""
    rows = [trajectory(spec, vocabulary=4) for spec in SPECS]  # ids 2 and 3 only
    batch, other = collate(rows, pad_id), collate(rows, 1)
    for name in ("attention_mask", "response_mask", "after_prompt", "sampler_logprobs"):
        assert torch.equal(getattr(batch, name), getattr(other, name))
    assert batch.input_ids[1, 4:].tolist() == [pad_id] * 5


def test_rows_drop_the_columns_that_are_padding_in_all_of_them():
    batch = collate([trajectory(spec) for spec in SPECS])
    part = batch.rows(torch.tensor([1, 0]))
    assert part.input_ids.shape == (2, 7)
    for name in ("input_ids", "attention_mask", "response_mask", "after_prompt", "sampler_logprobs"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[[1, 0], :7])
    assert len(part) == 2


@CALMLY
@given(LENGTHS, st.integers(1, 200))
def test_every_row_is_in_one_micro_batch_which_fits_its_budget_and_is_as_full_as_that_allows(lengths, budget):
    groups = [group.tolist() for group in micro_batches(torch.tensor(lengths), budget)]
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) * max(lengths[row] for row in group) <= budget or len(group) == 1
    for group, following in pairwise(groups):
        assert (len(group) + 1) * lengths[group[0]] > budget
        assert min(lengths[row] for row in group) >= lengths[following[0]]
