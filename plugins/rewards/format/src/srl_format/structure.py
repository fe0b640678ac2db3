"""Whether an episode keeps to the form, decided by who wrote what: no passage and no prompt has a say."""

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
    """Whether the episode is think → (search → information → think)* → answer with only space between.

    Information is an observation segment: the policy's own `<information>` breaks the form, and so does
    feedback on a useless turn. A template that has opened `<think>` has written it for the policy. A
    search tag may name a retriever. The text of a segment is without special tokens, so an EOS after the
    answer changes nothing.
    """
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
