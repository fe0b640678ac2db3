"""The mask of the policy's tokens, and sums, means and whitening over it."""

from __future__ import annotations

import torch
from torch import Tensor


def valid_mask(response_mask: Tensor, valid: Tensor) -> Tensor:
    """The policy's tokens (B, T) as bool; all False in rows with `valid` 0."""
    return response_mask.bool() & valid.bool().unsqueeze(-1)  # (B, T)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum where the mask is 1; other values, even NaN, are never read."""
    return values.masked_fill(~mask.bool(), 0).sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where the mask is 1; 0 if it is 0 everywhere."""
    return masked_sum(values, mask, dim) / mask.bool().sum(dim=dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance (n − 1) where the mask is 1, a scalar; 0 for fewer than two values."""
    squares = (values - masked_mean(values, mask)).square()
    return masked_sum(squares, mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(x − mean) / √(var + ε) over all tokens with mask 1, and 0 elsewhere."""
    centred = values - masked_mean(values, mask)
    return (centred * torch.rsqrt(masked_var(values, mask) + epsilon)).masked_fill(~mask.bool(), 0)
