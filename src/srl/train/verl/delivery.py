"""After each update of a run on verl, its servers check that they hold the weights which the trainer sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from srl.rollout.delivery import NotDelivered, Sample, sampled
from srl.train.verl.failures import reason


async def deliver(
    weights: Iterable[tuple[str, Tensor]],
    send: Callable[[Any], Awaitable[None]],
    check: Callable[[Sample], Awaitable[None]],
    adapter: Mapping[str, Any] | None = None,
) -> None:
    """`send` the weights, and have the server `check` what it holds.

    `adapter` is PEFT's configuration where those of an adapter are sent. Raises NotDelivered.
    """
    sample: dict[str, Any] = {}
    await send(sampled(weights, sample, adapter["lora_alpha"] / adapter["r"] if adapter else 1.0))
    try:
        await check(sample)
    except Exception as error:  # vLLM hands on what an error says, not the error
        raise NotDelivered(reason(error)) from error
