"""Readers of the formats in which models call tools: what they take for a call, and for a malformed one."""

import random
from keyword import iskeyword

import pytest
from bench.calls_fuzz import hostile_seconds, hostile_units, read_odd_texts
from hypothesis import given
from hypothesis import strategies as st

from srl.data.demonstration_file import turns_of
from srl.protocol import FORMATS, ToolCall, checked
from srl.trajectory import Question, Segment, Trajectory

NAMES = st.text("abc_xyz", min_size=1, max_size=10).filter(lambda name: not iskeyword(name))
TEXTS = st.text(max_size=30).filter(lambda text: "</parameter>" not in text and text == text.strip("\n"))
VALUES = st.recursive(
    TEXTS | st.booleans() | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
)
SEARCH = {
    "search": {
        "properties": {"query": {"type": "string"}, "topk": {"type": "integer"},
                       "where": {"type": "string", "enum": ["web"]},
                       "since": {"type": ["integer", "null"]}},
        "required": ["query"],
    }
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_what_is_written_is_read(name, data):
    values = TEXTS if name == "qwen-xml" else VALUES
    call = st.builds(ToolCall, NAMES, st.dictionaries(NAMES, values, max_size=3))
    calls = data.draw(st.lists(call, min_size=1, max_size=3))
    text = FORMATS[name].write(calls)
    said = FORMATS[name].read(text, tools=[call.name for call in calls])
    assert (said.thought, list(said.calls), said.text.strip()) == ("", calls, "")


CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
X = ToolCall("search", {"query": "x"})
CLOSING = ToolCall("search", {"query": "</tool_call>"})
QUOTED = '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}</tool_call>'
XML = "<tool_call>\n<function=search>\n<parameter=query>\nx\n</parameter>\n</function>\n</tool_call>"


GEMMA = '<|tool_call>call:search{query:<|"|>x<|"|>}<tool_call|>'
VALUED = ToolCall("search", {"query": "x", "k": [1, None], "q": {"a": True}})
GEMMA_CLOSING = ToolCall("search", {"query": "}<tool_call|>"})
HARMONY = ' to=functions.search<|channel|>commentary json<|message|>{"query": "x"}'
SAMPLED = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x"}'
ANALYSIS = "<|channel|>analysis<|message|>I see<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>x"


def python(code: str) -> str:
    return f"<|tool_call_start|>{code}<|tool_call_end|>"


# format, text, inside a thought, the calls (an error is "error"), what is left as text
READ = {
    "text before it": ("hermes", f"I look.\n{CALL}", False, [X], "I look.\n"),
    "two calls": ("hermes", f"{CALL}\n{CALL}", False, [X, X], "\n"),
    "bad JSON": ("hermes", CALL.replace('"x"', "x"), False, ["error"], ""),
    "no closing": ("hermes", CALL.removesuffix("</tool_call>"), False, ["error"], ""),
    "a closing in an argument": (
        "hermes", CALL.replace("x", "</tool_call>"), False, [CLOSING], "",
    ),
    "no name": ("hermes", CALL.replace("name", "nom"), False, ["error"], ""),
    "an empty name": ("hermes", CALL.replace("search", ""), False, ["error"], ""),
    "XML with an empty name": ("qwen-xml", XML.replace("search", " "), False, ["error"], ""),
    "not an object": ("hermes", "<tool_call>[1]</tool_call>", False, ["error"], ""),
    "arguments as text": ("hermes", QUOTED, False, [X], ""),
    "a good call after a bad one": ("hermes", f"<tool_call>{{</tool_call>{CALL}", False, ["error", X], ""),
    "a call in a closed thought": ("hermes", f"<think>{CALL}</think>no", False, [], "no"),
    "a call in a thought of the prompt": ("hermes", f"{CALL}</think>no", True, [], "no"),
    "a call that ends a thought": ("hermes", f"so{CALL}", True, [X], ""),
    "a thought alone": ("hermes", "so I think", True, [], ""),
    "its own result": ("hermes", f"{CALL}<tool_response>y</tool_response>", False, ["error"], None),
    "a result without a call": ("hermes", "<tool_response>", False, [], "<tool_response>"),
    "no call": ("hermes", '{"name": "search"}', False, [], '{"name": "search"}'),
    "XML": ("qwen-xml", XML, False, [X], ""),
    "XML without a function": ("qwen-xml", "<tool_call>\nsearch(x)</tool_call>", False, ["error"], ""),
    "XML that is not closed": ("qwen-xml", XML.replace("</parameter>", ""), False, ["error"], ""),
    "JSON": ("llama-json", '{"name": "search", "parameters": {"query": "x"}}', False, [X], ""),
    "JSON after a token": (
        "llama-json", '<|python_tag|>{"name": "search", "parameters": {"query": "x"}}', False, [X], "",
    ),
    "JSON that is an answer": ("llama-json", '{"name": "Ossa Trell"}', False, [], '{"name": "Ossa Trell"}'),
    "JSON after text": ("llama-json", 'I say {"name": "search"}', False, [], 'I say {"name": "search"}'),
    "Gemma": ("gemma4", GEMMA, False, [X], ""),
    "Gemma's values": ("gemma4", GEMMA.replace("query", "k:[1,None],q:{a:true},query"), False, [VALUED], ""),
    "a closing in Gemma's text": ("gemma4", GEMMA.replace("x", "}<tool_call|>"), False, [GEMMA_CLOSING], ""),
    "Gemma's text that is not closed": ("gemma4", GEMMA.replace('x<|"|>', "x"), False, ["error"], ""),
    "a thought of Gemma's": ("gemma4", f"<|channel>thought\n{GEMMA}<channel|>no", False, [], "no"),
    "a thought of Gemma's prompt": ("gemma4", f"{GEMMA}<channel|>no", True, [], "no"),
    "harmony as rendered": ("harmony", HARMONY, False, [X], ""),
    "harmony as sampled": ("harmony", ANALYSIS + SAMPLED, False, [X], ""),
    "harmony after a word to the user": (
        "harmony", ANALYSIS + ANALYSIS.replace("analysis", "commentary") + SAMPLED, False, [X], "",
    ),
    "a call in harmony's thought": ("harmony", ANALYSIS.replace("I see", HARMONY) + FINAL, False, [], "x"),
    "harmony's answer": ("harmony", FINAL, False, [], "x"),
    "harmony without a final message": ("harmony", ANALYSIS, False, [], ""),
    "harmony with bad JSON": ("harmony", HARMONY.removesuffix("}"), False, ["error"], ""),
    "Python": ("pythonic", python("[search(query='x')]"), False, [X], ""),
    "Python without a list": ("pythonic", python('search(query="x")'), False, [X], ""),
    "Python that computes": ("pythonic", python("[search(query='x' * 9)]"), False, ["error"], ""),
    "Python of a module": ("pythonic", python("[os.system(query='x')]"), False, ["error"], ""),
    "Python of bytes": ("pythonic", python("[search(query=b'x')]"), False, ["error"], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_turn_is_read_by_its_parts(name):
    form, text, inside, calls, rest = READ[name]
    said = FORMATS[form].read(text, inside)
    assert ["error" if call.error else call for call in said.calls] == calls
    assert rest is None or said.text == rest
    assert all(call.raw in text for call in said.calls)


CHECKED = {
    "right": (X, None),
    "written as text": (ToolCall("search", {"query": "x", "topk": "3"}), {"query": "x", "topk": 3}),
    "an unknown tool": (ToolCall("open", {"query": "x"}), "error"),
    "an unknown argument": (ToolCall("search", {"query": "x", "k": 3}), "error"),
    "an argument missing": (ToolCall("search", {}), "error"),
    "a number for a text": (ToolCall("search", {"query": 3}), "error"),
    "a text for a number": (ToolCall("search", {"query": "x", "topk": "many"}), "error"),
    "a truth for a number": (ToolCall("search", {"query": "x", "topk": True}), "error"),
    "one of two types": (ToolCall("search", {"query": "x", "since": None}), None),
    "one of two types, as text": (
        ToolCall("search", {"query": "x", "since": "3"}),
        {"query": "x", "since": 3},
    ),
    "neither of two types": (ToolCall("search", {"query": "x", "since": "May"}), "error"),
    "none of the choices": (ToolCall("search", {"query": "x", "where": "there"}), "error"),
    "malformed already": (ToolCall("", error="why"), "error"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_call_is_checked_by_the_schema_of_its_tool(name):
    call, expected = CHECKED[name]
    found = checked(call, SEARCH)
    assert ("error" if found.error else dict(found.arguments)) == (expected or dict(call.arguments))


def test_no_text_makes_a_reader_fail():
    read_odd_texts(10_000, random.Random("fuzz"))


@pytest.mark.parametrize("name", FORMATS)
def test_a_hostile_text_is_read_in_linear_time(name):
    assert sum(hostile_seconds(name, unit, 300_000) for unit in hostile_units(name)) < 2


def test_a_thought_of_another_format_becomes_a_demonstration_without_its_marks():
    segments = [Segment("prompt", (), "", 0), Segment("policy", (), ANALYSIS + FINAL, 0)]
    logged = Trajectory(Question("q", "", ()), segments, protocol="harmony")
    assert turns_of(logged) == ["<think> I see </think> <answer> x </answer>"]
