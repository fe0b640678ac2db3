"""How the policy of a run talks with its tools: codec, prompt template, tools, protocol; and its card.

The card is `srl.json` beside a model's weights: how the model was trained to talk, and with which indexes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from srl import process
from srl.config import Config
from srl.config.sections import Model
from srl.errors import UserError, parsing
from srl.files import ABOUT, FORMAT, check_format, json_object, write_json
from srl.models.load import check_tags, load_tokenizer
from srl.plugins import manager
from srl.progress import Note
from srl.protocol import STOP_STRINGS, WITHOUT_SEARCH, Template, template
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.documents import OPENERS, Documents, FindCall, OpenCall
from srl.rollout.engine import Engine
from srl.rollout.glue import Glue, derive
from srl.rollout.native import Native
from srl.rollout.protocol import Protocol, SearchCall, Tool, schema, search_parameters
from srl.rollout.tools import Guarded, tools_of
from srl.train.make_missing import HERMES, PRESETS
from srl.trajectory import SearchTool


def load_codec(section: Model, eos: int | list[int] | None, note: Note) -> Codec:
    """The codec of the policy's tokenizer; the ids `eos` end a text besides the tokenizer's own."""
    directory = section.tokenizer or section.path
    assert directory is not None, "model.path is filled in before the model is loaded"
    tokenizer, notes = load_tokenizer(directory, section.trust_remote_code)
    is_ours = Path(directory).is_relative_to(PRESETS) or (Path(directory) / ABOUT).is_file()
    for text in [] if is_ours else notes:  # what we made talks as it was trained to
        note(text)
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(type(token) is not int for token in ids):
        file = Path(section.path or directory, "generation_config.json")
        raise UserError(f"{file}: eos_token_id is {eos!r}, expected a token id or a list of ids")
    return Codec(tokenizer, ids, template_kwargs(section))


_DAY = "strftime_now"
"""The function by which chat templates write the day."""


def template_kwargs(section: Model) -> dict[str, Any]:
    """What the chat template is called with. Raises UserError for a day that is none."""
    options = dict(section.chat_template_kwargs)
    with parsing(f"model.chat_template_kwargs.{_DAY}"):
        return options | ({_DAY: date.fromisoformat(options[_DAY]).strftime} if _DAY in options else {})


def with_day(config: Config) -> Config:
    """`config` with today as the day of prompts, where the chat template writes one and none is set."""
    options, directory = config.model.chat_template_kwargs, config.model.tokenizer or config.model.path
    files = [Path(directory or "", name) for name in ("chat_template.jinja", "tokenizer_config.json")]
    if _DAY in options or not any(file.is_file() and _DAY.encode() in file.read_bytes() for file in files):
        return config
    return config.with_settings({"model.chat_template_kwargs": {**options, _DAY: date.today().isoformat()}})


def generation_eos(directory: Path) -> int | list[int] | None:
    """The ids that end a text by the directory's generation config, or else its config; None where it has
    none."""
    files = (directory / "generation_config.json", directory / "config.json")
    settings = next((json_object(file.read_bytes(), str(file)) for file in files if file.is_file()), {})
    return settings.get("eos_token_id", settings.get("text_config", {}).get("eos_token_id"))


def prompts(template: Template, codec: Codec) -> Callable[[str], tuple[dict[str, str], ...]]:
    """What makes the prompt of a question's text: the template's messages, or their text as one where the
    chat template would drop a part of them, as some do of <think>."""
    if codec.keeps(template.messages("Who?")):
        return template.messages
    return lambda text: (
        {"role": "user", "content": "\n".join(message["content"] for message in template.messages(text))},
    )


def is_native(config: Config) -> bool:
    """Whether the policy calls tools in the model's own way; not where there is nothing to call."""
    return config.rollout.protocol == "native" and config.rollout.search


