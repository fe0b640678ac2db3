"""The order in which rows are dealt out to verl's workers: mini-batches of the local backend, shared evenly.

verl deals the first part of a batch to its first worker, the next to the second, and each cuts its part
into mini-batches. Left to itself it orders the whole batch by who finished and what is long, so that a
mini-batch holds whatever comes together, and a group is spread over several optimiser steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Place = tuple[int, int]
"""A row's question, by its position in the step, and its sample."""


def balanced_order(places: Sequence[Place], lengths: Sequence[int], *, workers: int, block: int) -> list[int]:
    """Indices of the rows in the order in which verl deals them out.

    Rows are sorted by question and sample. Of every `block` of them each worker gets as many, of similar
    tokens in all, so that the workers' k-th mini-batches together hold the k-th questions of the step.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    blocks = [order[start : start + block] for start in range(0, len(order), block)]
    shares = [share_out(rows, lengths, workers) for rows in blocks]
    return [row for worker in range(workers) for share in shares for row in share[worker]]


def share_out(rows: Sequence[int], lengths: Sequence[int], workers: int) -> list[list[int]]:
    """The rows in as many lists of equal size: the longest left goes where the fewest tokens are."""
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
    """Rows to be shared out at a time: a mini-batch, or where two sizes are in use what divides both.

    Where that does not divide by the workers it is the actor's, and the critic's mini-batches mix.
    """
    both = actor if critic is None else math.gcd(actor, critic)
    return actor if both % workers else both
