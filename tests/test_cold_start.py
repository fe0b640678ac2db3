"""The cold start: what it is made of, and which runs share it."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest
from tests.training import config, write_setting

from srl.config import Config
from srl.config.sections import Model
from srl.data.corpus import write_corpus
from srl.models.weights import model_digest
from srl.rollout.episode import EpisodeOptions
from srl.train import cold_start, make_missing
from srl.train.cold_start import cold_started
from srl.train.load_components import episode_options, load_environment, load_policy
from srl.train.load_protocol import read_card, with_base_tokenizer
from srl.train.search import find_or_build_index, load_search
from srl.train.sft import demonstrated
from srl.trajectory import Passage
from srl.workspace import Workspace

SETTINGS = {
    "model.path": None, "model.dtype": "auto", "search.topk": 3, "data.max_prompt_length": 64,
    "rollout.max_turn_tokens": 64, "rollout.max_obs_length": 128, "data.max_response_length": 256,
    "sft.steps": 2, "sft.batch_size": 2,
}  # fmt: skip
NAMED = {"other": {"index": "other", "description": "another one"}}

OF_THE_MODEL: dict[str, object] = {
    "model.dtype": "bfloat16", "model.lora_rank": 4, "model.attn_implementation": "eager",
    "model.cast_lm_head_to_fp32": True, "model.chat_template_kwargs": {"enable_thinking": False},
    "model.tokenizer": Path("tokenizer"), "data.corpus": Path("other.jsonl"), "data.template": "search-r1",
    "data.max_prompt_length": 63, "data.max_response_length": 255, "search.index": Path("other"),
    "search.retrievers": NAMED, "search.topk": 2, "retriever.bm25": {"k1": 1.5}, "rollout.max_turns": 3,
    "rollout.max_turn_tokens": 63, "rollout.max_obs_length": 127, "rollout.search": False,
    "rollout.protocol": "native", "actor.ppo_max_token_len": 300, "data.world": "tiny-hard",
    "sft.train_files": Path("others.jsonl"), "sft.steps": 3,
    "sft.batch_size": 3, "sft.optim.lr": 3e-5, "sft.optim.betas": (0.9, 0.98),
    "sft.optim.weight_decay": 0.5, "sft.optim.lr_warmup_steps": 1, "sft.optim.lr_warmup_steps_ratio": 0.5,
    "sft.optim.lr_scheduler_type": "linear", "trainer.seed": 1,
}  # fmt: skip
"""Every key that the cold-started model depends on, with a value other than the usual one."""

OF_THE_RUN: dict[str, object] = {
    "model.lora_target_modules": ("q_proj",), "model.gradient_checkpointing": True,
    "data.train_files": ("others.parquet",), "data.train_batch_size": 2,
    "search.cassette": "record run.cassette", "search.timeout_s": 7.0, "rollout.temperature": 0.5,
    "rollout.n": 3, "rollout.call_format": "hermes", "reward.weights": {"em": 2.0}, "algorithm.name": "ppo",
    "actor.optim.lr": 1e-5, "sft.filter": "true", "trainer.total_training_steps": 7,
    "watch.actions": {"kl": "stop"},
}  # fmt: skip
"""Keys that it does not depend on."""


WORDS = ("born", "works", "mayor", "led")
"""Words that the small base can read."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A setting with demonstrations, and beside each file another one."""
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    for name, guesses in (("demos", 2), ("others", 3)):
        rows = [
            {
                "question": f"Who is {word} ?",
                "turns": [f"<search> {word} city </search>"] * (at % guesses > 0)
                + [f"<answer> {word} </answer>"],
            }
            for at, word in enumerate(WORDS)
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
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


def test_runs_share_a_cold_start_where_what_it_is_made_of_is_the_same(name_of):
    usual = name_of()
    changed = {key for key, value in {**OF_THE_MODEL, **OF_THE_RUN}.items() if name_of({key: value}) != usual}
    assert changed == set(OF_THE_MODEL)


def test_a_cold_start_is_of_the_tools_that_its_prompts_declare(name_of):
    native = {"rollout.protocol": "native"}
    assert name_of(native) != name_of({**native, "rollout.tools": ["search", "open"]})


def test_the_base_of_the_made_up_world_is_taught_calls_in_a_native_run(place, tmp_path):
    config = with_base_tokenizer(configured(place, {"rollout.protocol": "native"}))
    taught = cold_started(config, Workspace(tmp_path), lambda text: None)
    card = read_card(taught)
    codec = load_policy(Model(path=str(taught)), lambda text: None).codec
    search = load_search(config, Workspace(tmp_path), lambda text: None)
    environment = load_environment(config, codec, search, lambda text: None)
    episodes = demonstrated(place / "demos.jsonl", environment)
    assert card["protocol"] == "native"
    assert {(episode.protocol, episode.malformed) for episode in episodes} == {("hermes", 0)}
    said = [segment.token_ids for episode in episodes for segment in episode.segments if segment.is_policy]
    assert not any(codec.tokenizer.unk_token_id in ids for ids in said)
    assert [search.query.strip() for episode in episodes for search in episode.searches] == [
        f"{word} city" for at, word in enumerate(WORDS) if at % 2
    ]


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
    for changes in ({"search__topk": 1}, {"model__lora_rank": 2}):
        shared = made(place, tmp_path / "shared", **changes)
        assert first != shared, changes
        assert shared == made(place, tmp_path / "+".join(changes), **changes)
