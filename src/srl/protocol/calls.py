"""Calls of tools as models write them: how each format is read and written. Pure text in, text out."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from srl.protocol.passages import NO_RESULTS, render_passage
from srl.safe import one_line
from srl.trajectory import Search

MOST_CALLS = 32
"""Calls of a turn that are read; what follows them counts for nothing."""
LONGEST_ERROR = 300
"""Characters of an error that the policy reads."""
_THOUGHTS = ("<think>", "<|channel>thought")


def opens_thought(text: str) -> bool:
    """Whether what follows `text` is inside a thought."""
    return text.rstrip().endswith(_THOUGHTS)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote: the tool's name and its arguments.

    `error` says what is wrong with it, for the policy to read; such a call is not executed. `raw` is how it
    was written.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    raw: str = field(default="", compare=False)

    @property
    def query(self) -> str:
        """What was searched for, where the call says it."""
        query = self.arguments.get("query")
        return query if isinstance(query, str) else ""

    @property
    def written(self) -> str:
        """The arguments as JSON; of a call that cannot be read, what was written."""
        return json.dumps(dict(self.arguments), ensure_ascii=False) if self.name else self.raw


class Said(NamedTuple):
    """A turn by its parts: the thought it begins with, its calls, and the text outside of both."""

    thought: str
    calls: tuple[ToolCall, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls.

    A call begins at `opening`, `anywhere` or only where the message begins, and ends with `closing`. `parse`
    gets the text, the position after the opening and the tools' names; it returns the calls and where they
    end, None if it is no call at all. It raises ValueError or a parser's error for a malformed call. `result`
    begins what only a tool may say. `write` spells calls as the template does. Thoughts, which begin with one
    of `thoughts` and end with `thought_end`, precede both; the answer follows `final`.
    """

    opening: re.Pattern[str]
    closing: str
    result: str
    parse: Callable[[str, int, Sequence[str]], tuple[list[ToolCall], int] | None]
    write: Callable[[Sequence[ToolCall]], str]
    token: str
    """The token that begins a call; a vocabulary that has it may be of this format."""
    vllm: str
    """vLLM's name of the parser that reads these calls."""
    anywhere: bool = True
    thoughts: tuple[str, ...] = _THOUGHTS[:1]
    thought_end: str = "</think>"
    final: str = ""
    was_run: bool = True
    """Whether a model of this format was run with it; others are not chosen unless they are named."""

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Where the next call begins."""
        return self.opening.search(text, start) if self.anywhere else self.opening.match(text, start)

    def read(self, text: str, inside_thought: bool = False, tools: Sequence[str] = ("search",)) -> Said:
        """The parts of a turn, each malformed call with its error. It never raises.

        A call inside a closed thought is none; one inside a thought that is not closed ends it, as it does
        where the model is served. A turn that writes a tool's result itself has no call that is executed.
        """
        start = self._thought(text, inside_thought)
        thought, calls, outside = text[:start], list[ToolCall](), list[str]()
        while len(calls) < MOST_CALLS and (opening := self.find(text, start)):
            outside.append(text[start : opening.start()])
            try:
                parsed = self.parse(text, opening.end(), tools)
            except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
                start = self._end_of_malformed(text, opening.end())
                why = str(error) if isinstance(error, Malformed) else "it cannot be read"
                calls.append(ToolCall("", error=f"not a call: {why}", raw=text[opening.start() : start]))
                continue
            if parsed is None:
                start = opening.start()
                break
            raw = text[opening.start() : parsed[1]]
            calls += [replace(call, raw=raw) for call in parsed[0]]
            start = parsed[1]
        outside.append("" if len(calls) >= MOST_CALLS else text[start:])
        visible = "".join(outside)
        if calls and self.result in visible:
            calls = [replace(call, error="only a tool writes what a tool returns") for call in calls]
        return Said(thought, tuple(calls), visible.partition(self.final)[2] if self.final else visible)

    def bare(self, thought: str) -> str:
        """A thought without what marks it."""
        for mark in (*self.thoughts, self.thought_end):
            thought = thought.replace(mark, "")
        return thought.strip()

    def _thought(self, text: str, inside: bool) -> int:
        """Where the thoughts end that the text begins with."""
        start = 0
        while inside or text.startswith(self.thoughts, _after_space(text, start)):
            end, inside = text.find(self.thought_end, start), False
            if end < 0:
                opening = self.find(text, start)
                return opening.start() if opening else len(text)
            start = end + len(self.thought_end)
        return start

    def _end_of_malformed(self, text: str, start: int) -> int:
        """After the closing, unless another call begins before it."""
        opening, closing = self.find(text, start), text.find(self.closing, start)
        ends = [opening.start()] if opening else []
        ends += [closing + len(self.closing)] if closing >= 0 else []
        return min(ends, default=len(text))


class Malformed(ValueError):  # noqa: N818 - what is wrong, as the policy reads it
    """Why a call cannot be read."""


def _no_constant(name: str) -> Any:
    raise ValueError(name)


_JSON = json.JSONDecoder(parse_constant=_no_constant)
_SPACE = re.compile(r"\s*")


def _after_space(text: str, start: int) -> int:
    space = _SPACE.match(text, start)
    return space.end() if space else start


def _expect(closing: str, text: str, start: int) -> int:
    """The position after `closing`, which follows some space."""
    start = _after_space(text, start)
    if not text.startswith(closing, start):
        raise Malformed(f"{closing} is missing")
    return start + len(closing)


def _of_object(value: Any) -> ToolCall:
    """The call of a JSON object with a name and arguments, which may be JSON in a string."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise Malformed("it has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments)
    if not isinstance(arguments, dict):
        raise Malformed("its arguments are no object")
    return ToolCall(name, arguments)