def load_template(config: Config) -> Template:
    """The template, checked. Raises UserError if it searches and `rollout.search` is off, or the reverse; or
    if it asks for tags, and the policy calls tools."""
    prompting = choose_template(config)
    if is_native(config):
        if prompting.retrieves or "<search>" in prompting.prompt:
            raise UserError(
                f"data.template={prompting.name} is not for calls of tools, and rollout.protocol is native",
                key="data.template", hint="use tools, tools-tagged or a text of your own",
            )  # fmt: skip
        return replace(prompting, searches=True)
    if prompting.searches != config.rollout.search:
        advice = "one without search such as r1" if prompting.searches else "one with it such as search-r1"
        raise UserError(
            f"rollout.search={str(config.rollout.search).lower()} and data.template={prompting.name} do not "
            f"go together: use {advice}"
        )
    return prompting


def choose_template(config: Config) -> Template:
    """The template `template_name`, with the named retrievers filled in."""
    retrievers = config.search.retrievers if config.rollout.search else {}
    descriptions = {name: retriever.description for name, retriever in retrievers.items()}
    return template(template_name(config)).naming(descriptions)


def template_name(config: Config) -> str:
    """`data.template`, by default that for calls of tools or Search-R1's prompt; if search is off, the
    counterpart without search."""
    name = config.data.template or ("tools" if is_native(config) else "search-r1")
    return name if config.rollout.search else WITHOUT_SEARCH.get(name, name)


def takes_written_prompts(config: Config) -> bool:
    """Whether a question that has a prompt in its file keeps it."""
    return config.data.template is None and config.rollout.search and not is_native(config)


def declared_tools(config: Config) -> list[dict[str, Any]]:
    """The tools that prompts declare, as chat templates have them. Raises UserError."""
    search = schema("search", SearchCall.description, search_parameters(tuple(config.search.retrievers)))
    tools: list[Any] = [call for call in (OpenCall, FindCall) if call.name in config.rollout.tools]
    tools += _of_plugins(config).values()
    return [search, *(schema(tool.name, tool.description, tool.parameters) for tool in tools)]


def load_tools(config: Config, codec: Codec, search: SearchTool) -> dict[str, Tool]:
    """The tools by name, in the order in which they are declared. Raises UserError."""
    tools: dict[str, Tool] = {"search": SearchCall(search)}
    if not OPENERS.isdisjoint(config.rollout.tools):
        longest = config.rollout.max_obs_length
        documents = Documents(search, lambda text: len(codec.encode_text(text)), longest)  # type: ignore[arg-type]
        calls = (OpenCall(documents), FindCall(documents))
        tools |= {call.name: call for call in calls if call.name in config.rollout.tools}
    for tool in _of_plugins(config).values():
        declared = json.dumps(schema(tool.name, tool.description, tool.parameters), ensure_ascii=False)
        if marks := [name for name in codec.added if name in declared and not name.isalnum()]:
            raise UserError(
                f"the description of the tool {tool.name} has the token {marks[0]}", key="rollout.tools"
            )
        tools[tool.name] = Guarded(tool, config.search.timeout_s)
    return tools


def _of_plugins(config: Config) -> Mapping[str, Tool]:
    plugins = {name: config.tool.options(name) for name in config.rollout.tool_plugins}
    return _brought_by(json.dumps(plugins))


@cache
def _brought_by(plugins: str) -> Mapping[str, Tool]:
    """The tools of plugins, whose options are JSON by their names; each is asked once in a process."""
    tools: dict[str, Tool] = {}
    for name, options in json.loads(plugins).items():
        for tool in process.run_async(tools_of(manager.load("tool", name, options))):
            if tool.name in tools:
                raise UserError(f"{name} has a tool {tool.name!r}, as another has", key="rollout.tools")
            tools[tool.name] = tool
    return MappingProxyType(tools)


