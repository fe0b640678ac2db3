"""A run of one step on one question that may search two retrievers, and what it left in its log."""

from pathlib import Path

import pytest
from tests.store_builder import log_rows
from tests.tiny_models import byte_level_tokenizer, tiny_model
from tests.training import config

from srl.config import Config
from srl.data.parquet import write_questions
from srl.index import build_index
from srl.models.weights import save_model
from srl.protocol import template
from srl.rollout.engine import ScriptedEngine
from srl.trajectory import Passage, Question

PAGES = [Passage("velmar", '"Velmar"\nVelmar lies by the sea.')]
PAPERS = [Passage("paper", '"On Velmar"\nIts lighthouse was built by Ossa Trell.')]
QUESTION = Question(
    "q/0", "Who built the lighthouse?", ("Ossa Trell",), "towers",
    prompt=template("search-r1").messages("Who built the lighthouse?"),
)  # fmt: skip
SAYS = [
    "<think>so</think><search>velmar</search>",
    '<think>so</think><search engine="papers">lighthouse</search>',
    "<think>so</think><search engine=wbe>lighthouse</search>",
    "<think>so</think><answer>Ossa Trell</answer>",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, one question, and two indexes."""
    folder: Path = tmp_path_factory.mktemp("retrievers")
    save_model(tiny_model(max_length=4096), byte_level_tokenizer(), folder / "model")
    write_questions(folder / "train.parquet", [QUESTION])
    for name, passages in (("pages", PAGES), ("papers", PAPERS)):
        build_index(passages, folder / name)
    return folder


def settings(place: Path, *sets: str, **given: object) -> Config:
    """One step on the one question, which may search in two retrievers."""
    said = {
        "model__path": str(place / "model"), "data__train_files": [str(place / "train.parquet")],
        "data__val_files": None, "data__test_files": None, "data__corpus": None,
        "data__template": "search-r1", "data__train_batch_size": 1, "data__max_prompt_length": 1500,
        "data__max_response_length": 1500, "rollout__max_turns": 4, "rollout__max_turn_tokens": 200,
        "rollout__max_obs_length": 200, "actor__ppo_mini_batch_size": 1,
        "actor__ppo_max_token_len": 4000, "search__index": str(place / "pages"),
        "trainer__total_training_steps": 1, **given,
    }  # fmt: skip
    named = [
        f"search.retrievers.papers.index={place / 'papers'}",
        "search.retrievers.papers.description=papers",
    ]
    return config(place, "grpo", [*named, *sets], **said)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the policy of every run say `SAYS`, whatever its weights."""

    def load(config, policy, note):
        return ScriptedEngine(policy.codec, lambda request, turn: SAYS[turn])

    monkeypatch.setattr("srl.train.local_backend.load_engine", load)
    monkeypatch.setattr("srl.train.load_components.load_engine", load)


def searched(run: Path) -> list[tuple[str, str, str, int]]:
    query = "SELECT DISTINCT retriever, query, status, hits FROM searches WHERE phase = 'train' ORDER BY ALL"
    return log_rows(run, query)
