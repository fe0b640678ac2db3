"""The cold start: a fine-tuning on demonstrations before RL, shared by the runs with the same recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from srl.config import Config
from srl.config.sections import Model, Section, Sft
from srl.files import ABOUT, atomic_directory, check_input, digest_path, digest_text
from srl.models.load import pick_device, pick_dtype
from srl.models.weights import save_model
from srl.protocol import Template
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions
from srl.train.load_components import episode_options, load_policy
from srl.train.make_missing import Note, make_if_missing, start_of, world_directory
from srl.train.model_card import model_card, write_card
from srl.train.model_check import check_model
from srl.train.questions import load_template
from srl.train.search import RetrieverSettings, load_search, retriever_settings, without_cassette
from srl.train.sft import demonstrated, fine_tune_policy
from srl.train.threads import set_threads
from srl.trajectory import SearchTool
from srl.workspace import Workspace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "cold-start-"
_HARMLESS = {"trust_remote_code", "gradient_checkpointing", "device"}
"""Keys of the section `model` that do not change the weights; only the device's type does."""

_OF_THE_MODEL = ("steps", "epochs", "batch_size", "mix", "optim")
"""Keys of the section `sft` that the weights depend on."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a cold-started model depends on, and nothing else.

    The model is made from these fields and the search tool that `retrievers` describes. `key` covers every
    field, so a setting that changes the model also changes the key.
    """

    start: Path
    tokenizer: Path
    model: Model
    device: str
    demonstrations: Path
    template: Template
    options: EpisodeOptions
    retrievers: tuple[RetrieverSettings, ...]
    sft: Sft
    max_tokens: int
    seed: int

    @classmethod
    def of(cls, config: Config, file: Path, search: SearchTool | None) -> Recipe:
        """The recipe of `config`. Options without effect on it, such as temperature, have their default."""
        start = Path(start_of(config))
        device = pick_device(config.model.device)
        usual = EpisodeOptions()
        return cls(
            start=start,
            tokenizer=Path(config.model.tokenizer or start),
            model=_without_paths(config.model, device),
            device=device.type,
            demonstrations=file,
            template=load_template(config),
            options=replace(episode_options(config), temperature=usual.temperature, top_p=usual.top_p),
            retrievers=retriever_settings(config, search),
            sft=Sft().model_copy(update={name: getattr(config.sft, name) for name in _OF_THE_MODEL}),
            max_tokens=config.actor.ppo_max_token_len,
            seed=config.trainer.seed,
        )  # fmt: skip

    def key(self) -> str:
        """32 hex digits over every field; files and directories count by their content."""
        return digest_text(*(f"{item.name}={_content(getattr(self, item.name))}" for item in fields(self)))


def _without_paths(model: Model, device: torch.device) -> Model:
    """The section with `auto` resolved; without an adapter, its LoRA options are left at their defaults."""
    dtype = str(pick_dtype(model.dtype, device)).removeprefix("torch.")
    update = {"path": None, "tokenizer": None, "dtype": dtype, "device": str(device)}
    if model.lora_rank == 0:
        update |= Model().model_dump(include={"lora_alpha", "lora_target_modules"})
    return model.model_copy(update=update)


def _content(value: object) -> str:
    """What of a field counts; of an episode's options those that are not as usual."""
    if isinstance(value, EpisodeOptions):
        usual, names = EpisodeOptions(), (item.name for item in fields(value))
        return repr({name: own for name in names if (own := getattr(value, name)) != getattr(usual, name)})
    if isinstance(value, Path):
        return digest_path(value)
    if isinstance(value, Section):
        return value.model_dump_json(exclude=_HARMLESS)
    return repr(value)


def demonstration_file(config: Config, workspace: Workspace, note: Note) -> Path:
    """`sft.train_files`, or the world's demonstrations: noisy searches, or guesses if search is off."""
    if config.sft.train_files is not None:
        file = Path(config.sft.train_files)
        check_input(file, regular=True)
        return file
    return world_directory(config, workspace, note) / (
        "cold-start.jsonl" if config.rollout.search else "no-search.jsonl"
    )


def cold_started(config: Config, workspace: Workspace, note: Note) -> Path:
    """The cold-started model for `config` in the workspace, made first if missing.

    All runs with the same `Recipe` share it, so its searches are recorded on no run's cassette.
    """
    search = load_search(_without_cassette(config), workspace, note)
    recipe = Recipe.of(config, demonstration_file(config, workspace, note), search)

    def fine_tuned(path: Path) -> None:
        most = "" if recipe.sft.epochs is None else "up to "
        note(f"cold start: {most}{recipe.sft.steps} steps on {recipe.demonstrations.name} → {path}")
        make(recipe, search, path, lambda model: set_threads(model, config), note)

    return make_if_missing(workspace.models / f"{_NAME}{recipe.key()[:8]}", fine_tuned)


def is_cold_started(model: Path, workspace: Workspace) -> bool:
    """Whether the directory is one that `cold_started` made."""
    return model.resolve().parent == workspace.models.resolve() and model.name.startswith(_NAME)


def _without_cassette(config: Config) -> Config:
    """`config` without a cassette, unless the cassette is all there is to search."""
    named = config.search.url or config.search.index or config.data.corpus
    return config if config.search.replays and not named else without_cassette(config)


def make(
    recipe: Recipe, search: SearchTool | None, path: Path, prepare: Callable[[PreTrainedModel], object],
    note: Note,
) -> None:  # fmt: skip
    """Fine-tune the model of `recipe` into the new directory `path`; `prepare` is called with it before."""
    torch.manual_seed(recipe.seed)
    paths = {"path": str(recipe.start), "tokenizer": str(recipe.tokenizer)}
    policy = load_policy(recipe.model.model_copy(update=paths), lambda text: None)
    prepare(policy.model)
    check_model(policy.model, recipe.options.max_prompt_length + recipe.options.max_response_length, note)
    environment = Environment(policy.codec, recipe.template, recipe.options, search)
    shown = demonstrated(recipe.demonstrations, environment, note)
    fine_tune_policy(recipe.sft, policy, shown, recipe.max_tokens, recipe.seed)
    with atomic_directory(path) as folder:
        save_model(policy.model, policy.codec.tokenizer, folder)
        write_card(folder / ABOUT, model_card(recipe.template))