def load_native(
    config: Config, codec: Codec, search: SearchTool | None, note: Note, engine: Engine | None = None
) -> Native | None:
    """How the policy calls tools in its own way; None for tags. Raises UserError where it cannot do either.

    `note` is told of a chat template that has changed since the model was trained.
    """
    if search is None or not is_native(config):
        if not isinstance(codec, TextCodec):
            check_tags(codec.tokenizer)
        return None
    if isinstance(codec, TextCodec) or (engine is not None and not engine.token_ids):
        raise UserError(
            "calls of tools need a server that returns token ids", key="rollout.protocol",
            hint="name its tokenizer with model.tokenizer, and use vLLM or SGLang with rollout.openai.api="
            "completions; or set rollout.protocol=tags",
        )  # fmt: skip
    tools, rollout = load_tools(config, codec, search), config.rollout
    native = Native.of(
        codec, load_template(config), tools, call_format=rollout.call_format, max_calls=rollout.max_calls
    )
    card = {} if config.model.path is None else read_card(Path(config.model.path))
    if card.get("glue", native.glue.digest) != native.glue.digest:
        note(
            "warning: the chat template has another text around results than the model was trained with; "
            "put back its own, or set model.chat_template_kwargs as in training"
        )
    return native


def with_protocol(config: Config, note: Note) -> Config:
    """`config` with `rollout.protocol=auto` settled; `note` is told as what, and why."""
    if config.rollout.protocol != "auto":
        return config
    why, native = _asks_for_tags(config), config.with_settings({"rollout.protocol": "native"})
    if not why:
        try:
            glue = native_glue(native)
        except UserError as error:
            why = str(error)
    text = f"tags: {why}" if why else f"native: the model's chat template renders {glue.call_format} calls"
    note(f"rollout.protocol=auto is {text}")
    return config.with_settings({"rollout.protocol": "tags"}) if why else native


def with_base_tokenizer(config: Config) -> Config:
    """`config` with the tokenizer by which the base model of the made-up world calls tools, where it does."""
    needs = is_native(config) and config.model.path is None and config.model.tokenizer is None
    return config.with_settings({"model.tokenizer": str(HERMES)}) if needs else config


def native_glue(config: Config) -> Glue:
    """The glue of the model's chat template, without loading the model. Raises UserError."""
    path = str(config.model.tokenizer or config.model.path)
    codec = load_codec(config.model, generation_eos(Path(config.model.path or path)), lambda text: None)
    return derive(codec, declared_tools(config), config.rollout.call_format)


def _asks_for_tags(config: Config) -> str:
    """Why a run whose protocol is left open talks by tags; empty if its configuration does not say so."""
    if not config.rollout.search:
        return "rollout.search is false"
    if config.model.path is None:
        return "there is no model of one's own"
    prompt = config.data.template and template(config.data.template)
    if prompt and prompt.searches:
        return f"data.template={prompt.name}"
    card = read_card(Path(config.model.path))
    return "the model was trained with them" if card and card.get("protocol") != "native" else ""


def model_card(
    protocol: Protocol, section: Model, indexes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The fields of `srl.json`: template, search, what its chat template is called with, how it calls tools,
    and the digests of the indexes used in training by the name of their retriever, "" for the default one."""
    card = {"template": protocol.template.name, "search": protocol.template.searches, **protocol.card}
    if section.chat_template_kwargs:
        card["chat_template_kwargs"] = section.chat_template_kwargs
    return card if indexes is None else {**card, "indexes": dict(indexes)}


def card_of_run(config: Config, protocol: Protocol, indexes: Mapping[str, str]) -> dict[str, Any]:
    """The card of what a run trains. `template` is null where the run uses the prompts in its files, so that
    an evaluation uses them too."""
    card = model_card(protocol, config.model, indexes)
    return card | {"template": None} if takes_written_prompts(config) else card


def stop_strings(card: Mapping[str, Any]) -> Sequence[str]:
    """Where turns of the card's model end besides at EOS."""
    return () if card.get("protocol") == "native" else STOP_STRINGS


def write_card(file: Path, card: dict[str, Any]) -> None:
    """Write `card` to `file` with its format number."""
    write_json(file, {"format": FORMAT, **card})


def read_card(model: Path) -> dict[str, Any]:
    """What `srl.json` in the directory `model` says; nothing where it is absent. Raises UserError."""
    path = model / ABOUT
    if not path.is_file():
        return {}
    card = json_object(path.read_bytes(), str(path))
    check_format(path, card.get("format"))
    return card
