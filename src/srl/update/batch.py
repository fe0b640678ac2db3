"""Trajectories as padded tensors, and mini-batches cut into micro-batches by a token budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from srl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded rows; every tensor is `(B, T)`, T the longest row.

    `response_mask` is 1 on the tokens that the policy wrote and 0 on all others, including prompt and
    padding. It depends on who wrote a segment, never on the ids.
    """

    input_ids: Tensor  # (B, T) long
    attention_mask: Tensor  # (B, T) long, 1 on real tokens
    response_mask: Tensor  # (B, T) float
    after_prompt: Tensor  # (B, T) float, 1 on everything after the prompt, whoever wrote it
    sampler_logprobs: Tensor  # (B, T) float

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        return self.attention_mask.sum(1)  # (B,)

    def rows(self, index: Tensor) -> Batch:
        """The rows of `index`, without columns that are padding in all of them."""
        width = int(self.lengths[index].max())
        return Batch(*(getattr(self, column.name)[index, :width] for column in fields(self)))

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(getattr(self, column.name).to(device) for column in fields(self)))


def collate(trajectories: Sequence[Trajectory], pad_id: int = 0) -> Batch:
    """The trajectories as one batch, right-padded with `pad_id`, which no mask depends on."""
    width = max(len(trajectory.token_ids) for trajectory in trajectories)

    def padded(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)

    ids = [trajectory.token_ids for trajectory in trajectories]
    after = [
        [int(segment.kind != "prompt") for segment in trajectory.segments for _ in segment.token_ids]
        for trajectory in trajectories
    ]
    return Batch(
        input_ids=padded(ids, pad_id, torch.long),
        attention_mask=padded([[1] * len(row) for row in ids], 0, torch.long),
        response_mask=padded([trajectory.response_mask for trajectory in trajectories], 0, torch.float32),
        after_prompt=padded(after, 0, torch.float32),
        sampler_logprobs=padded([trajectory.logprobs for trajectory in trajectories], 0, torch.float32),
    )


def response_and_loss_mask(batch: Batch, valid: Tensor, *, mask_observations: bool) -> tuple[Tensor, Tensor]:
    """The response mask and the loss mask, each (B, T); both are 0 in rows with `valid` (B,) 0.

    The response mask is 1 on the tokens that the policy wrote. Every mean counts these. The loss mask is the
    same, but without `mask_observations` it is also 1 on retrieved text, which is then trained on too.
    """
    mask = batch.response_mask * valid[:, None]
    return mask, mask if mask_observations else batch.after_prompt * valid[:, None]


def row_batch(rows: Sequence[Sequence[int]], device: torch.device) -> Batch:
    """Rows of ids as one batch, all of them the policy's."""
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.zeros(real.shape, dtype=torch.long).masked_scatter(
        real, torch.tensor([id for row in rows for id in row])
    )
    mask = real.float()
    return Batch(ids, real.long(), mask, mask, mask * 0).to(device)


def micro_batches(lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Row indices in groups of at most `max_tokens` tokens with the padding; rows of similar length together.

    A row with more tokens than that is a group of its own. The order depends on the lengths only.
    """
    group: list[int] = []
    sizes = lengths.tolist()
    for row in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        if group and sizes[group[0]] * (len(group) + 1) > max_tokens:
            yield torch.tensor(group)
            group = []
        group.append(row)
    if group:
        yield torch.tensor(group)
