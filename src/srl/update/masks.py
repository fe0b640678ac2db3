"""Which tokens are trained on, and which count in means."""

from __future__ import annotations

from torch import Tensor

from srl.update.batch import Batch


def response_and_loss_mask(batch: Batch, valid: Tensor, *, mask_observations: bool) -> tuple[Tensor, Tensor]:
    """The response mask and the loss mask, each (B, T); both are 0 in rows with `valid` (B,) 0.

    The response mask is 1 on the tokens that the policy wrote. Every mean counts these. The loss mask is the
    same, but without `mask_observations` it is also 1 on retrieved text, which is then trained on too.
    """
    mask = batch.response_mask * valid[:, None]
    return mask, mask if mask_observations else batch.after_prompt * valid[:, None]
