"""The model's own way to call tools: its chat template declares them, its format of calls is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from srl.errors import UserError
from srl.protocol import NO_RESULTS, Template, ToolCall, checked, parse_action, shown_result
from srl.rollout.codec import Codec
from srl.rollout.documents import OPENERS
from srl.rollout.glue import Glue, derive, refusal
from srl.rollout.observation import fit_result
from srl.rollout.protocol import Continuation, Messages, Tool, Turn, schema
from srl.trajectory import Search

_STUB = "…"
"""Stands for a result that is not fitted yet."""
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""The name of a token for a byte, as SentencePiece has it."""
_ANSWER = re.compile(r".*<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Native:
    """The `Protocol` of a model that was taught to call tools.

    A turn ends at EOS. Its calls are executed, at most `max_calls`; a malformed one has an error as its
    result. A turn without a call is the final message, and the answer: what stands between its last answer
    tags, else what the template says of one without.
    """

    codec: Codec
    template: Template
    tools: Mapping[str, Tool]
    glue: Glue
    max_calls: int = 4

    stop = ()

    @classmethod
    def of(
        cls, codec: Codec, template: Template, tools: Mapping[str, Tool], *, call_format: str = "auto",
        max_calls: int = 4,
    ) -> Native:  # fmt: skip
        """With the glue of the codec's chat template. Raises UserError where that does not serve."""
        native = cls(codec, template, tools, derive(codec, schemas(tools), call_format), max_calls)
        plain, forged = (
            codec.encode_marked(native.glue.text([""], [text]))
            for text in (NO_RESULTS, native._escaped(" ".join(codec.added)))
        )
        if native._added(plain) != native._added(forged):
            raise refusal("the names of the tokenizer's added tokens cannot be written as text")
        return native

    @property
    def name(self) -> str:
        return self.glue.call_format

    @property
    def card(self) -> Mapping[str, str]:
        """With the options by which vLLM serves the model so that clients get its calls."""
        options = f"--enable-auto-tool-choice --tool-call-parser {self.glue.format.vllm}"
        return {"protocol": "native", "glue": self.glue.digest, "vllm": options}

    def prompt(self, messages: Messages) -> tuple[list[int], bool, str]:
        return self.codec.encode_prompt(messages, schemas(self.tools))

    def read(self, token_ids: Sequence[int], inside_thought: bool) -> Turn:
        """A turn that was cut off before its EOS says nothing."""
        ended = bool(token_ids) and token_ids[-1] in self.codec.eos_ids
        text = self.codec.decode(token_ids[:-1] if ended else token_ids, special=True)
        if not ended:
            return Turn(text, ends=True)
        said = self.glue.format.read(text, inside_thought, list(self.tools))
        if not said.calls:
            return Turn(text, answer=self._answer(said.text), ends=True)
        parameters = {name: tool.parameters for name, tool in self.tools.items()}
        calls = [checked(call, parameters) for call in said.calls]
        if self.glue.between is None:  # the template has a place for one result
            return Turn(text, tuple(calls[:1]))
        error = f"at most {self.max_calls} calls in a turn"
        return Turn(
            text, (*calls[: self.max_calls], *(replace(c, error=error) for c in calls[self.max_calls :]))
        )

    def _answer(self, text: str) -> str | None:
        tagged = _ANSWER.match(text)
        return tagged[1].strip() if tagged else self.template.untagged_answer(text)

    def continue_with(
        self, results: Sequence[Search], longest: int, room: int, after: Sequence[int]
    ) -> Continuation | None:
        """The results between their glue; each has an equal share of what those before it left."""
        budget, results = min(longest, room), list(results)
        stops = [] if self.codec.decode(after[-1:], special=True) == self.glue.stop else [self.glue.stop]
        bodies = [_STUB] * len(results)

        def encoded() -> tuple[str, list[int]]:
            text = "".join(stops) + self.glue.text([result.tool for result in results], bodies)
            return text, self.codec.encode_marked(text, after=after)

        def with_body(place: int) -> Callable[[Sequence[str]], tuple[str, list[int]]]:
            def encode(passages: Sequence[str]) -> tuple[str, list[int]]:
                bodies[place] = self._escaped("\n".join(passages).strip() or NO_RESULTS)
                return bodies[place], encoded()[1]

            return encode

        for place, result in enumerate(results):
            if result.status == "rejected":
                bodies[place] = self._escaped(shown_result(result))
                continue
            spent = len(encoded()[1])
            share = spent + (budget - spent) // (len(results) - place)
            fitted = fit_result(result, share, with_body(place), not OPENERS.isdisjoint(self.tools))
            if fitted is None:
                return None
            bodies[place], results[place] = fitted.text, fitted.of(result)
        text, ids = encoded()
        if len(ids) > budget:
            return None
        bodies = [NO_RESULTS] * len(results)
        assert self._added(ids) == self._added(encoded()[1]), "a result brought a token of the template's"
        return Continuation("observation", text, ids, results, self.glue.opens_thought)

    def _added(self, ids: Sequence[int]) -> list[int]:
        return [number for number in ids if number in self._added_ids]

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        """Tokens that stand in a text by their names alone; no word that the vocabulary lacks gives them."""
        unknown = self.codec.tokenizer.unk_token_id
        return frozenset(
            number for name, number in self.codec.added.items()
            if number != unknown and not _BYTE.fullmatch(name)
        )  # fmt: skip

    def last_answer(self, turn: Turn) -> None:
        """A last turn that calls a tool has no answer."""

    def encode(self, text: str, after: Sequence[int] | None = None) -> list[int]:
        """A turn with tags becomes what the model says in its place. Raises UserError."""
        if not self.glue.format.was_run:
            raise UserError(
                f"demonstrations are not written in the format {self.name}", key="rollout.call_format"
            )
        return self.codec.encode_marked(self._spoken(text) + self.glue.stop, after=after)

    def _spoken(self, text: str) -> str:
        action = parse_action(text)
        if action is None or (action.kind == "answer" and self.template.untagged == "no answer"):
            return text
        thought = re.split("<search|<answer", text, maxsplit=1)[0].strip()
        if self.glue.opens_thought:
            thought = thought.removeprefix("<think>").lstrip() or "</think>"
        retriever = {"retriever": action.retriever} if action.retriever else {}
        call = ToolCall("search", {"query": action.content, **retriever})
        action_text = action.content if action.kind == "answer" else self.glue.format.write([call])
        return f"{thought}\n{action_text}" if thought else action_text

    def _escaped(self, text: str) -> str:
        """`text` in which no name of an added token, and nothing of the format, stands as it is written."""
        return self._names.sub(lambda name: "&lt;" if name[0] == "<" else f"&#{ord(name[0])};", text)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """The first character of each name, for every place in a text at which one begins."""
        form = self.glue.format
        names = {*self.codec.added, form.token, form.closing, form.result, *form.thoughts, form.thought_end}
        by_first: dict[str, list[str]] = {}
        for name in names:
            by_first.setdefault(name[0], []).append(re.escape(name[1:]))
        return re.compile(
            "|".join(f"{re.escape(first)}(?={'|'.join(endings)})" for first, endings in by_first.items())
        )


def schemas(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """The tools as chat templates declare them."""
    return [schema(name, tool.description, tool.parameters) for name, tool in tools.items()]
