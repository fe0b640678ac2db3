"""What stands between two turns of a model that calls tools, derived from its own chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

from srl.errors import UserError
from srl.files import digest_text
from srl.protocol import FORMATS, Format, ToolCall, opens_thought
from srl.rollout.codec import Codec

Schemas = Sequence[Mapping[str, Any]]
"""Tools as a chat template declares them."""

NAME = "name_of_the_tool"
"""Where the name of the tool stands in the texts of a `Glue`."""
_QUERY = "zebra crossing"
_MARKS = ('first "result"\n\tof it', 'second "result"\n\tof it')
_ID = "callid000"
_NASTY = ("No.", 'a "quoted"\nline', ">", "the end…", "\\n \\", "tab\tand\n\n  lines )", "雪 🙂", "<b>1</b>")

DIFFERENCES: Mapping[str, str] = {
    "calls": "it drops calls",
    "thoughts": "it drops thoughts",
    "earlier thoughts": "it drops thoughts once the user asks again",
    "opening": "it lacks what a turn begins with in the prompt",
    "ids": "where a turn has no thought, its text goes on from the prompt, but not its tokens",
}
"""How a history may differ, that a client renders anew, from the one that was sampled."""


@dataclass(frozen=True, slots=True)
class Glue:
    """The texts around what tools return, from the stop token to the policy's next token.

    `between` parts two results, None where a turn has one call only. `quoted`: results are JSON strings.
    `opens_thought`: the next turn begins inside a thought. `call_format` is a key of `FORMATS`, `differences`
    are of `DIFFERENCES`.
    """

    stop: str
    before: str
    between: str | None
    after: str
    quoted: bool
    call_format: str
    differences: tuple[str, ...] = ()

    @property
    def format(self) -> Format:
        return FORMATS[self.call_format]

    @property
    def digest(self) -> str:
        return digest_text(*map(repr, astuple(self)[:-1]))

    @property
    def opens_thought(self) -> bool:
        return opens_thought(self.after)

    def text(self, names: Sequence[str], results: Sequence[str]) -> str:
        """What follows the stop token after calls of the tools `names` with these results."""
        texts = [json.dumps(result, ensure_ascii=False) if self.quoted else result for result in results]
        seams = [self.before, *[self.between or ""] * (len(texts) - 1)]
        pieces = (seam.replace(NAME, name) + result
                  for seam, name, result in zip(seams, names, texts, strict=True))  # fmt: skip
        return "".join(pieces) + self.after


def derive(codec: Codec, tools: Schemas, call_format: str = "auto") -> Glue:
    """The glue of the tokenizer's chat template, from conversations that it renders.

    What stands between the last EOS token before a result and that result is `before`; no prefix is
    compared, so a template may render the turns before it as it likes. Raises UserError for one that
    declares no tools, drops or changes results, or whose glue is not always the same.
    """
    if codec.tokenizer.chat_template is None:
        raise refusal("there is no chat template")
    return _Template(codec, tools).glue(call_format)


class _Template:
    """A chat template that is asked how it renders calls and results."""

    def __init__(self, codec: Codec, tools: Schemas) -> None:
        self.codec, self.tools = codec, tools
        self.stops = [str(codec.tokenizer.convert_ids_to_tokens(number)) for number in codec.eos_ids]
        self.prompt = self._render([_USER])

    def glue(self, call_format: str) -> Glue:
        if self.prompt == self.codec.render([_USER]):
            raise refusal("it declares no tools")
        glue = self._of_round([_USER, *_round()])
        longer = ([_USER, *_round(), *_round()], [*_EARLIER, *_round()], [*_EARLIER, *_round(), *_round()])
        for messages in (*longer, [_USER, *_round(thought="I look it up.")]):
            if self._of_round(messages) != glue:
                raise refusal("what stands around a result depends on the conversation before it")
        stop, before, after, quoted = glue
        call_format = self._format(call_format, f"{stop}{before}")
        derived = Glue(stop, before, self._between(glue), after, quoted, call_format)
        self._check_ids(derived)
        return replace(derived, differences=tuple(self._differences(derived.format)))

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self.codec.render(messages, self.tools)

    def _of_round(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, bool]:
        """Stop, the texts around the last result, and whether that is a JSON string."""
        rendered = self._render(messages)
        if _ID in rendered:
            raise refusal("it shows the ids of calls, which is not supported")
        spelled = json.dumps(_MARKS[0], ensure_ascii=False)
        quoted = spelled in rendered
        head, mark, after = rendered.rpartition(spelled if quoted else _MARKS[0])
        if not mark:
            raise refusal("it drops or changes what a tool returns")
        ends = {head.rfind(stop) + len(stop): stop for stop in self.stops if stop in head}
        before = head[max(ends, default=0) :]
        if not ends or _QUERY in before:
            raise refusal(
                f"none of the model's EOS tokens ({', '.join(self.stops)}) stands between a call and its "
                "result; complete eos_token_id in its generation_config.json"
            )
        return ends[max(ends)], before, after, quoted

    def _between(self, glue: tuple[str, str, str, bool]) -> str | None:
        """What parts the results of two calls; None where the template does not render two."""
        (asks, first), (_, second) = _round(), _round(_MARKS[1])
        try:
            rendered = self._render([_USER, {**asks, "tool_calls": asks["tool_calls"] * 2}, first, second])
        except UserError:
            return None
        stop, before, after, quoted = glue
        marks = [json.dumps(mark, ensure_ascii=False) if quoted else mark for mark in _MARKS]
        _, _, remainder = rendered.partition(f"{stop}{before}{marks[0]}")
        between, mark, end = remainder.partition(marks[1])
        return between if mark and end == after and _QUERY not in between else None

    def _format(self, call_format: str, seam: str) -> str:
        """The format of calls: as the template renders one before the `seam`, else as the vocabulary says."""
        rendered, is_auto = self._render([_USER, *_round()]), call_format == "auto"
        turn, call = rendered[: rendered.rindex(seam)], ToolCall(NAME, {"query": _QUERY})
        starts = [turn.rfind(stop) + len(stop) for stop in self.stops if stop in turn]
        turn = turn[len(self.prompt) if turn.startswith(self.prompt) else max(starts, default=0) :]
        if _QUERY in turn:
            reads = [each for each, form in FORMATS.items() if form.read(turn, tools=[NAME]).calls == (call,)]
            names = [each for each in reads if each == call_format or (is_auto and FORMATS[each].was_run)]
            if names:
                return names[0]
            if is_auto and reads:
                raise refusal(f"no model of its format was run; rollout.call_format={reads[0]} tries it")
            raise refusal(f"the calls that it renders are not of the format {call_format}")
        if not is_auto:
            return call_format
        names = [each for each, form in FORMATS.items() if form.was_run and form.token in self.codec.added]
        names = [each for each in names if (each == "qwen-xml") == ("<function=" in self.prompt)]
        if len(names) != 1:
            raise refusal("it shows no call of the history; set rollout.call_format")
        return names[0]

    def _differences(self, form: Format) -> Iterator[str]:
        """What a client's history lacks, which sends thoughts back or does not."""
        thought, encode = "I look it up.", partial(self.codec.encode_marked, after=())
        answered = {"role": "assistant", "content": "Ossa Trell"}
        without, kept = (self._render([_USER, *_round(thought=text)]) for text in ("", thought))
        later = self._render([_USER, *_round(thought=thought), answered, _USER])
        if _QUERY not in without:
            yield "calls"
        if thought in kept and thought not in later:
            yield "earlier thoughts"
        if thought not in kept and form.thought_end in self.codec.added:
            yield "thoughts"
        if not without.startswith(self.prompt):
            yield "opening"
        elif encode(without)[: len(ids := encode(self.prompt))] != ids:
            yield "ids"

    def _check_ids(self, glue: Glue) -> None:
        """The ids of the glue with a result are those of the whole conversation, rendered and encoded."""
        for result in _NASTY:
            messages = [_USER, *_round(result, thought="I look it up.")]
            rendered = self._render(messages)
            ids = self.codec.encode_marked(rendered, after=())
            stop = self.codec.encode_marked(glue.stop)
            tail = self.codec.encode_marked(glue.text([NAME], [result]), after=stop)
            if ids[-len(tail) - 1 :] != [*stop, *tail]:
                raise refusal(f"its tokens around a result such as {result!r} depend on what precedes them")
            if rendered.startswith(self.prompt):
                turn = rendered[len(self.prompt) : rendered.rindex(glue.stop + glue.text([NAME], [result]))]
                prompt = self.codec.encode_marked(self.prompt, after=())
                if ids != [*prompt, *self.codec.encode_marked(turn, after=prompt), *stop, *tail]:
                    raise refusal("its tokens of a turn depend on what precedes it")


def refusal(why: str) -> UserError:
    """The error that a chat template does not serve, and why."""
    return UserError(
        f"the model's chat template does not serve for calls of tools: {why}",
        key="rollout.protocol",
        hint="rollout.protocol=tags trains Search-R1's tags",
    )


_USER = {"role": "user", "content": "Who built it?"}
_EARLIER = [_USER, {"role": "assistant", "content": "Ossa Trell"}, {"role": "user", "content": "And why?"}]


def _round(result: str = _MARKS[0], thought: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """A call and its result, as chat messages."""
    function = {"name": NAME, "arguments": {"query": _QUERY}}
    calls = [{"type": "function", "id": _ID, "function": function}]
    asks = {"role": "assistant", "content": "", "tool_calls": calls}
    thoughts = {"reasoning_content": thought, "thinking": thought} if thought else {}
    returns = {"role": "tool", "name": NAME, "tool_call_id": _ID, "content": result}
    return asks | thoughts, returns
