"""Loads what episodes need into memory: tokenizer and model, engine, search and reward.

Questions and prompt templates are loaded in `srl.train.questions`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import date
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl import process
from srl.advantage import Algorithm
from srl.config import Config
from srl.config.cross_checks import context_errors, truncation_errors
from srl.config.sections import Model
from srl.errors import UserError
from srl.files import json_object
from srl.models.check import context_of
from srl.models.hub import hub_name
from srl.models.load import check_tags, load_model, load_tokenizer, pick_device
from srl.plugins import manager
from srl.protocol import template
from srl.reward import Overlong, RewardMix
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import Engine
from srl.rollout.episode import EpisodeOptions
from srl.rollout.glue import Glue, derive
from srl.rollout.native import Native
from srl.train.episodes import Splits, TrainingEnvironment
from srl.train.make_missing import HERMES, Note
from srl.train.model_card import read_card
from srl.train.questions import is_native, load_template
from srl.train.search import load_search
from srl.train.threads import set_threads
from srl.train.tools import declared_tools, load_tools
from srl.trajectory import SearchTool
from srl.workspace import Workspace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model to train or measure, with its tokenizer in a codec."""

    model: PreTrainedModel
    codec: Codec


def load_policy(section: Model, note: Note) -> LoadedModel:
    """The policy of the section `model`. `note` is told what its tokenizer and its attention lack."""
    assert section.path is not None, "model.path is filled in before the model is loaded"
    model = load_model(section.path, **model_options(section))
    attention = model.config._attn_implementation
    if section.attn_implementation == "auto" and attention != "sdpa":
        note(f"sdpa does not compute {type(model).__name__}: {attention} attention is used")
    return LoadedModel(
        model, load_codec(section, getattr(model.generation_config, "eos_token_id", None), note)
    )


def load_codec(section: Model, eos: int | list[int] | None, note: Note) -> Codec:
    """The codec of the policy's tokenizer; the ids `eos` end a text besides the tokenizer's own."""
    directory = section.tokenizer or section.path
    assert directory is not None, "model.path is filled in before the model is loaded"
    tokenizer, notes = load_tokenizer(directory, section.trust_remote_code)
    for text in notes:
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
    try:
        return options | ({_DAY: date.fromisoformat(options[_DAY]).strftime} if _DAY in options else {})
    except (TypeError, ValueError) as error:
        key = f"model.chat_template_kwargs.{_DAY}"
        raise UserError(f"{options[_DAY]!r:.80} is no day", key=key, hint="such as 2026-05-17") from error


def with_day(config: Config) -> Config:
    """`config` with today as the day of prompts, where the chat template writes one and none is set."""
    directory, options = (
        Path(config.model.tokenizer or config.model.path or ""),
        config.model.chat_template_kwargs,
    )
    files = [directory / name for name in ("chat_template.jinja", "tokenizer_config.json")]
    if _DAY in options or not any(file.is_file() and _DAY.encode() in file.read_bytes() for file in files):
        return config
    return config.with_settings({"model.chat_template_kwargs": {**options, _DAY: date.today().isoformat()}})


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
    codec = load_codec(config.model, _generation_eos(Path(config.model.path or path)), lambda text: None)
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


def model_options(section: Model) -> dict[str, Any]:
    """The keywords of `srl.models.load.load_model`, from the section `model`."""
    names = ("dtype", "device", "attn_implementation", "trust_remote_code", "gradient_checkpointing",
             "lora_rank", "lora_alpha", "lora_target_modules", "cast_lm_head_to_fp32")  # fmt: skip
    return {name: getattr(section, name) for name in names}


def load_algorithm(config: Config) -> Algorithm:
    """The algorithm plugin that `algorithm.name` names."""
    name = config.algorithm.name
    return manager.load("algorithm", name, config.algorithm.options(name))  # type: ignore[return-value]


def episode_options(config: Config) -> EpisodeOptions:
    """The budgets and sampling: each is a key of the same name in the section `rollout` or `data`."""
    sections = (config.rollout, config.data)
    names = [(section, own.name) for own in fields(EpisodeOptions) for section in sections]
    return EpisodeOptions(
        **{name: getattr(section, name) for section, name in names if name in type(section).model_fields}
    )


def load_environment(
    config: Config, workspace: Workspace, codec: Codec, note: Note, splits: Splits | None = None
) -> TrainingEnvironment:
    """Search, reward and template of a run's episodes; `splits` are its questions."""
    search, rewards = load_search(config, workspace, note), load_rewards(config)
    question_splits = splits or Splits([])
    for line in rewards.without_effect(question_splits.train):
        note(f"warning: {line}")
    return TrainingEnvironment(
        codec, load_template(config), episode_options(config), search, rewards, question_splits,
        native=load_native(config, codec, search, note),
    )  # fmt: skip


