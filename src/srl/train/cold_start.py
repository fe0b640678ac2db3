"""The cold start: a fine-tuning on demonstrations before RL, shared by the runs with the same recipe."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch

from srl.config import Config
from srl.config.sections import Model, NamedRetriever, Search, Sft
from srl.files import ABOUT, atomic_directory, digest_path, digest_text
from srl.models.load import pick_device, pick_dtype
from srl.models.weights import save_model
from srl.progress import Note
from srl.rollout.episode import EpisodeOptions
from srl.train.load_components import episode_options, load_environment, load_policy
from srl.train.load_protocol import (
    declared_tools,
    is_native,
    load_template,
    model_card,
    stop_strings,
    write_card,
)
from srl.train.make_missing import demonstration_file, make_if_missing, start_of
from srl.train.model_check import check_model
from srl.train.search import index_digests, load_search
from srl.train.sft import demonstrated, fine_tune
from srl.train.threads import set_threads
from srl.workspace import Workspace

_HARMLESS = {"trust_remote_code", "gradient_checkpointing", "device"}
"""Keys of the section `model` that do not change the weights; only the device's type does."""

_OF_THE_MODEL = ("steps", "batch_size", "optim")
"""Keys of the section `sft` that the weights depend on."""


def cold_started(config: Config, workspace: Workspace, note: Note) -> Path:
    """The cold-started model for `config` in the workspace, made first if missing.

    Its name is a digest of all that it is made of, and all runs with the same share it; so its searches are
    recorded on no run's cassette.
    """
    search = load_search(_without_cassette(config), workspace, note)
    file = demonstration_file(config, workspace, note)
    start, template, device = Path(start_of(config)), load_template(config), pick_device(config.model.device)
    tokenizer = Path(config.model.tokenizer or start)
    dtype = str(pick_dtype(config.model.dtype, device)).removeprefix("torch.")
    model = config.model.model_copy(update={"path": None, "tokenizer": None, "dtype": dtype})
    if model.lora_rank == 0:  # its LoRA options have no effect
        model = model.model_copy(update=Model().model_dump(include={"lora_alpha", "lora_target_modules"}))
    usual = EpisodeOptions()
    options = replace(episode_options(config), temperature=usual.temperature, top_p=usual.top_p)
    unusual = {
        option.name: own
        for option in fields(options)
        if (own := getattr(options, option.name)) != getattr(usual, option.name, None)
    }
    sft = Sft().model_copy(update={name: getattr(config.sft, name) for name in _OF_THE_MODEL})
    seed, max_tokens = config.trainer.seed, config.actor.ppo_max_token_len
    sources: dict[str, Search | NamedRetriever] = {"": config.search, **config.search.retrievers}
    retrievers = [  # a server that reports no digest counts by its address
        (name, digest or sources[name].url, sources[name].topk or config.search.topk)
        for name, digest in index_digests(search).items()
    ]
    calls = (config.rollout.call_format, declared_tools(config)) if is_native(config) else None
    inputs = (device.type, template, unusual, retrievers, calls, seed, max_tokens)
    key = digest_text(
        *map(digest_path, (start, tokenizer, file)), model.model_dump_json(exclude=_HARMLESS),
        sft.model_dump_json(), *map(repr, inputs),
    )  # fmt: skip

    def fine_tuned(path: Path) -> None:
        note(f"cold start: {sft.steps} steps on {file.name} → {path}")
        torch.manual_seed(seed)
        paths = {"path": str(start), "tokenizer": str(tokenizer)}
        policy = load_policy(model.model_copy(update=paths), lambda text: None)
        set_threads(policy.model, config)
        check_model(policy.model, options.max_prompt_length + options.max_response_length, note)
        environment = replace(load_environment(config, policy.codec, search, note), options=options)
        demonstrations = demonstrated(file, environment, note)
        torch.manual_seed(seed)
        what = "fine-tuning steps"
        fine_tune(sft, policy.model, demonstrations, max_tokens=max_tokens, seed=seed, what=what)
        with atomic_directory(path) as folder:
            card = model_card(environment.protocol, config.model)
            save_model(policy.model, policy.codec.tokenizer, folder, stop_strings=stop_strings(card))
            write_card(folder / ABOUT, card)

    return make_if_missing(workspace.models / f"cold-start-{key[:8]}", fine_tuned)


def _without_cassette(config: Config) -> Config:
    """`config` without a cassette, unless the cassette is all there is to search."""
    source = config.search.url or config.search.index or config.data.corpus
    is_needed = config.search.replays and not source
    return config if is_needed else config.with_settings({"search.cassette": None})
