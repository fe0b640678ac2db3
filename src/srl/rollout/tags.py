"""Search-R1's protocol: actions between tags, and results as raw text in the assistant's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from srl.protocol import STOP_STRINGS, Template, ToolCall, parse_action
from srl.rollout.codec import Codec
from srl.rollout.observation import fit_information
from srl.rollout.protocol import Continuation, Messages, Tool, Turn
from srl.trajectory import Search


@dataclass(frozen=True, slots=True)
class Tags:
    """The `Protocol` of models without a format for calls. An action is complete where its tag closes."""

    codec: Codec
    template: Template
    tools: Mapping[str, Tool]
    stop: tuple[str, ...] = STOP_STRINGS

    name: ClassVar = "tags"
    card: ClassVar[Mapping[str, str]] = {}

    def prompt(self, messages: Messages) -> tuple[list[int], bool, str]:
        return self.codec.encode_prompt(messages)

    def read(self, token_ids: Sequence[int], inside_thought: bool = False) -> Turn:
        """The first action counts."""
        text = self.codec.decode(token_ids)
        action = parse_action(text)
        if action is None:
            return Turn(text)
        if action.kind == "answer":
            return Turn(text, answer=action.content, ends=True)
        retriever = {"retriever": action.retriever} if action.retriever else {}
        return Turn(text, (ToolCall("search", {"query": action.content, **retriever}),))

    def continue_with(
        self, results: Sequence[Search], longest: int, room: int, after: Sequence[int]
    ) -> Continuation | None:
        """Feedback where nothing was searched, else the passages that fit."""
        if not results or results[0].status == "rejected":
            ids = self.codec.encode_text(self.template.feedback, after=after)
            return Continuation("feedback", self.template.feedback, ids) if len(ids) <= room else None
        fitted = fit_information(results[0].hits, min(longest, room), self.codec, after or None)
        return fitted and Continuation("observation", fitted.text, fitted.token_ids, [fitted.of(results[0])])

    def encode(self, text: str, after: Sequence[int] | None = None) -> list[int]:
        return self.codec.encode_text(text, after=after)

    def last_answer(self, turn: Turn) -> str | None:
        """A turn without an action is read as the template says."""
        return None if turn.calls else self.template.untagged_answer(turn.text)
