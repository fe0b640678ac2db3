"""The critic, a trunk like the policy's with a value head, and its update."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from srl.models.weights import Float32Head, add_lora
from srl.update.actor import Experience, update
from srl.update.batch import Batch
from srl.update.logits import states_before, trunk
from srl.update.losses import LossAggMode, count_for, value_loss
from srl.update.optimiser import Optimiser
from srl.update.packing import packed_micro_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Critic(nn.Module):
    """V_t, the value before token t, from the hidden state of token t − 1.

    It starts as the policy's trunk with a zero head, so all initial values are 0. With `lora_rank` 0 all
    weights of the trunk are copied and trained. Above, the trunk is frozen and has a LoRA adapter: it is the
    frozen one of a policy with an adapter of its own, whose tensors it shares, and else a copy of the policy
    as it is now.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        *,
        lora_rank: int = 0,
        lora_alpha: int = 32,
        lora_target_modules: str | Sequence[str] = "all-linear",
    ) -> None:
        super().__init__()
        self.decoder = _trunk_without_adapter(policy, shared=lora_rank > 0)
        if lora_rank > 0:
            add_lora(self.decoder, lora_rank, lora_alpha, lora_target_modules, "critic.lora_rank")
        else:
            self.decoder.requires_grad_(True)
        width = self.decoder.config.hidden_size
        parameter = next(self.decoder.parameters())
        self.head = Float32Head(width, 1, bias=False, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        self.eval()

    def get_decoder(self) -> PreTrainedModel:
        return self.decoder

    def forward(self, batch: Batch) -> Tensor:
        """Values `(B, T)` in float32; 0 at padding and in the first column, as no token precedes it."""
        positions = batch.attention_mask[:, 1:] != 0  # (B, T-1)
        predictions = self.head(states_before(self, batch, positions)).squeeze(-1).float()  # (N,)
        values = predictions.new_zeros(positions.shape).masked_scatter(positions, predictions)
        return torch.nn.functional.pad(values, (1, 0))


def _trunk_without_adapter(policy: PreTrainedModel, *, shared: bool) -> PreTrainedModel:
    """A copy of the policy's trunk without its adapter; with `shared` its frozen weights are the policy's."""
    frozen = [weight for weight in policy.parameters() if shared and not weight.requires_grad]
    decoder = copy.deepcopy(trunk(policy), {id(weight): weight for weight in frozen})
    for name, module in list(decoder.named_modules()):
        if hasattr(module, "get_base_layer") and not name.endswith(".base_layer"):  # PEFT nests them
            decoder.set_submodule(name, module.get_base_layer())
    return decoder


@torch.no_grad()
def batched_values(critic: Critic, batch: Batch, *, max_tokens: int) -> Tensor:
    """Values `(B, T)` of a whole batch, in micro-batches, without gradients."""
    values = torch.zeros_like(batch.response_mask)
    for index in packed_micro_batches(critic.decoder, batch, max_tokens):
        rows = batch.rows(index)
        values[index, : rows.input_ids.shape[1]] = critic(rows)
    return values


def update_critic(
    critic: Critic,
    optimiser: Optimiser,
    experience: Experience,
    *,
    clip: float | None,
    normalise: LossAggMode = "token-mean",
    horizon: int | None = None,
    mini_batch_rows: int,
    epochs: int = 1,
    max_tokens: int = 16384,
) -> dict[str, float]:
    """The `update` of the critic."""
    accumulate = partial(
        accumulate_critic, critic, clip=clip, normalise=normalise, horizon=horizon, max_tokens=max_tokens
    )
    return update("critic", optimiser, experience, accumulate, mini_batch_rows, epochs)


def accumulate_critic(
    critic: Critic,
    part: Experience,
    *,
    clip: float | None,
    normalise: LossAggMode,
    max_tokens: int,
    horizon: int | None = None,
) -> dict[str, float]:
    """Backward pass of one mini-batch's value loss, over micro-batches; `horizon` as in `count_for`."""
    denominator = count_for(part.loss_mask, normalise, horizon)
    tokens = float(part.loss_mask.sum())
    total: dict[str, float] = {}
    for index in packed_micro_batches(critic.decoder, part.batch, max_tokens):
        rows = part.rows(index)
        assert rows.values is not None, "the critic's update needs the values from before it"
        loss, metrics = value_loss(
            critic(rows.batch), rows.values, rows.returns, rows.loss_mask,
            clip=clip, normalise=normalise, denominator=denominator, tokens=tokens,
        )  # fmt: skip
        loss.backward()
        for name, number in {"vf_loss": loss, **metrics}.items():
            total[f"critic/{name}"] = total.get(f"critic/{name}", 0.0) + float(number.detach())
    return total


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 − Var(R − V) / Var(R) over tokens with mask 1; 0 where the returns do not vary."""
    real = mask.bool()
    if int(real.sum()) < 2:
        return 0.0
    variance = returns[real].var()
    return float(1 - (returns - values)[real].var() / variance) if variance > 1e-12 else 0.0