def _object(call: ToolCall, arguments: str) -> str:
    return json.dumps({"name": call.name, arguments: dict(call.arguments)}, ensure_ascii=False)


def _parse_hermes(text: str, start: int, tools: Sequence[str]) -> tuple[list[ToolCall], int]:
    value, end = _JSON.raw_decode(text, _after_space(text, start))
    return [_of_object(value)], _expect("</tool_call>", text, end)


def _write_hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call, 'arguments')}\n</tool_call>" for call in calls)


_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _parse_xml(text: str, start: int, tools: Sequence[str]) -> tuple[list[ToolCall], int]:
    function = _FUNCTION.match(text, start)
    if function is None:
        raise Malformed("<function=NAME> is missing")
    arguments, end = dict[str, Any](), function.end()
    while parameter := _PARAMETER.match(text, end):
        arguments[parameter[1].strip()], end = parameter[2], parameter.end()
    end = _expect("</tool_call>", text, _expect("</function>", text, end))
    return [_of_object({"name": function[1].strip(), "arguments": arguments})], end


def _write_xml(calls: Sequence[ToolCall]) -> str:
    def of(call: ToolCall) -> str:
        values = ((name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
                  for name, value in call.arguments.items())  # fmt: skip
        parameters = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values)
        return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"

    return "\n".join(map(of, calls))


def _parse_json(text: str, start: int, tools: Sequence[str]) -> tuple[list[ToolCall], int] | None:
    """JSON objects up to the end of the turn; an object of another name than a tool's is a final answer."""
    calls = list[ToolCall]()
    while start < len(text):
        value, start = _JSON.raw_decode(text, start)
        is_call = isinstance(value, dict) and value.get("name") in tools
        if not is_call and not calls:
            return None
        calls.append(_of_object(value))
        start = _after_space(text, start)
        if text.startswith(";", start):
            start = _after_space(text, start + 1)
    return calls, start


