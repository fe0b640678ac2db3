"""A world of six towns and a model small enough to be trained in a test: what a run needs, in seconds."""

import io
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.tiny_models import new_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from srl.config import Config, load_config
from srl.config.sections import Sft
from srl.data.corpus import write_corpus
from srl.data.parquet import write_questions
from srl.index import build_index, open_index
from srl.models.weights import save_model
from srl.protocol import TAGS, template
from srl.rollout.codec import Codec
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions
from srl.serve.in_process import LocalSearch
from srl.train.loop import Loop
from srl.train.report import Terminal
from srl.train.run import Summary, start
from srl.train.sft import batches, demonstrate, fine_tune_step
from srl.trajectory import Passage, Question, Search, Trajectory, current_episode
from srl.update.optimiser import Optimiser
from srl.workspace import Workspace

TOWNS = {
    "velmar": "red",
    "quillon": "blue",
    "ostrey": "green",
    "tamwick": "red",
    "brusk": "gold",
    "ninhol": "blue",
}
FLAGS = sorted(set(TOWNS.values()))
PASSAGES = [Passage(town, f'"{town}"\nthe flag of {town} is {flag} .') for town, flag in TOWNS.items()]
OPTIONS = EpisodeOptions(
    max_turns=2, max_turn_tokens=16, max_obs_length=40, max_response_length=128, min_answer_tokens=4
)
SETTINGS = {
    "model.dtype": "float32",
    "data.template": "tiny",
    "data.train_batch_size": 4,
    "data.max_prompt_length": 32,
    "data.max_response_length": 128,
    "search.topk": 1,
    "rollout.max_turns": 2,
    "rollout.max_turn_tokens": 16,
    "rollout.max_obs_length": 40,
    "rollout.max_num_seqs": 8,
    "actor.ppo_mini_batch_size": 2,
    "actor.ppo_max_token_len": 256,
    "critic.ppo_mini_batch_size": 2,
    "critic.ppo_max_token_len": 256,
    "actor.optim.lr": 1e-3,
    "critic.optim.lr": 1e-3,
    "trainer.total_training_steps": 2,
    "trainer.save_freq": 1,
    "trainer.test_freq": 1,
    "trainer.critic_warmup": 0,
    "trainer.threads": 1,
}