def load_rewards(config: Config) -> RewardMix:
    """The rewards of `reward.weights`, with their options."""
    options = {name: config.reward.options(name) for name in config.reward.weights}
    buffer = config.reward.overlong_buffer
    overlong = Overlong(config.data.max_response_length, buffer.len, buffer.penalty_factor)
    return RewardMix(config.reward.weights, options, overlong=overlong if buffer.enable else None)


def engine_name(config: Config) -> str:
    """The engine that `rollout.engine` names.

    auto is vLLM on a GPU where it is installed, runs need not repeat and `rollout.top_p` is corrected for.
    """
    if config.rollout.engine != "auto":
        return config.rollout.engine
    return "vllm" if _is_for_vllm(config) and util.find_spec("vllm") else "torch"


def _is_for_vllm(config: Config) -> bool:
    """Whether auto is vLLM where that is installed."""
    if config.rollout.deterministic or list(truncation_errors(config, "vllm")):
        return False
    return pick_device(config.model.device).type == "cuda"


@dataclass(frozen=True, slots=True)
class Generation:
    """What generates outside training: an engine with its codec, the model's name, and what a server used.

    `start` is called before the first episode. `copies` of the model generate, each `rollout.max_num_seqs`
    episodes at a time.
    """

    engine: Engine
    codec: Codec
    name: str
    usage: Callable[[], dict[str, float]] = dict
    start: Callable[[], object] = bool
    copies: int = 1


def load_generation(config: Config, note: Note) -> Generation:
    """The engine of an evaluation or of a teacher; for a server no model is loaded. Raises UserError."""
    if engine_name(config) == "openai":
        return _load_server(config, note)
    if config.model.path is None:
        raise UserError("which model? name its directory or run, or set rollout.engine=openai for a server's")
    policy = load_policy(config.model, note)
    set_threads(policy.model, config)
    name = hub_name(config.model.path) or config.model.path
    return Generation(load_engine(config, policy, note), policy.codec, name)


def _load_server(config: Config, note: Note) -> Generation:
    """The engine for the server of `rollout.openai`, which is asked for its models. Raises UserError."""
    from srl.rollout.openai_engine import OpenAiEngine, OpenAiServer, find_key, find_model, returns_ids

    section, openai, longest = config.model, config.rollout.openai, config.data.max_episode_tokens
    server = OpenAiServer(
        url=str(openai.url), model=openai.model or "", api=openai.api, key=find_key(openai.key_variable),
        retries=openai.retries, max_concurrent=config.rollout.max_num_seqs,
    )  # fmt: skip
    server.model = process.run_async(find_model(server, longest))
    directory = section.tokenizer or section.path
    if directory is None or openai.api == "chat":
        why = "chat sends text" if openai.api == "chat" else "model.tokenizer is not set"
        note(f"no tokenizer is used ({why}): lengths are counted in pieces of three bytes")
        codec: Codec = TextCodec()
        ids = False
    else:
        codec = load_codec(section, _generation_eos(Path(section.path or directory)), note)
        ids = process.run_async(returns_ids(server, codec))
        if not ids:
            note(f"{server.url} returns no token ids: prompts are sent as text")
    engine = OpenAiEngine(codec, server, token_ids=ids, max_model_len=longest, note=note)
    return Generation(engine, codec, f"{server.model} at {server.url}", server.used)


def _generation_eos(directory: Path) -> int | list[int] | None:
    """The ids that end a text by the directory's generation config; None where it has none."""
    file = directory / "generation_config.json"
    return json_object(file.read_bytes(), str(file)).get("eos_token_id") if file.is_file() else None


def load_engine(config: Config, policy: LoadedModel, note: Note) -> Engine:
    """The engine of `rollout.engine`, for the policy. Raises UserError.

    Where auto would be vLLM, and it is not installed or does not start, `note` is told why the torch engine
    takes its place.
    """
    from srl.rollout.torch_engine import TorchEngine

    for error in context_errors(config, context_of(policy.model.config)):
        raise UserError(error)
    rollout, longest = config.rollout, config.data.max_episode_tokens
    if rollout.engine == "vllm" or (rollout.engine == "auto" and _is_for_vllm(config)):
        from srl.rollout.vllm_engine import VllmEngine

        try:
            return VllmEngine(
                policy.model, policy.codec, max_num_seqs=rollout.max_num_seqs, max_model_len=longest,
                seed=config.trainer.seed, gpu_memory_utilization=rollout.gpu_memory_utilization,
            )  # fmt: skip
        except UserError as error:
            if rollout.engine == "vllm":
                raise UserError(f"rollout.engine = vllm: {error}") from error
            note(f"the torch engine generates: {error}")
    return TorchEngine(
        policy.model, policy.codec, max_num_seqs=rollout.max_num_seqs, max_model_len=longest,
        deterministic=rollout.deterministic,
    )  # fmt: skip
