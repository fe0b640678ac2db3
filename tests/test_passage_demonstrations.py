"""Demonstrations from passages: answers that stand in what the question itself retrieves."""

from pathlib import Path

import pytest
from tests.native_models import family_codec

from srl.config import Config, load_config
from srl.data.demonstration_file import read_demonstrations
from srl.data.parquet import write_questions
from srl.errors import CheckFailed, UserError
from srl.index import build_index, open_index
from srl.index.retriever import Fault
from srl.serve import in_process
from srl.train.demonstrations import make_demonstrations
from srl.trajectory import Passage, Question
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")

PAGES = {
    "Osk": "Osk is a town in Vale.",
    "Rye": "Rye is the grain of the town Osk.",
    "Ana": "Ana was born in 1901.",
}
ASKED = {
    "first": ("In which land is the town of Osk?", ("Vale",)),
    "second": ("What is Osk, the town, in Vale?", ("Grain",)),
    "nowhere": ("Where is the town of Osk?", ("Ham",)),
    "yes": ("Is Osk a town?", ("yes",)),
    "later": ("Which land has the town of Osk?", ("Ham", "Vale")),
}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passages")
    passages = [Passage(title, f'"{title}"\n{text}') for title, text in PAGES.items()]
    build_index(passages, folder / "index")
    return folder / "index"


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "questions.parquet"
    write_questions(path, [Question(name, text, golds, "made") for name, (text, golds) in ASKED.items()])
    return path


def settings(index: Path, *sets: str) -> Config:
    return load_config(preset=None, sets=[f"search.index={index}", "search.topk=2", *sets]).config


def turns_of(path: Path) -> dict[str, list[str]]:
    return {item.id: item.metadata["turns"] for item in read_demonstrations(path)}


@pytest.mark.parametrize("template", ["short", "rag"])
def test_demonstration_names_the_passage_that_has_the_first_accepted_answer(asked, index, tmp_path, template):
    out = tmp_path / "out.jsonl"
    config = settings(index, f"data.template={template}")
    made = make_demonstrations(config, "passages", [str(asked)], out, Workspace(tmp_path))
    assert [hit.passage.id for hit in open_index(index).search([ASKED["second"][0]], 2)[0]] == ["Osk", "Rye"]
    searches = {name: [f"<search> {ASKED[name][0]} </search>"] for name in ("first", "second")}
    if template == "rag":
        searches = {name: [] for name in searches}
    assert turns_of(out) == {
        "first": [*searches["first"], "<think> Doc 1 says it. </think> <answer> Vale </answer>"],
        "second": [*searches["second"], "<think> Doc 2 says it. </think> <answer> Grain </answer>"],
    }
    assert made.written == {"made": 2}
    assert sorted(made.left_out.values()) == [1, 2], "yes or no; the passages lack it"


@pytest.mark.parametrize(("longest", "written"), [(60, 1), (200, 2)])
def test_native_demonstrations_fit_as_calls(asked, index, tmp_path, longest, written):
    """A turn that has room as a search between tags may have none as a call."""
    family_codec("qwen2.5").tokenizer.save_pretrained(tmp_path / "tokenizer")
    limits = [f"model.tokenizer={tmp_path / 'tokenizer'}", f"rollout.max_turn_tokens={longest}"]
    tags, calls = tmp_path / "tags.jsonl", tmp_path / "native.jsonl"
    for out in (tags, calls):
        config = settings(index, *limits, f"rollout.protocol={out.stem}")
        make_demonstrations(config, "passages", [str(asked)], out, Workspace(tmp_path))
    assert (len(turns_of(tags)), len(turns_of(calls))) == (2, written)
    assert turns_of(calls) == {name: turns_of(tags)[name] for name in turns_of(calls)}


@pytest.mark.parametrize(
    "setting", ["rollout.max_turn_tokens=16", "rollout.max_turn_tokens=50 data.max_response_length=60"]
)
def test_question_that_an_episode_cannot_hold_is_left_out(asked, index, tmp_path, setting):
    out = tmp_path / "out.jsonl"
    overlong = settings(index, *setting.split(), "data.filter_overlong_prompts=true")
    with pytest.raises(CheckFailed):
        make_demonstrations(overlong, "passages", [str(asked)], out, Workspace(tmp_path))
    assert not out.exists()


@pytest.mark.parametrize(("lost", "times"), [(1, 1), (1, 2), (5, 2)])
def test_a_search_that_fails_twice_costs_its_question_and_too_many_write_nothing(
    asked, index, tmp_path, monkeypatch, lost, times
):
    real = in_process.outcomes_of
    left = {text: times for text, _ in list(ASKED.values())[:lost]}

    def failing(retriever: object, queries: list[str], topk: int) -> list[object]:
        hits = real(retriever, queries, topk)
        for place, query in enumerate(queries):
            if left.get(query):
                left[query] -= 1
                hits[place] = Fault("timed_out", "no answer")
        return hits

    monkeypatch.setattr(in_process, "outcomes_of", failing)
    out, allowed = tmp_path / "out.jsonl", settings(index, "eval.max_failed=0.2")
    if lost > 1:
        with pytest.raises(UserError, match="no answer"):
            make_demonstrations(allowed, "passages", [str(asked)], out, Workspace(tmp_path))
        assert not out.exists()
        return
    made = make_demonstrations(allowed, "passages", [str(asked)], out, Workspace(tmp_path))
    assert ("first" in turns_of(out)) == (times == 1)
    assert made.left_out["made", "a search failed"] == (times == 2)


def test_settings_without_search_are_one_line(index: Path, asked: Path, tmp_path: Path) -> None:
    config = settings(index, "rollout.search=false", "data.template=r1")
    with pytest.raises(UserError):
        make_demonstrations(config, "passages", [str(asked)], tmp_path / "d.jsonl", Workspace(tmp_path))
