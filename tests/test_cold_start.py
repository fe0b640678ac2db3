"""The cold start: what it is made of, and which runs share it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.training import config, write_setting

from srl.config import Config
from srl.config.keys import flat, keys
from srl.data.corpus import write_corpus
from srl.models.weights import model_digest
from srl.rollout.episode import EpisodeOptions
from srl.train import cold_start, make_missing
from srl.train.cold_start import cold_started
from srl.train.load_components import episode_options
from srl.train.make_missing import find_or_build_index
from srl.trajectory import Passage
from srl.workspace import Workspace

SETTINGS = {
    "model.path": None,
    "model.dtype": "auto",
    "search.topk": 3,
    "data.max_prompt_length": 64,
    "rollout.max_turn_tokens": 64,
    "rollout.max_obs_length": 128,
    "data.max_response_length": 256,
    "sft.steps": 2,
    "sft.batch_size": 2,
}
NAMED = {"other": {"index": "other", "description": "another one"}}

OF_THE_MODEL: dict[str, object] = {
    "model.dtype": "bfloat16",
    "model.lora_rank": 4,
    "model.attn_implementation": "eager",
    "model.cast_lm_head_to_fp32": True,
    "model.tokenizer": Path("tokenizer"),
    "data.corpus": Path("other.jsonl"),
    "data.template": "search-r1",
    "data.max_prompt_length": 63,
    "data.max_response_length": 255,
    "search.index": Path("other"),
    "search.retrievers": NAMED,
    "search.topk": 2,
    "retriever.bm25": {"k1": 1.5},
    "rollout.max_turns": 3,
    "rollout.max_turn_tokens": 63,
    "rollout.max_obs_length": 127,
    "rollout.search": False,
    "actor.ppo_max_token_len": 300,
    "data.world": "tiny-hard",
    "sft.train_files": Path("others.jsonl"),
    "sft.steps": 3,
    "sft.mix": {"hotpotqa": 1},
    "sft.epochs": 0.5,
    "sft.batch_size": 3,
    "sft.optim.lr": 3e-5,
    "sft.optim.betas": (0.9, 0.98),
    "sft.optim.weight_decay": 0.5,
    "sft.optim.lr_warmup_steps": 1,
    "sft.optim.lr_warmup_steps_ratio": 0.5,
    "sft.optim.lr_scheduler_type": "linear",
    "trainer.seed": 1,
}
"""Every key that the cold-started model depends on, with a value other than the usual one."""

OF_THE_RUN: dict[str, object] = {
    "model.device": "cpu",
    "model.lora_target_modules": ("q_proj",),
    "sft.log": "elsewhere",
    "sft.filter": "true",
    "data.train_files": ("others.parquet",),
    "data.val_files": ("others.parquet",),
    "data.exclude_files": ("others.jsonl",),
    "data.test_files": ("others.parquet",),
    "search.digest": None,
    "data.examples": Path("examples.txt"),
    "search.cassette": "record run.cassette",
    "retriever.name": "bm25",
    "rollout.openai.url": "http://127.0.0.1:1/v1",
    "rollout.openai.model": "other",
    "rollout.openai.api": "chat",
    "rollout.openai.key_variable": "OTHER_KEY",
    "algorithm.rollout_correction.rollout_is": "off",
    "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": 2.0,
    "reward.weights.em": 2.0,
    "reward.weights": {"em": 2.0},
    "algorithm.name": "ppo",
    "actor.optim.betas": (0.5, 0.5),
    "critic.optim.betas": (0.5, 0.5),
    "ref.path": "elsewhere",
    "trainer.logger": ("tensorboard",),
    "trainer.plugin_path": ("elsewhere",),
    "cluster.address": "auto",
    "verl": {"actor_rollout_ref": {}},
}
"""Values of keys that it does not depend on, where `other_than` finds none."""
OF_THE_RUN |= {"watch.actions": {"kl": "stop"}}
OF_THE_RUN |= {"watch.thresholds": {"kl": 2.0}, "watch.patience": {"kl": 2}}
ELSEWHERE = {"model.path", "search.url"}
"""Other ways to a model and to passages, where nothing is made or there must be a server."""


WORDS = ("born", "works", "mayor", "led")
"""Words that the small base can read."""


def demonstration(word: str, guesses: bool) -> dict[str, object]:
    """A search and an answer, or the answer alone."""
    turns = [f"<search> {word} city </search>", f"<answer> {word} </answer>"]
    return {"question": f"Who is {word} ?", "turns": turns[guesses:]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A setting with demonstrations, and beside each file another one."""
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    for name, guesses in (("demos", 2), ("others", 3)):
        rows = [demonstration(word, at % guesses == 0) for at, word in enumerate(WORDS)]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "examples.txt").write_text("Question: Who?\n<search> who </search>\n<answer> me </answer>")
    passages = [Passage(word, f'"{word}"\nthe city of {word} .') for word in WORDS]
    write_corpus(folder / "corpus.jsonl", passages)
    write_corpus(folder / "other.jsonl", passages[:3])
    shutil.copytree(make_missing.BASE_MODEL, folder / "tokenizer", ignore=lambda *_: ["model.safetensors"])
    made = find_or_build_index(
        configured(folder, {"data.corpus": Path("other.jsonl")}), Workspace(folder / "ws"), lambda text: None
    )
    shutil.copytree(made, folder / "other")
    return folder


