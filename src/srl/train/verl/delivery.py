"""After each update of a run on verl, its servers check that they hold the weights which the trainer sent."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from srl.rollout.delivery import NotDelivered, Sample, sampled
from srl.train.resume import resume_with
from srl.train.verl.failures import reason
from srl.train.verl.job import RUN_VARIABLE


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
    except Exception as error:
        raise NotDelivered(f"{reason(error)}; {resume_with(Path(os.environ[RUN_VARIABLE]))}") from error
