"""What generates for an episode on verl: an engine that asks verl's rollout servers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Engine, Sampling, stop_reason
from srl.train.verl.job import TORCH


@dataclass(slots=True)
class VerlEngine(Engine):
    """An engine that asks verl's servers; `steps` are the versions of the weights that answered.

    verl itself hands new weights to its servers.
    """

    generate_on: Callable[..., Awaitable[Any]]
    codec: Codec
    backend: str
    steps: list[int] = field(default_factory=list)
    seconds: float = 0.0

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One turn; the ids are kept whole through the token that completes the stop string."""
        began = time.perf_counter()
        output = await self.generate_on(
            request_id=request_id,
            prompt_ids=list(token_ids),
            sampling_params=server_params(sampling, self.backend, self.codec.eos_ids),
        )
        self.seconds += time.perf_counter() - began
        ids = tuple(output.token_ids)
        if not ids or output.stop_reason in ("abort", "aborted"):
            raise RuntimeError(f"episode {request_id}: the server aborted the turn ({output.stop_reason})")
        logprobs = tuple(output.log_probs or ())
        if len(logprobs) != len(ids):
            raise RuntimeError(
                f"episode {request_id}: the server returned {len(logprobs)} log-probs for {len(ids)} tokens"
            )
        self.steps.append(int(output.extra_fields.get("global_steps") or 0))
        return Completion(ids, logprobs, stop_reason(ids, sampling.stop, self.codec))


def server_params(sampling: Sampling, backend: str, eos_ids: Collection[int]) -> dict[str, Any]:
    """The sampling parameters of one turn as `backend` takes them: our own engine, vLLM or SGLang.

    Only our own gets the key. vLLM and SGLang have a generator for each server: with a seed for each request
    they would draw one sequence after the other, in Python.
    """
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(eos_ids),
        "logprobs": True,
    }
    if backend == "sglang":
        return {**params, "max_new_tokens": sampling.max_tokens, "no_stop_trim": True}
    params |= {"max_tokens": sampling.max_tokens, "include_stop_str_in_output": True}
    if backend == TORCH:
        params |= {"srl_key": list(sampling.key)}
    return params
