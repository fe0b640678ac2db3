"""Tokens coloured by a value: log-prob, advantage, entropy, or how far the sampler is from the trainer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from srl.browse.formatting import signed
from srl.browse.transcript import Step

Heat = Literal["logprob", "advantage", "mismatch", "entropy"]

_BOUNDS: dict[str, tuple[float, ...]] = {
    "logprob": (0.1, 0.5, 1, 2, 4, 8),
    "entropy": (0.1, 0.5, 1, 1.5, 2, 3),
    "mismatch": (0.001, 0.01, 0.03, 0.1, 0.3, 1),
}
"""Where the next stronger colour begins, in nats."""

LEGENDS: dict[Heat, str] = {
    "logprob": "minus the sampler's log-prob",
    "entropy": "entropy of the trainer's distribution",
    "mismatch": "distance of the sampler's log-prob from the trainer's",
    "advantage": "advantage, in quarters of the largest here",
}


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the policy: its text, the class of its colour, and its values in words."""

    text: str
    colour: str
    values: str


def kinds(steps: Sequence[Step]) -> list[Heat]:
    """The colourings that the log has values for."""
    return [kind for kind in LEGENDS if any(_values(step, kind) for step in steps)]


def legend(kind: Heat) -> list[tuple[str, str]]:
    """The classes of the colours of `kind`, weakest first, each with what it stands for."""
    if kind == "advantage":
        return [("n4", "negative"), ("h0", "0"), ("p4", "positive")]
    bounds = _BOUNDS[kind]
    return [("h0", f"< {bounds[0]:g}"), *((f"h{n}", f"≥ {at:g}") for n, at in enumerate(bounds, 1))]


def largest_advantage(steps: Sequence[Step]) -> float:
    """The largest finite distance of an advantage from zero; 1 if there is none."""
    sizes = (abs(value) for step in steps for value in step.advantages if isfinite(value))
    return max(sizes, default=1.0) or 1.0


def tokens(step: Step, kind: Heat, texts: Sequence[str] | None, largest: float) -> list[Token]:
    """The tokens of a policy step; without `texts` their ids stand for them."""
    segment, values = step.segment, _values(step, kind)
    columns = {
        "log-prob": segment.logprobs, "trainer's": step.trainer_logprobs, "entropy": step.entropies,
        "advantage": step.advantages, "return": step.returns,
    }  # fmt: skip
    pieces = []
    for place, token in enumerate(segment.token_ids):
        numbers = [
            f"{name} {signed(column[place])}" for name, column in columns.items() if len(column) > place
        ]
        colour = _colour(kind, values[place], largest) if len(values) > place else "h0"
        text = texts[place] if texts is not None else f"{token} "
        pieces.append(Token(text, colour, "; ".join([f"token {token}", *numbers])))
    return pieces


def _values(step: Step, kind: Heat) -> Sequence[float]:
    if kind == "logprob":
        return [-value for value in step.segment.logprobs]
    if kind == "mismatch":
        pairs = zip(step.trainer_logprobs, step.segment.logprobs, strict=False)
        return [abs(trainer - sampler) for trainer, sampler in pairs]
    return step.entropies if kind == "entropy" else step.advantages


def _colour(kind: Heat, value: float, largest: float) -> str:
    if kind != "advantage":
        return f"h{bisect_right(_BOUNDS[kind], value)}"
    if not isfinite(value) or not value:
        return "h0"
    return f"{'p' if value > 0 else 'n'}{min(round(abs(value) / largest * 4 + 0.499), 4)}"
