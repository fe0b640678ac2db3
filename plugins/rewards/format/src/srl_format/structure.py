"""Checks whether an episode is well-formed. Tags in passages and prompts are ignored."""

from __future__ import annotations

import re

from srl.protocol import ENGINE, TAGS
from srl.trajectory import Segment, Trajectory

_TAG = re.compile(rf"(<search{ENGINE}>|</?(?:{'|'.join(TAGS)})>)")
_BROKEN = "broken"
_NEXT = {
    ("ready", "<think>"): "thinking",
    ("thinking", "</think>"): "thought",
    ("thought", "<search>"): "searching",
    ("searching", "</search>"): "searched",
    ("thought", "<answer>"): "answering",
    ("answering", "</answer>"): "answered",
}
_INSIDE = frozenset({"thinking", "searching", "answering"})


def is_well_formed(trajectory: Trajectory) -> bool:
    """Whether the episode is think → (search → information → think)* → answer, separated by whitespace.

    Information must be an observation segment: an `<information>` of the policy is malformed, and so is
    feedback on an invalid turn. If the template opens `<think>`, the policy need not. A search tag may name
    a retriever. Segments' texts have no special tokens, so an EOS after the answer is allowed. Where the
    policy calls tools natively, every call was executed, and the episode has an answer.
    """
    if trajectory.protocol != "tags":
        return trajectory.answer is not None and all(s.status != "rejected" for s in trajectory.searches)
    state = "thinking" if trajectory.think_is_open else "ready"
    for segment in trajectory.segments:
        state = _after(state, segment)
    return state == "answered"


def _after(state: str, segment: Segment) -> str:
    match segment.kind:
        case "prompt":
            return state
        case "observation":
            return "ready" if state == "searched" else _BROKEN
        case "policy":
            return _after_text(state, segment.text)
        case _:
            return _BROKEN


def _after_text(state: str, text: str) -> str:
    for part in _TAG.split(text):
        if _TAG.fullmatch(part):
            tag = "<search>" if part.startswith("<search") else part
            state = _NEXT.get((state, tag), _BROKEN)
        elif part.strip() and state not in _INSIDE:
            return _BROKEN
    return state
