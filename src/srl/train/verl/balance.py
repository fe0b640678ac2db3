"""The order of a batch's rows that balances tokens over verl's workers.

verl gives the first part of a batch to its first worker, the next part to the second, and each worker cuts
its part into mini-batches. verl's own order mixes questions, which spreads a group over several optimiser
steps. `balanced_order` makes the mini-batches of the local backend, shared evenly by tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Place = tuple[int, int]
"""A row's question, by its position in the step, and its sample."""


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