def configured(folder: Path, changes: Mapping[str, object] | None = None) -> Config:
    """The small configuration with keys changed, not cross-checked; files are of `folder`."""
    usual = {**SETTINGS, "sft.train_files": str(folder / "demos.jsonl")}
    tree = config(folder, **{key.replace(".", "__"): value for key, value in usual.items()}).model_dump()
    for key, value in (changes or {}).items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = str(folder / value) if isinstance(value, Path) else value
    if tree["search"]["index"]:
        tree["data"]["corpus"] = None
    if tree["search"]["retrievers"]:
        tree["search"]["retrievers"] = {
            name: {**named, "index": str(folder / "other")}
            for name, named in tree["search"]["retrievers"].items()
        }
    return Config.model_validate(tree)


@pytest.fixture
def name_of(place, tmp_path, monkeypatch):
    """The name of the cold start of a configuration, which is not made."""
    monkeypatch.setattr(cold_start, "make_if_missing", lambda path, make: path)
    workspace = Workspace(place / "ws")
    return lambda changes=None: cold_started(configured(place, changes), workspace, lambda text: None).name


def other_than(value: object) -> object:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 if value else 0.5
    if isinstance(value, dict):
        return {**value, "hotpotqa": 1}
    return value + 1 if isinstance(value, int) else _OTHERS.get(str(value), 1)


_OTHERS = {"k3": "k2", "k1": "k2", "fixed": "adaptive", "constant": "linear", "token-mean": "constant",
           "trainer": "sampler", "fsdp2": "fsdp", "auto": "torch", "srl": "mine", "note": "stop",
           "off": "note", "stop": "off", "reward": "em", "vanilla": "gspo", "em": "f1"}  # fmt: skip


def test_runs_share_a_cold_start_where_what_it_is_made_of_is_the_same(place, name_of):
    usual, changed = name_of(), set()
    values = {".".join(path): value for path, value in flat(configured(place).model_dump())}
    named = {**OF_THE_MODEL, **OF_THE_RUN}
    for key, value in {**values, **named}.items():
        if key in ELSEWHERE or key.startswith("retriever.bm25."):
            continue
        another = named[key] if key in named else other_than(value)
        if name_of({key: another}) != usual:
            changed.add(key)
    assert changed == set(OF_THE_MODEL)
    assert {key.name for key in keys() if "<name>" not in key.name} - ELSEWHERE <= {
        *values,
        *OF_THE_MODEL,
        *OF_THE_RUN,
    }


def made(place: Path, workspace: Path, **changes: object) -> str:
    """The digest of the cold-started model."""
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return model_digest(cold_started(configured(place, given), Workspace(workspace), lambda text: None))


def test_a_new_option_of_episodes_at_its_default_renames_no_cold_start(place, name_of, monkeypatch):
    usual = name_of()

    @dataclass(frozen=True)
    class More(EpisodeOptions):
        max_calls: int = 4

    def options(config, **more):
        return More(**asdict(episode_options(config)), **more)

    monkeypatch.setattr(cold_start, "EpisodeOptions", More)
    monkeypatch.setattr(cold_start, "episode_options", options)
    assert name_of() == usual
    monkeypatch.setattr(cold_start, "episode_options", partial(options, max_calls=5))
    assert name_of() != usual


def test_the_second_run_of_a_workspace_starts_from_its_own_cold_start(place, tmp_path):
    first = made(place, tmp_path / "shared")
    for changes in ({"trainer__seed": 1}, {"search__topk": 1}, {"model__dtype": "bfloat16"}):
        shared = made(place, tmp_path / "shared", **changes)
        assert first != shared, changes
        assert shared == made(place, tmp_path / "+".join(changes), **changes)


def test_a_cold_start_with_adapters_is_the_same_in_every_workspace(place, tmp_path):
    for stir in range(2):
        torch.manual_seed(stir)
        made(place, tmp_path / str(stir), model__lora_rank=2)
    assert len({model_digest(path) for path in tmp_path.glob("*/models/cold-start-*")}) == 1
