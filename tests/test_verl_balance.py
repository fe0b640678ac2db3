"""Rows dealt out to verl's workers: the mini-batches of the local backend, whoever computes them."""

from __future__ import annotations

import random

import pytest

from srl.train.verl.balance import balanced_order, block_of, share_out
from srl.update.actor import mini_batches


def a_batch(questions=8, samples=4, seed=0):
    """Places and lengths of a batch's rows, in the order in which their episodes ended."""
    rng = random.Random(seed)
    places = [(question, sample) for question in range(questions) for sample in range(samples)]
    rng.shuffle(places)
    return places, [rng.randrange(20, 400) for _ in places]


def verls_mini_batches(order, workers, size):
    """What verl's workers hold together in each of their mini-batches."""
    share, mine = len(order) // workers, size // workers
    parts = [order[worker * share : (worker + 1) * share] for worker in range(workers)]
    return [{row for part in parts for row in part[k : k + mine]} for k in range(0, share, mine)]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("size", [8, 16, 32])
def test_mini_batches_hold_the_rows_of_the_local_backends(workers, size):
    places, lengths = a_batch()
    local = sorted(range(len(places)), key=places.__getitem__)
    expected = [{local[row] for row in index.tolist()} for index in mini_batches(len(local), size)]
    order = balanced_order(places, lengths, workers=workers, block=size)
    assert verls_mini_batches(order, workers, size) == expected


def test_actor_and_critic_of_different_sizes_both_get_theirs():
    places, lengths = a_batch()
    local = sorted(range(len(places)), key=places.__getitem__)
    order = balanced_order(places, lengths, workers=2, block=block_of(16, 8, 2))
    for size in (8, 16):
        expected = [set(local[start : start + size]) for start in range(0, len(local), size)]
        assert verls_mini_batches(order, 2, size) == expected


def test_order_does_not_depend_on_who_finished_first():
    dealt_rows = []
    for seed in range(3):
        places, _ = a_batch(seed=seed)
        lengths = [10 * question + sample for question, sample in places]
        dealt_rows.append([places[row] for row in balanced_order(places, lengths, workers=2, block=8)])
    assert dealt_rows[0] == dealt_rows[1] == dealt_rows[2]


def test_one_worker_gets_the_order_of_the_questions():
    places, lengths = a_batch()
    order = balanced_order(places, lengths, workers=1, block=8)
    assert [places[row] for row in order] == sorted(places)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_workers_get_as_many_rows_and_about_as_many_tokens(workers):
    _, lengths = a_batch(questions=16)
    shares = share_out(range(len(lengths)), lengths, workers)
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert {len(share) for share in shares} == {len(lengths) // workers}
    tokens = [sum(lengths[row] for row in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_block_divides_both_mini_batches_or_is_the_actors():
    assert block_of(16, None, 2) == 16
    assert block_of(16, 24, 2) == 8
    assert block_of(6, 9, 2) == 6


@pytest.mark.slow
@pytest.mark.must_run
def test_verls_own_iterator_cuts_the_workers_parts_so():
    pytest.importorskip("verl")
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    places, lengths = a_batch()
    order = balanced_order(places, lengths, workers=2, block=8)
    rows = TensorDict({"row": torch.tensor(order)}, batch_size=len(order))
    parts = [
        [part["row"].tolist() for part in tensordict_utils.make_iterator(
            share, mini_batch_size=4, epochs=1, seed=worker, dataloader_kwargs={"shuffle": False}
        )]
        for worker, share in enumerate(tensordict_utils.chunk_tensordict(rows, 2))
    ]  # fmt: skip
    together = [set(first) | set(second) for first, second in zip(*parts, strict=True)]
    assert together == verls_mini_batches(order, 2, 8)