def _write_json(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


_PYTHON_END = "<|tool_call_end|>"


def _parse_python(text: str, start: int, tools: Sequence[str]) -> tuple[list[ToolCall], int]:
    """Calls in Python's syntax, names and literals only; nothing is evaluated."""
    end = text.find(_PYTHON_END, start)
    if end < 0:
        raise Malformed(f"{_PYTHON_END} is missing")
    with warnings.catch_warnings(action="ignore"):
        tree = ast.parse(text[start:end].strip(), mode="eval").body
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    return [_of_node(node) for node in nodes], end + len(_PYTHON_END)


def _of_node(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise Malformed("expected NAME(argument=value)")
    arguments = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    try:
        return ToolCall(node.func.id, _JSON.decode(json.dumps(arguments, allow_nan=False)))
    except TypeError as error:
        raise Malformed("an argument is not what JSON has") from error


def _write_python(calls: Sequence[ToolCall]) -> str:
    def of(call: ToolCall) -> str:
        return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"

    return f"<|tool_call_start|>[{', '.join(map(of, calls))}]{_PYTHON_END}"


_GEMMA = re.compile(r'call:([^{}<>\s]*)({(?:<\|"\|>(?>.*?<\|"\|>)|[^<])*+)<tool_call\|>', re.DOTALL)
_GEMMA_WORD = re.compile(r'<\|"\|>(.*?)<\|"\|>|([^\s{}\[\],:"]+)(\s*:)?', re.DOTALL)


def _parse_gemma(text: str, start: int, tools: Sequence[str]) -> tuple[list[ToolCall], int]:
    """Objects with bare names, and texts between tokens of their own: written as JSON, and read as that."""

    def as_json(word: re.Match[str]) -> str:
        if word[1] is not None:
            return json.dumps(word[1])
        return json.dumps(word[2]) + ":" if word[3] else {"None": "null"}.get(word[2], word[2])

    call = _GEMMA.match(text, start)
    if call is None:
        raise Malformed("expected call:NAME{argument:value}<tool_call|>")
    return [_of_object({"name": call[1], "arguments": _GEMMA_WORD.sub(as_json, call[2])})], call.end()


def _write_gemma(calls: Sequence[ToolCall]) -> str:
    def of(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, list):
            return f"[{','.join(map(of, value))}]"
        if not isinstance(value, dict):
            return json.dumps(value)
        return f"{{{','.join(f'{name}:{of(value[name])}' for name in sorted(value, key=str.lower))}}}"

    return "".join(f"<|tool_call>call:{call.name}{of(dict(call.arguments))}<tool_call|>" for call in calls)


_HARMONY = re.compile(r"([^\s<>]+)(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?json<\|message\|>")


def _parse_harmony(text: str, start: int, tools: Sequence[str]) -> tuple[list[ToolCall], int]:
    """A message to a tool; the tool's name stands in its header, before or after the channel's."""
    header = _HARMONY.match(text, start)
    if header is None:
        raise Malformed("expected NAME <|constrain|>json<|message|>{arguments}")
    arguments, end = _JSON.raw_decode(text, _after_space(text, header.end()))
    return [_of_object({"name": header[1], "arguments": arguments})], end


def _write_harmony(calls: Sequence[ToolCall]) -> str:
    header = " to=functions.{}<|channel|>commentary json<|message|>{}"
    texts = (json.dumps(dict(call.arguments), ensure_ascii=False) for call in calls)
    return "".join(header.format(call.name, text) for call, text in zip(calls, texts, strict=True))


_XML = re.compile("<tool_call>")
FORMATS: Mapping[str, Format] = {
    "hermes": Format(
        _XML, "</tool_call>", "<tool_response>", _parse_hermes, _write_hermes, "<tool_call>",
        "hermes",
    ),
    "qwen-xml": Format(
        _XML, "</tool_call>", "<tool_response>", _parse_xml, _write_xml, "<tool_call>",
        "qwen3_coder",
    ),
    "pythonic": Format(
        re.compile(r"<\|tool_call_start\|>"), _PYTHON_END, "<|tool_response_start|>", _parse_python,
        _write_python, "<|tool_call_start|>", "lfm2",
    ),
    "llama-json": Format(
        re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?={)"), "}", "<|start_header_id|>", _parse_json, _write_json,
        "<|python_tag|>", "llama3_json", anywhere=False,
    ),
    "gemma4": Format(
        re.compile(r"<\|tool_call>"), "<tool_call|>", "<tool_response|>", _parse_gemma, _write_gemma,
        "<|tool_call>", "gemma4", thoughts=_THOUGHTS[1:], thought_end="<channel|>", was_run=False,
    ),
    "harmony": Format(
        re.compile(r"(?:<\|channel\|>commentary)? to=functions\."), "<|call|>", "<|start|>functions.",
        _parse_harmony, _write_harmony, "<|constrain|>", "openai", anywhere=False,
        thoughts=("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),
        thought_end="<|end|><|start|>assistant", final="<|channel|>final<|message|>", was_run=False,
    ),
}  # fmt: skip
"""The formats that are read, by name."""


def shown_result(search: Search, with_ids: bool = False) -> str:
    """What the policy reads of a call: the passages that are shown, or the error."""
    if search.status == "rejected":
        return f"error: {one_line(search.error, LONGEST_ERROR)}"
    if search.tool != "search":
        passages = list(search.shown_texts)
    elif search.cut is not None:
        passages = [f"Doc 1(Title: {search.cut}"]
    else:
        hits = enumerate(search.shown_hits, start=1)
        passages = [render_passage(rank, hit, with_ids) for rank, hit in hits]
    return "\n".join(passages).strip() or NO_RESULTS


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


def checked(call: ToolCall, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """`call` with the error of what its tool does not take; `tools` are schemas of arguments by name.

    A value that is written as text counts as what the schema declares.
    """
    if call.error:
        return call
    if call.name not in tools:
        return replace(call, error=f"no tool {call.name!r:.80}: there is {', '.join(tools)}")
    properties = tools[call.name].get("properties", {})
    arguments = dict(call.arguments)
    for name, value in call.arguments.items():
        if name not in properties:
            return replace(call, error=f"no argument {name!r:.80}: there is {', '.join(properties)}")
        schema = properties[name]
        declared, choices = schema.get("type", ()), schema.get("enum")
        declared = [declared] if isinstance(declared, str) else declared
        kinds = tuple(kind for each in declared for kind in _TYPES.get(each, (object,)))
        if isinstance(value, str) and kinds and not isinstance(value, kinds):
            with suppress(ValueError, RecursionError):
                arguments[name] = value = _JSON.decode(value)
        fits = not kinds or (
            isinstance(value, kinds) and (bool in kinds or object in kinds or not isinstance(value, bool))
        )
        if not fits or (choices is not None and value not in choices):
            expected = ", ".join(map(str, declared if choices is None else choices))
            return replace(call, error=f"argument {name!r} is not {expected}")
    for name in tools[call.name].get("required", ()):
        if name not in arguments:
            return replace(call, error=f"argument {name!r} is missing")
    return replace(call, arguments=arguments)
