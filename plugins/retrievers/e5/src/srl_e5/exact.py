"""Exact search by matrix products, chunk by chunk, on the device of the vectors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_GROUP = 128
"""Columns per group; only the groups with the largest maxima are sorted."""


class TorchSearch:
    """Finds the largest inner products with `vectors` (N, D), on their device and in their precision.

    Besides the vectors it needs memory for the scores of one chunk: queries × `chunk` numbers.
    """

    def __init__(self, vectors: Tensor, chunk: int = 1 << 20) -> None:
        self._vectors, self._chunk = vectors, chunk

    @torch.inference_mode()
    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and rows, both (Q, k), best first; `k` is at most N."""
        query_vectors = torch.from_numpy(queries).to(self._vectors)
        best: tuple[Tensor, Tensor] | None = None
        for start in range(0, len(self._vectors), self._chunk):
            chunk = self._vectors[start : start + self._chunk]
            scores, rows = top_columns(query_vectors @ chunk.T, k)
            if best is not None:
                scores, rows = torch.cat([best[0], scores], 1), torch.cat([best[1], rows + start], 1)
                scores, order = scores.topk(min(k, scores.shape[1]), dim=1)
                rows = rows.gather(1, order)
            best = scores, rows
        assert best is not None
        return best[0].float().cpu().numpy(), best[1].cpu().numpy()


def top_columns(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of each row of `scores` (Q, N), largest first, and their columns.

    The k largest are in the k groups of columns with the largest maxima. So one pass finds these groups,
    and only their columns are sorted instead of all N.
    """
    queries, columns = scores.shape
    k = min(k, columns)
    groups = columns // _GROUP
    if groups <= 4 * k:
        largest = scores.topk(k, dim=1)
        return largest.values, largest.indices
    grouped = scores[:, : groups * _GROUP].view(queries, groups, _GROUP)
    top_groups = grouped.amax(2).topk(k, dim=1).indices  # (Q, k)
    inside = top_groups[:, :, None] * _GROUP + torch.arange(_GROUP, device=scores.device)
    ungrouped = torch.arange(groups * _GROUP, columns, device=scores.device).expand(queries, -1)
    candidates = torch.cat([inside.flatten(1), ungrouped], dim=1)  # (Q, k · group + ungrouped)
    values, order = scores.gather(1, candidates).topk(k, dim=1)
    return values, candidates.gather(1, order)


def upload(vectors: np.ndarray, device: torch.device, dtype: torch.dtype, rows: int = 1 << 18) -> Tensor:
    """`vectors` (N, D), which may be memory-mapped, as a tensor on `device`, `rows` at a time."""
    target = torch.empty(vectors.shape, dtype=dtype, device=device)
    for start in range(0, len(vectors), rows):
        part = np.array(vectors[start : start + rows], dtype=np.float32)
        target[start : start + rows] = torch.from_numpy(part).to(device)
    return target
