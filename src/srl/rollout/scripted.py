"""An engine that says what it is told: SFT demonstrations and tests run through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Sampling

Script = Callable[[str, int], str]
"""(request id, turn) -> the text of that turn."""


class ScriptedEngine:
    """Replays the texts of a script through the same episode that a model would run.

    Log-probs are 0: a script is certain of what it says. A turn longer than its token cap is cut
    there, as a model's would be.
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