def questions(split: str, count: int) -> list[Question]:
    """`count` questions, whose towns repeat."""
    prompt = template("tiny")
    towns = list(TOWNS.items())
    return [
        Question(
            f"towns/{split}/{number}", f"what flag has {town}", (flag,), "towns", split,
            prompt.messages(f"what flag has {town}"), {"hops": 1 + number % 2},
        )
        for number in range(count)
        for town, flag in [towns[number % len(towns)]]
    ]  # fmt: skip


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, one a tag."""
    said = [passage.contents for passage in PASSAGES] + [template("tiny").feedback, *FLAGS]
    text = " ".join([*said, "Question : what flag has ? Doc 1 ( Title : ) No results found . I think", *"…&"])
    words = list(dict.fromkeys(text.replace('"', " ").split()))
    vocabulary = {word: number for number, word in enumerate(["<eos>", "<pad>", "<unk>", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("isolated")]
    )
    tags = [mark.format(tag) for tag in TAGS for mark in ("<{}>", "</{}>")]
    made.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def turns(question: Question, rng: random.Random) -> list[str]:
    """What a demonstrator says who searches for some town, and answers with some flag."""
    town = rng.choice(list(TOWNS))
    return [
        f"<think> I think {town} </think> <search> {town} </search>",
        f"<think> {town} </think> <answer> {rng.choice(FLAGS)} </answer>",
    ][rng.randrange(2) :]


def search(folder: Path) -> LocalSearch:
    """BM25 over the towns, in this process."""
    build_index(PASSAGES, folder / "index")
    return LocalSearch(open_index(folder / "index"), 1)


def demonstrations(folder: Path, count: int = 48) -> list[Trajectory]:
    """Demonstrations of all kinds, as episodes."""
    rng = random.Random(0)
    shown = [
        Question(item.id, item.text, item.golden_answers, metadata={"turns": turns(item, rng)})
        for item in questions("demo", count)
    ]
    environment = Environment(Codec(tokenizer()), template("tiny"), OPTIONS, search(folder))
    return demonstrate(shown, environment)


_STATE: dict[str, torch.Tensor] = {}


def model(folder: Path, steps: int = 40) -> PreTrainedModel:
    """A Qwen2 of width 32 that knows the form of an episode and not one answer; trained once a process."""
    made = new_model(
        "qwen2", vocab_size=len(tokenizer()), layers=2, width=32, heads=2, ffn=64, max_length=256,
        eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    if not _STATE:
        folder.mkdir(parents=True, exist_ok=True)
        optimiser = Optimiser(made.parameters(), lr=1e-2, betas=(0.9, 0.98))
        for batch in batches(demonstrations(folder), Sft(batch_size=16, steps=steps), 0):
            fine_tune_step(made, optimiser, batch)
        _STATE.update({name: value.clone() for name, value in made.state_dict().items()})
    made.load_state_dict(_STATE)
    return made.eval()


def write_setting(folder: Path) -> dict[str, object]:
    """Model, corpus and questions under `folder`; the settings that name them."""
    save_model(model(folder / "demonstrations"), tokenizer(), folder / "model")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    files = {}
    for split, count in {"train": 8, "val": 6, "test": 4}.items():
        write_questions(folder / f"{split}.parquet", questions(split, count))
        files[f"data.{split}_files"] = [str(folder / f"{split}.parquet")]
    return {"model.path": str(folder / "model"), "data.corpus": str(folder / "corpus.jsonl"), **files}


def config(folder: Path, algo: str = "grpo", sets: Sequence[str] = (), **settings: object) -> Config:
    """The configuration of a small run on what `write_setting` left in `folder` (written when missing)."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    if not (folder / "model").is_dir():
        write_setting(folder)
    files = {f"data.{split}_files": [str(folder / f"{split}.parquet")] for split in ("train", "val", "test")}
    paths = {"model.path": str(folder / "model"), "data.corpus": str(folder / "corpus.jsonl"), **files}
    small = {"rollout.n": 2} if algo in ("grpo", "rloo") else {}
    return load_config(None, None, algo, {**SETTINGS, **small, **paths, **given}, sets).config


def search_is_down(patch: pytest.MonkeyPatch, during: str) -> None:
    """Have searches refused in the episodes whose names begin with `during`, such as `val/1/`."""
    real = LocalSearch.search

    async def search(searcher: LocalSearch, query: str) -> Search:
        if not current_episode.get().startswith(during):
            return await real(searcher, query)
        return Search(query, status="refused", error="nobody listens", index_digest=searcher.index_digest)

    patch.setattr(LocalSearch, "search", search)


def stop_at(step: int, phase: str = "train", error: BaseException | None = None) -> Callable[..., Any]:
    """The scoring of a step's episodes, for `Loop.score`, which breaks at one step, once."""
    real, left = Loop.score, [error or KeyboardInterrupt()]

    def score(runner: Loop, trajectories: list[Trajectory]) -> Any:
        if (trajectories[0].phase, trajectories[0].step) == (phase, step) and left:
            raise left.pop()
        return real(runner, trajectories)

    return score


class Said(Terminal):
    """A terminal that keeps what was said."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        super().__init__(Console(file=self.out, width=200, highlight=False, soft_wrap=True))

    @property
    def text(self) -> str:
        return self.out.getvalue()


def train(config: Config, workspace: Path, algo: str = "grpo", terminal: Terminal | None = None) -> Summary:
    """A run from its start to its end."""
    return start(
        config, preset="test", algo=algo, workspace=Workspace(workspace), terminal=terminal or Said()
    )


def only_run(workspace: Path) -> Path:
    """The directory of the only run of a workspace."""
    (run,) = Workspace(workspace).all_runs()
    return run


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a run needs, of a module's own."""
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    return folder
