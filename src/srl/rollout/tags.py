"""How policy and tools talk: prompt, turn, what continues it, the answer. Here it is by Search-R1's tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from srl.protocol import Action, Template, parse_action
from srl.rollout.codec import Codec
from srl.rollout.observation import Information, fit_information
from srl.trajectory import Hit


@dataclass(frozen=True, slots=True)
class Tags:
    """Actions are text between tags; what follows the prompt continues the assistant's turn as raw text."""

    codec: Codec
    template: Template

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[list[int], bool, str]:
        """Ids, whether they end inside an open `<think>`, and text."""
        return self.codec.encode_prompt(messages)

    def read(self, token_ids: Sequence[int]) -> tuple[str, Action | None]:
        """The text of a turn, and the first action in it."""
        text = self.codec.decode(token_ids)
        return text, parse_action(text)

    def observation(self, hits: Sequence[Hit], budget: int, after: Sequence[int]) -> Information | None:
        """What of `hits` fits into `budget` tokens, after the ids `after`; None if nothing does."""
        return fit_information(hits, budget, self.codec, after or None)

    def feedback(self, after: Sequence[int]) -> tuple[str, list[int]]:
        """What follows a turn without a valid action."""
        return self.template.feedback, self.codec.encode_text(self.template.feedback, after=after)

    def answer(self, text: str) -> str | None:
        """The answer in a last turn that has no action."""
        return self.template.untagged_answer(text)
