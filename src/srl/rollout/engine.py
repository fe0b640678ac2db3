"""The engine protocol: what an episode asks of anything that generates. And an engine that plays a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from srl.rollout.codec import Codec


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled. `temperature=0` is greedy.

    `key` seeds the turn's random numbers: (seed, phase, step, question, sample, attempt, turn). Two calls
    with the same key and the same logits draw the same tokens, whatever else is in the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    key: tuple[int | str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled ids, including the whole token that completes a stop string.

    `logprobs` has one entry for each id: log-softmax of logits / temperature, before top-p.
    `stop_reason` is `stop` (a stop string was completed), `eos` (the last id is EOS) or `length`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "eos", "length"]


class Engine(Protocol):
    """Generates one turn at a time.

    `request_id` is the same for all turns of an episode. Each call's `token_ids` begins with the ids and the
    completion of the call before, so an engine can keep a KV cache. `finish` ends the episode.
    """

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion: ...

    def finish(self, request_id: str) -> None: ...


Script = Callable[[str, int], str]
"""(request id, turn) -> the text of that turn."""


class ScriptedEngine:
    """An engine that says the texts of a script, for demonstrations and tests.

    Its log-probs are 0. A turn longer than its token limit is cut there, as a model's would be.
    """

    def __init__(self, codec: Codec, script: Script) -> None:
        self.codec = codec
        self.script = script
        self.turns: dict[str, int] = {}

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        turn = self.turns.get(request_id, 0)
        self.turns[request_id] = turn + 1
        ids = self.codec.encode_text(self.script(request_id, turn))
        kept = tuple(ids[: sampling.max_tokens])
        reason: Literal["stop", "length"] = "stop" if len(kept) == len(ids) else "length"
        return Completion(kept, (0.0,) * len(kept), reason)

    def finish(self, request_id: str) -> None:
        self.turns.pop(request_id, None)
