"""The engine protocol: what an episode asks of anything that generates. And an engine that plays a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from srl.errors import SrlError, UserError
from srl.rollout.codec import Codec

if TYPE_CHECKING:
    from torch import Tensor

    from srl.rollout.delivery import Sample


StopReason = Literal["stop", "eos", "length"]
OnTokens = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one turn is sampled. `temperature=0` is greedy.

    `key` seeds the turn's random numbers: (seed, phase, step, question, sample, attempt, turn). Two calls
    with the same key and the same logits draw the same tokens, whatever else is in the batch.

    `on_tokens` is called with the ids of the turn so far, as they are sampled, in the event loop of the call.
    An engine that has nothing to tell before the turn has ended never calls it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    key: tuple[int | str, ...] = ()
    on_tokens: OnTokens | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled ids, including the whole token that completes a stop string.

    `logprobs` has one entry for each id: log-softmax of logits / temperature, before top-p.
    `stop_reason` is `stop` (a stop string was completed), `eos` (the last id is EOS) or `length`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason


class EngineFault(SrlError):  # noqa: N818 - a fault, as in srl.index.Fault
    """Why an engine did not generate a turn, in one line: a fault of the infrastructure."""


class LogitsNotFinite(SrlError):  # noqa: N818 - what is wrong, as in EngineFault
    """The policy's logits are not finite, so that nothing can be sampled from them."""

    def __init__(
        self,
        message: str = "the model's logits are not finite: its weights have diverged, or overflow in this "
        "dtype; start from an earlier checkpoint, or try float32",
    ) -> None:  # its own argument is what a pickled one is made from
        super().__init__(message)


def stop_reason(token_ids: Sequence[int], stop: Sequence[str], codec: Codec) -> StopReason:
    """Why a turn of these ids ended; most engines do not tell a stop string from EOS."""
    if token_ids and token_ids[-1] in codec.eos_ids:
        return "eos"
    text = codec.decode(token_ids)
    return "stop" if any(string in text for string in stop) else "length"


def check_turn(request_id: str, token_ids: Sequence[int], sampling: Sampling, max_model_len: int) -> None:
    """Raises UserError if the turn may exceed `max_model_len`."""
    if len(token_ids) + sampling.max_tokens > max_model_len:
        raise UserError(
            f"episode {request_id}: {len(token_ids)} tokens and up to {sampling.max_tokens} new ones do "
            f"not fit max_model_len={max_model_len}; raise data.max_response_length or ask for less"
        )


class Engine:
    """Generates one turn at a time. A subclass has its own `generate`; other methods do nothing.

    `request_id` is the same for all turns of an episode. Each call's `token_ids` begins with the ids and the
    completion of the call before, so an engine can keep a KV cache. `finish` ends the episode. A caller that
    is cancelled aborts its turn. If the engine fails, every waiting caller gets the error: an EngineFault if
    another try may help.

    A trainer calls `sleep`, updates the policy, calls `sync` unless the engine has the `same_weights`, and
    calls `wake`. No turn is being generated then.
    """

    same_weights = False
    """Whether it generates with the tensors of the trainer's own model; then `sync` is not called."""
    token_ids = True
    """Whether the ids that it returns are those that were sampled, so that they can be trained on."""

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        raise NotImplementedError

    def finish(self, request_id: str) -> None:
        """Forget the episode."""

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Generate with these weights from now on, and forget every cache; also while asleep.

        Names are those of the plain Hugging Face model, any LoRA adapter merged. Raises UserError where
        weights cannot be changed.
        """
        raise UserError(
            "the weights of this engine cannot be changed, so it cannot be used in training; "
            "set rollout.engine=torch"
        )

    def digests(self, sample: Sample) -> Mapping[str, str] | None:
        """`held_digests` of the weights that the engine has of a sample; None if it cannot say."""
        return None

    def sleep(self) -> None:
        """Free the memory that an update can use, caches first."""

    def wake(self) -> None:
        """Be ready to generate after `sleep`, with the weights as they are now."""

    def reset(self) -> None:
        """Forget every episode; turns that are being generated fail."""

    def close(self) -> None:
        """Free everything. The engine is not used again."""


Script = Callable[[str, int], str]
"""(request id, turn) -> the text of that turn."""
Encode = Callable[[str, Sequence[int]], list[int]]
"""(text of a turn, the ids before it) -> its ids."""


class ScriptedEngine(Engine):
    """An engine that says the texts of a script, for demonstrations and tests, with the ids of `encode`.

    Its log-probs are 0. A turn longer than its token limit is cut there, as a model's would be.
    """

    same_weights = True

    def __init__(self, codec: Codec, script: Script, encode: Encode | None = None) -> None:
        self.codec, self.script, self.turns = codec, script, Counter[str]()
        self.encode = encode or codec.encode_text

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        text = self.script(request_id, self.turns[request_id])
        self.turns[request_id] += 1
        ids = tuple(self.encode(text, token_ids))
        turn = ids[: sampling.max_tokens]
        return Completion(turn, (0.0,) * len(turn), "stop" if turn == ids else "length")

    def finish(self, request_id: str) -> None:
        self.turns.pop(request_id, None)
