"""Tokenizers with chat templates that declare tools: a short one for each quirk of the families there are."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scripts import RecordingEngine, TableSearch
from tests.tiny_models import byte_level_tokenizer
from transformers import AddedToken, PreTrainedTokenizerFast

from srl.protocol import TEMPLATES
from srl.rollout.codec import Codec
from srl.rollout.native import Native
from srl.rollout.protocol import SearchCall

HERMES_FILE = Path(__file__).parents[1] / "examples" / "hermes.jinja"
"""A template for a model that has none with tools."""

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>", "<|tool_response_end|>",
    "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
    "<|channel>", "<channel|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>",
    "<|return|>", "<|end|>",
]  # fmt: skip
ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{% set result = m.role == 'tool' %}
{%- set first = loop.first or messages[loop.index0 - 1].role != 'tool' or SINGLE %}
{%- set last = loop.last or messages[loop.index0 + 1].role != 'tool' or SINGLE %}
{%- if result %}{{ ('OPEN' if first else 'NEXT') + m.content + ('CLOSE' if last else '') }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{{ THOUGHT }}{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}{{ CALL }}{% endfor %}{{ 'END<|im_end|>\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\nOPENS' }}{% endif %}"""
LLAMA = """\
{%- for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}
{%- if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call a turn') }}{% endif %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- for tool in tools or [] if loop.first %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
{%- elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA = """\
{%- if tools %}{{ '<|turn>system\n' }}
{%- for tool in tools %}{{ '<|tool>' + tool | tojson }}{% endfor %}{{ '<turn|>\n' }}{% endif %}
{%- for m in messages %}{% set after_result = not loop.first and messages[loop.index0 - 1].role == 'tool' %}
{%- if m.role == 'tool' %}
{{- '<|tool_response>response:' + m.name + '{value:<|"|>' + m.content + '<|"|>}<tool_response|>' }}
{%- else %}{% if not after_result %}{{ '<|turn>' + m.role + '\n' }}{% endif %}{{ m.content }}
{%- if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
{{- '<|tool_call>call:' + f.name + '{query:<|"|>' + f.arguments.query + '<|"|>}<tool_call|>' }}{% endfor %}
{%- if not m.tool_calls %}{{ '<turn|>\n' }}{% endif %}{% endif %}{% endfor %}
{%- if messages[-1].role != 'tool' %}{{ '<|turn>assistant\n' }}{% else %}{{ OPENS }}{% endif %}"""
HARMONY = """\
{%- for tool in tools or [] %}{{ '<|start|>developer<|message|>' + tool | tojson + '<|end|>' }}{% endfor %}
{%- for m in messages %}{% set f = m.tool_calls[0].function if m.tool_calls else none %}
{%- if m.role == 'tool' %}{{ '<|start|>functions.' + m.name + ' to=assistant' }}
{{- '<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- elif f %}{% set analysis = '<|start|>assistant<|channel|>analysis<|message|>' %}
{{- analysis + m.thinking + '<|end|>' if m.thinking else '' }}
{{- '<|start|>assistant to=functions.' + f.name }}
{{- '<|channel|>commentary json<|message|>' + f.arguments | tojson + '<|call|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|channel|>final' * (m.role == 'assistant') + '<|message|>' }}
{{- m.content + '<|end|>' }}{% endif %}{% endfor %}{{ '<|start|>assistant' }}"""

HERMES = (
    '\'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \''
    " + f.arguments | tojson + '}\\n</tool_call>'"
)
XML = (
    "'<tool_call>\\n<function=' + f.name + '>\\n<parameter=query>\\n' + f.arguments.query"
    " + '\\n</parameter>\\n</function>\\n</tool_call>'"
)
PYTHON = '"<|tool_call_start|>[" + f.name + "(query=\'" + f.arguments.query + "\')]<|tool_call_end|>"'
KEPT = "'<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' if m.reasoning_content else ''"
EMPTY = f"({KEPT}) or '<think>\\n\\n</think>\\n\\n'"
QWEN = {
    "OPEN": r"<|im_start|>user\n<tool_response>\n", "NEXT": r"\n</tool_response>\n<tool_response>\n",
    "CLOSE": r"\n</tool_response><|im_end|>\n", "CALL": HERMES,
}  # fmt: skip


def chatml(**places: str) -> str:
    """The ChatML template with its places filled; those of calls and results are not optional."""
    template = CHATML
    for name, text in ({"SINGLE": "false", "END": "", "OPENS": "", "THOUGHT": "''"} | places).items():
        template = template.replace(name, text)
    return template


PLAIN_RESULT = {
    "OPEN": r"<|im_start|>user\n", "NEXT": r"<|im_start|>user\n", "CLOSE": r"<|im_end|>\n", "SINGLE": "true"
}  # fmt: skip
LFM = {
    "OPEN": r"<|im_start|>tool\n<|tool_response_start|>", "NEXT": "", "SINGLE": "true", "CALL": PYTHON,
    "CLOSE": r"<|tool_response_end|><|im_end|>\n",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A chat template, the format of its calls, and what stands around a result in it."""

    template: str
    call_format: str
    before: str
    after: str
    stop: str = "<|im_end|>"
    vocabulary: Sequence[str] = ()
    """Added tokens that it lacks."""


_ASSISTANT = "<|im_start|>assistant\n"
_OF_QWEN = ("\n<|im_start|>user\n<tool_response>\n", f"\n</tool_response><|im_end|>\n{_ASSISTANT}")
FAMILIES: Mapping[str, Family] = {
    "qwen2.5": Family(chatml(**QWEN), "hermes", *_OF_QWEN),
    "qwen3": Family(chatml(**QWEN, THOUGHT=KEPT), "hermes", *_OF_QWEN),
    "qwen3, thinking off": Family(
        chatml(**QWEN, OPENS=r"<think>\n\n</think>\n\n"), "hermes", _OF_QWEN[0],
        f"{_OF_QWEN[1]}<think>\n\n</think>\n\n",
    ),
    "smollm3": Family(
        chatml(**PLAIN_RESULT, CALL="''"), "hermes", "\n<|im_start|>user\n", f"<|im_end|>\n{_ASSISTANT}",
        vocabulary=["<|tool_call_start|>"],
    ),
    "qwen3.5": Family(
        chatml(**QWEN | {"CALL": XML}, OPENS=r"<think>\n", THOUGHT=EMPTY),
        "qwen-xml", _OF_QWEN[0], f"{_OF_QWEN[1]}<think>\n",
    ),
    "nemotron": Family(
        chatml(**QWEN | {"CALL": XML, "CLOSE": r"\n</tool_response>\n<|im_end|>\n"}, END=r"\n"), "qwen-xml",
        _OF_QWEN[0], f"\n</tool_response>\n<|im_end|>\n{_ASSISTANT}",
    ),
    "llama": Family(
        LLAMA, "llama-json", "<|start_header_id|>ipython<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", stop="<|eot_id|>",
    ),
    "lfm2, no calls shown": Family(
        chatml(**LFM | {"CALL": "''"}), "pythonic", "\n<|im_start|>tool\n<|tool_response_start|>",
        f"<|tool_response_end|><|im_end|>\n{_ASSISTANT}", vocabulary=["<tool_call>"],
    ),
    "lfm2": Family(
        chatml(**LFM), "pythonic", "\n<|im_start|>tool\n<|tool_response_start|>",
        f"<|tool_response_end|><|im_end|>\n{_ASSISTANT}",
    ),
    "given a template": Family(
        HERMES_FILE.read_text(encoding="utf-8"), "hermes", *_OF_QWEN, vocabulary=ADDED
    ),
    "lfm2.5": Family(
        chatml(**LFM | {"OPEN": r"<|im_start|>tool\n", "CLOSE": r"<|im_end|>\n"}), "pythonic",
        "\n<|im_start|>tool\n", f"<|im_end|>\n{_ASSISTANT}",
    ),
    "gemma4": Family(
        GEMMA.replace("OPENS", "''"), "gemma4", 'response:search{value:<|"|>', '<|"|>}<tool_response|>',
        stop="<|tool_response>",
    ),
    "gemma4, thinking on": Family(
        GEMMA.replace("OPENS", r"'<|channel>thought\n'"), "gemma4", 'response:search{value:<|"|>',
        '<|"|>}<tool_response|><|channel>thought\n', stop="<|tool_response>",
    ),
    "gpt-oss": Family(
        HARMONY, "harmony", "<|start|>functions.search to=assistant<|channel|>commentary<|message|>",
        "<|end|><|start|>assistant", stop="<|call|>",
    ),
}  # fmt: skip


def codec_of(
    template: str | None, eos: Sequence[str] = ("<|im_end|>",), *, lacks: Sequence[str] = (),
    strips: bool = False, base: PreTrainedTokenizerFast | None = None, **kwargs: Any,
) -> Codec:  # fmt: skip
    """A codec of the byte-level tokenizer with the families' added tokens, such a template and EOS tokens.

    `strips`: the EOS token takes the white space after it.
    """
    tokenizer = copy.deepcopy(base or byte_level_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in SPECIAL if t not in lacks]})
    if strips:
        tokenizer.add_tokens([AddedToken(eos[0], rstrip=True, special=True)], special_tokens=True)
    tokenizer.add_tokens([token for token in ADDED if token not in lacks])
    tokenizer.chat_template, tokenizer.eos_token = template, eos[0]
    return Codec(tokenizer, tokenizer.convert_tokens_to_ids(list(eos)), kwargs)


def family_codec(name: str) -> Codec:
    family = FAMILIES[name]
    return codec_of(family.template, [family.stop], lacks=family.vocabulary)


def native(codec: Codec, search: TableSearch | None = None, **options: Any) -> Native:
    """How a model of this codec calls the tool `search`."""
    tools = {"search": SearchCall(search or TableSearch())}
    return Native.of(codec, TEMPLATES["tools"], tools, **options)


class NativeEngine(RecordingEngine):
    """A scripted engine that says turns as a model of the family would: with its tokens, ended by EOS."""

    def __init__(self, turns: Native, texts: Sequence[str]) -> None:
        super().__init__(turns.codec, texts)
        stop = turns.glue.stop
        self.encode = lambda text, after: turns.codec.encode_marked(text + stop, after=after)
