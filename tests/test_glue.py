"""The glue between turns of a model that calls tools, derived from its chat template."""

import asyncio
import random
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.native_models import FAMILIES, KEPT, QWEN, NativeEngine, chatml, codec_of, family_codec, native
from tests.scripts import QUESTION, TableSearch

from srl.errors import UserError
from srl.protocol import TEMPLATES, ToolCall
from srl.rollout.codec import Codec
from srl.rollout.episode import EpisodeOptions, run_episode
from srl.rollout.glue import derive
from srl.rollout.native import Native, schemas
from srl.rollout.protocol import SearchCall
from srl.trajectory import Trajectory

TOOLS = {"search": SearchCall(TableSearch())}
SHOWN = 'Doc 1(Title: "Velmar") The lighthouse of Velmar was built by Ossa Trell.'
CALL = ToolCall("search", {"query": "Velmar"})


def play(codec: Codec, texts: Sequence[str], turns: Native, **options: int) -> Trajectory:
    return asyncio.run(
        run_episode(
            QUESTION, NativeEngine(turns, texts), protocol=turns,
            options=EpisodeOptions(**{"max_turn_tokens": 200, **options}),
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_of_an_episode_are_those_of_the_text_that_the_family_reads(name):
    family, codec = FAMILIES[name], family_codec(name)
    turns = native(codec, call_format=family.call_format)
    form, opens = turns.glue.format, codec.encode_prompt([{"role": "user", "content": "Who?"}])[1]
    thoughts = [
        f"I think.\n{form.thought_end}\n\n" * is_open for is_open in (opens, turns.glue.opens_thought)
    ]
    call, answer = thoughts[0] + form.write([CALL]), f"{thoughts[1]}{form.final}Ossa Trell"
    trajectory = play(codec, [call, answer], turns=turns)
    shown = '"' + SHOWN.replace('"', '\\"') + '"' if turns.glue.quoted else SHOWN
    prompt = codec.render(TEMPLATES["tools"].messages(QUESTION.text), schemas(TOOLS))
    text = f"{prompt}{call}{family.stop}{family.before}{shown}{family.after}{answer}{family.stop}"
    assert trajectory.token_ids == codec.encode_marked(text, after=())
    assert (trajectory.answer, trajectory.protocol) == ("Ossa Trell", family.call_format)
    ends = [segment.token_ids[-1] in codec.eos_ids for segment in trajectory.segments if segment.is_policy]
    assert ends == [True, True]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_format_that_was_run_with_no_model_is_not_chosen_unless_it_is_named(name):
    family, codec = FAMILIES[name], family_codec(name)
    if family.call_format not in ("gemma4", "harmony"):
        assert derive(codec, schemas(TOOLS)).call_format == family.call_format
    else:
        with pytest.raises(UserError):
            derive(codec, schemas(TOOLS))
        with pytest.raises(UserError):
            native(codec, call_format=family.call_format).encode("<search> Velmar </search>")


_GEMMA = ["<|tool_response>", "<turn|>"]
ORIGINALS = {
    "qwen2_5": [], "qwen3": [], "qwen3_instruct_2507": [], "qwen3_5_think": [], "qwen3_5_nothink": [],
    "qwen3_6": [], "qwen3_8": [], "qwen3_vl": [], "nemotron_3_nano": [], "nemotron_3_super": [],
    "nemotron_3_5_lightning": [], "lfm2_v2": [], "lfm2_2_5": [], "lfm2_2_5_v2": [],
    "llama3_1": ["<|eot_id|>"], "llama3_2": ["<|eot_id|>"], "gemma4": _GEMMA, "gemma4_v2": _GEMMA,
    "gemma4_v3": _GEMMA, "gemma4_v4": _GEMMA, "gemma4_v5": _GEMMA, "gptoss": ["<|call|>", "<|return|>"],
}  # fmt: skip
FORGETTING = {"qwen3_5_nothink"}
"""Those that render earlier turns otherwise than they were prompted."""


def odd_results(count: int) -> list[str]:
    """Results that begin and end with what merges with its neighbours."""
    rng = random.Random("odd results")
    pieces = [*".,>)\"'\\…é雪🙂 \n\t0a", "\n\n", "  ", "</b>", "}", "Ossa", "\\n", "1.5", "->", "##"]
    return ["".join(rng.choices(pieces, k=rng.randint(1, 12))).strip() or "." for _ in range(count)]


def round_of(result: str, thought: str) -> list[dict[str, object]]:
    function = {"name": "search", "arguments": {"query": "Velmar"}}
    thoughts = {"reasoning_content": thought, "thinking": thought}
    calls = [{"type": "function", "function": function}]
    return [
        {"role": "assistant", "content": "", "tool_calls": calls, **thoughts},
        {"role": "tool", "name": "search", "content": result},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ORIGINALS)
def test_two_rounds_have_the_ids_of_the_whole_conversation_as_the_original_template_renders_it(name):
    pytest.importorskip("trl")
    text = (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    codec = codec_of(text, ORIGINALS[name] or ["<|im_end|>"])
    codec.tokenizer.bos_token = "<|im_start|>"
    call_format = {"gem": "gemma4", "gpt": "harmony"}.get(name[:3], "auto")
    glue, declared = derive(codec, schemas(TOOLS), call_format), schemas(TOOLS)
    stop, user, kept = codec.encode_marked(glue.stop), {"role": "user", "content": "Who?"}, 0
    results = odd_results(302)
    for first, second in zip(results[::2], results[1::2], strict=True):
        asked = [user, *round_of(first, "I look."), *round_of(second, "And once more.")]
        rendered = codec.render(asked, declared)
        ids, seams = (
            codec.encode_marked(rendered, after=()),
            [glue.text(["search"], [r]) for r in (first, second)],
        )
        last = codec.encode_marked(seams[1], after=stop)
        assert ids[-len(last) - 1 :] == [*stop, *last]
        prompt = codec.render([user], declared)
        said, *_ = rendered.removeprefix(prompt).partition(glue.stop)
        head, _, rest = rendered.partition(glue.stop + seams[0])
        if not rest.endswith(glue.stop + seams[1]) or head != prompt + said:
            continue
        kept += 1
        own = codec.encode_marked(prompt, after=())
        for text, seam in ((said, seams[0]), (rest.removesuffix(glue.stop + seams[1]), seams[1])):
            own += codec.encode_marked(text, after=own) + stop
            own += codec.encode_marked(seam, after=own)
        assert own == ids
    assert kept == (0 if name in FORGETTING else len(results) // 2)


RESULTS = st.text(min_size=1, max_size=40).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", ["qwen2.5", "nemotron", "llama", "lfm2"])
@given(results=st.lists(RESULTS, min_size=1, max_size=3))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_results_have_the_ids_of_the_rendered_conversation(name, results):
    codec, turns = family_codec(name), native(family_codec(name))
    glue = turns.glue
    results = results[:1] if glue.between is None else results
    shown = [turns._escaped(result).encode("utf-8", "replace").decode() for result in results]
    (asks, _), calls = round_of("", ""), len(shown)
    messages = [{"role": "user", "content": "Who?"}, {**asks, "tool_calls": asks["tool_calls"] * calls}]
    messages += [{"role": "tool", "name": "search", "content": result} for result in shown]
    ids = codec.encode_marked(codec.render(messages, schemas(TOOLS)), after=())
    text = glue.text(["search"] * calls, shown)
    tail = codec.encode_marked(glue.stop + text)
    assert ids[-len(tail) :] == tail
    added = set(codec.added.values())
    plain = codec.encode_marked(glue.stop + glue.text(["search"] * calls, ["x"] * calls))
    assert [token for token in tail if token in added] == [token for token in plain if token in added]


def qwen(old: str = "", new: str = "", **places: str) -> str:
    """Qwen's template with some text replaced."""
    template = chatml(**QWEN | places)
    assert old in template
    return template.replace(old, new) if old else template


UPPER = (
    '\'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": {"query": "\' + f.arguments.query | upper'
    " + '\"}}\\n</tool_call>' + f.arguments.query"
)
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no tools declared": (qwen("{%- if tools %}", "{%- if false %}"), {}),
    "results dropped": (qwen("m.content + (", "'' + ("), {}),
    "results changed": (qwen("m.content + (", "m.content | upper + ("), {}),
    "the stop is no EOS": (qwen(), {"eos": ["<|end|>"]}),
    "another glue by round": (
        qwen("{%- if result %}", "{%- if result %}{{ 'again' if loop.index > 4 }}"),
        {},
    ),
    "another glue after a second question": (
        qwen("{%- if result %}", "{%- if result %}{{ messages[2].content[:1] }}"),
        {},
    ),
    "a call that is not read": (qwen(CALL="'<call>' + f.arguments.query"), {}),
    "a call with other arguments": (qwen(CALL=UPPER), {}),
    "no call, no token of a format": (qwen(CALL="''"), {"lacks": ["<tool_call>", "<|tool_call_start|>"]}),
    "ids of calls": (qwen(CALL="call.id"), {}),
    "tokens that depend on what precedes them": (qwen(), {"strips": True}),
    "the same, in one that forgets": (qwen(OPENS=r"<think>\n\n</think>\n\n"), {"strips": True}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_does_not_serve_is_refused(name):
    template, options = REFUSED[name]
    with pytest.raises(UserError) as refused:
        derive(codec_of(template, **options), schemas(TOOLS))
    assert refused.value.key == "rollout.protocol"


DIFFERENCES = {
    "qwen2.5": {"thoughts"}, "qwen3": set(), "qwen3, thinking off": {"thoughts", "opening"},
    "qwen3.5": {"ids"}, "lfm2, no calls shown": {"calls", "thoughts"}, "gpt-oss": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_how_a_history_differs_that_a_client_renders_anew(name):
    found = derive(family_codec(name), schemas(TOOLS), FAMILIES[name].call_format).differences
    assert set(found) == DIFFERENCES[name]


def test_thoughts_that_are_dropped_after_the_next_question_are_told():
    template = chatml(**QWEN, THOUGHT=f"({KEPT}) if messages[-1].role != 'user' else ''")
    assert derive(codec_of(template), schemas(TOOLS)).differences == ("earlier thoughts",)


def test_a_tokenizer_in_which_an_escaped_name_is_a_token_is_refused():
    codec = codec_of(FAMILIES["qwen2.5"].template)
    codec.tokenizer.add_tokens(["lt;tool_call>"])
    with pytest.raises(UserError):
        native(Codec(codec.tokenizer))


def test_a_tokenizer_without_a_chat_template_is_refused():
    with pytest.raises(UserError):
        derive(codec_of(None), schemas(TOOLS))


def test_a_format_that_is_named_must_be_that_of_the_template():
    codec = codec_of(FAMILIES["qwen2.5"].template)
    assert derive(codec, schemas(TOOLS), "hermes").call_format == "hermes"
    with pytest.raises(UserError):
        derive(codec, schemas(TOOLS), "pythonic")
