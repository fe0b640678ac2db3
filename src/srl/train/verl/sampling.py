"""How a turn is asked of verl's servers, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.train.verl.job import TORCH

_SEEDS = 2**31


def server_params(request_id: str, sampling: Sampling, backend: str) -> dict[str, Any]:
    """The sampling parameters of one turn as `backend` takes them: our own engine, vLLM or SGLang."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "logprobs": True,
    }
    if backend == "sglang":
        return {**params, "max_new_tokens": sampling.max_tokens, "no_stop_trim": True}
    params |= {
        "max_tokens": sampling.max_tokens,
        "include_stop_str_in_output": True,
        "seed": seed_of(sampling.key),
    }
    if backend == TORCH:
        params |= {"srl_key": list(sampling.key), "srl_request": request_id}
    return params


def seed_of(key: Sequence[int | str]) -> int:
    """A seed below 2³¹ that depends on all of a turn's key, the same in every process."""
    text = "\0".join(map(str, key)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") % _SEEDS


def reason_of(ids: Sequence[int], sampling: Sampling, codec: Codec) -> Literal["stop", "eos", "length"]:
    """Why a turn of these ids ended, in our terms; servers do not tell a stop string from EOS."""
    if ids[-1] in codec.eos_ids:
        return "eos"
    text = codec.decode(tuple(ids))
    return "stop" if any(stop in text for stop in sampling.stop) else "length"
