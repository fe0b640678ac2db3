"""Loads what episodes need into memory: model, engine, environment and rewards.

Questions are loaded in `srl.train.questions`, tokenizer, template and tools in `srl.train.load_protocol`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl import process
from srl.advantage import Algorithm
from srl.config import Config
from srl.config.cross_checks import check_context, is_truncated
from srl.config.sections import Model
from srl.errors import UserError
from srl.models.check import context_of
from srl.models.hub import hub_name
from srl.models.load import load_model, pick_device
from srl.plugins import manager
from srl.progress import Note
from srl.reward import Overlong, RewardMix
from srl.rollout.codec import Codec, TextCodec
from srl.rollout.engine import Engine
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions
from srl.train.load_protocol import generation_eos, load_codec, load_native, load_template
from srl.train.threads import set_threads
from srl.trajectory import SearchTool

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
    config: Config, codec: Codec, search: SearchTool | None, note: Note, engine: Engine | None = None
) -> Environment:
    """What a run's episodes play in: protocol, template and limits around `search`. Raises UserError."""
    native = load_native(config, codec, search, note, engine)
    return Environment(codec, load_template(config), episode_options(config), search, native=native)


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
    if config.rollout.deterministic or is_truncated(config):
        return False
    return pick_device(config.model.device).type == "cuda"


@dataclass(frozen=True, slots=True)
class Generation:
    """What generates outside training: an engine with its codec, the model's name, and what a server used."""

    engine: Engine
    codec: Codec
    name: str
    usage: Callable[[], dict[str, float]] = dict


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
        max_concurrent=config.rollout.max_num_seqs,
    )  # fmt: skip
    server.model = process.run_async(find_model(server, longest))
    directory = section.tokenizer or section.path
    if directory is None or openai.api == "chat":
        why = "chat sends text" if openai.api == "chat" else "model.tokenizer is not set"
        note(f"no tokenizer is used ({why}): lengths are counted in pieces of three bytes")
        codec: Codec = TextCodec()
        ids = False
    else:
        codec = load_codec(section, generation_eos(Path(section.path or directory)), note)
        ids = process.run_async(returns_ids(server, codec))
        if not ids:
            note(f"{server.url} returns no token ids: prompts are sent as text")
    engine = OpenAiEngine(codec, server, token_ids=ids, max_model_len=longest, note=note)
    return Generation(engine, codec, f"{server.model} at {server.url}", server.used)


def load_engine(config: Config, policy: LoadedModel, note: Note) -> Engine:
    """The engine of `rollout.engine`, for the policy. Raises UserError.

    Where auto would be vLLM, and it is not installed or does not start, `note` is told why the torch engine
    takes its place.
    """
    from srl.rollout.torch_engine import TorchEngine

    check_context(config, context_of(policy.model.config))
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
