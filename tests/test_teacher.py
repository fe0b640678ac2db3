"""A model behind a server: evaluated, and its right episodes in the log taken for demonstrations."""

import json
from functools import partial
from pathlib import Path

import pytest
from tests.cli_mistakes import Shell, shell  # noqa: F401 - a fixture
from tests.fake_openai import MODEL, FakeServer, Reply, completion, listing
from tests.training import PASSAGES, TOWNS, questions

from srl.data.demonstration_file import read_demonstrations
from srl.data.parquet import read_questions, write_questions
from srl.errors import CheckFailed, UserError
from srl.index import build_index
from srl.protocol import parse_action
from srl.rollout import openai_engine
from srl.store import LogWriter, Record, RunInfo
from srl.train.logged_episodes import questions_where, write_logged_demonstrations
from srl.trajectory import Question, Search, Segment, Trajectory

ASKED = 6


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Questions about the flags of towns, each about another."""
    write_questions(tmp_path / "q.parquet", questions("train", ASKED))
    return tmp_path


class Teacher:
    """Searches for the town and answers with its flag, but not of the towns that it does not `know`."""

    def __init__(self, *unknown: str) -> None:
        self.unknown, self.down = unknown, set[str]()
        self.asked: list[str] = []

    async def __call__(self, path: str, body: dict, headers: dict) -> Reply:
        if path == "models":
            return listing()
        messages = body.get("messages") or [{"content": body["prompt"]}]
        text = "".join(message["content"] for message in messages)
        town = next(town for town in TOWNS if town in text)
        if town in self.down:
            return Reply(b"oops", 500)
        if "<information>" not in text.partition(town)[2]:
            self.asked.append(town)
            return completion(f"<think> I look it up </think> <search> {town} ")
        flag = "purple" if town in self.unknown else TOWNS[town]
        return completion(f"<think> I know </think> <answer> {flag} ")


@pytest.fixture
def teacher():
    return Teacher("brusk")


@pytest.fixture
def server(teacher):
    fake = FakeServer(teacher)
    with fake.running() as url:
        yield url


def options(url: str, *more: str) -> list[str]:
    sets = [
        "rollout.engine=openai", f"rollout.openai.url={url}",
        "data.max_response_length=1000", "rollout.max_turn_tokens=100", "eval.max_failed=0.1", *more,
    ]  # fmt: skip
    return [part for setting in sets for part in ("--set", setting)]


@pytest.fixture
def corpus(place):
    """An index of the towns' pages."""
    build_index(PASSAGES, place / "index")
    return place / "index"


def test_model_of_a_server_is_evaluated_without_one_here(shell: Shell, place, corpus, server):  # noqa: F811
    command = ("eval", "run", "--data", place / "q.parquet", "--index", corpus, *options(server))
    code, out, err = shell.typed(*command, "--json")
    report = json.loads(out)
    assert code == 0, err
    assert report["model"] == f"{MODEL} at {server}"
    assert report["search"]["metrics"]["em"] == pytest.approx(5 / 6)
    assert report["search"]["metrics"]["env/number_of_valid_search"] == 1
    assert report["usage"] == {
        "requests": 13, "failed_requests": 0, "prompt_tokens": 120, "completion_tokens": 60,
    }  # fmt: skip
    _, _, err = shell.typed(*command)
    assert "13 requests, 120 tokens in, 60 out" in err


def test_episodes_that_a_server_fails_count_zero_and_end_with_exit_code_1(
    shell: Shell, place, corpus, server, teacher, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(openai_engine, "OpenAiServer", partial(openai_engine.OpenAiServer, retries=0))
    teacher.down = {"velmar"}
    command = ("eval", "run", "--data", place / "q.parquet", "--index", corpus, *options(server))
    code, out, err = shell.typed(*command)
    assert code == 1
    assert "the engine failed in 16.7% of the episodes" in err
    assert "HTTP 500: oops" in err.splitlines()[-1]
    assert "lost to faults" in out


def test_right_episodes_in_the_log_of_a_teacher_become_demonstrations(
    shell: Shell, place, corpus, server, teacher  # noqa: F811
):  # fmt: skip
    evaluated = ("eval", "run", "--data", place / "q.parquet", "--index", corpus, *options(server))
    assert shell.typed(*evaluated)[0] == 0
    asked = len(teacher.asked)
    command = ("data", "demonstrations", "--from-log", "last", "--out", "d.jsonl")
    code, out, err = shell.typed(*command, "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["demonstrations"] == 5
    assert [each["count"] for each in report["left_out"]] == [1]
    shown = read_demonstrations(Path("d.jsonl"))
    assert {each.golden_answers[0] for each in shown} == {TOWNS[town] for town in TOWNS if town != "brusk"}
    [velmar] = [each for each in shown if "velmar" in each.text]
    assert velmar.metadata["turns"] == [
        "<think> I look it up </think> <search> velmar </search>",
        "<think> I know </think> <answer> red </answer>",
    ]
    assert len(teacher.asked) == asked
    assert "--overwrite" in shell.refused(*command)
    shell.refused(*command, "--overwrite", "--where", "em = 2", code=1)
    shell.refused(*command, "--overwrite", "--where", "colour = 'red'")
    shell.refused(*command, "--overwrite", "--from", "facts")
    prepared = ("data", "prepare", f"questions={place / 'q.parquet'}", "--from-log", "last", "--out", "hard")
    code, out, err = shell.typed(*prepared, "--where", "avg(em) < 1")
    assert code == 0, err
    [hard] = read_questions(Path("hard/train.parquet"))
    assert "brusk" in hard.text


LOOK, AGAIN, RED = "<search> flag </search>", "<search> town flag </search>", "<answer> red </answer>"


def played(name: str, phase: str, *turns: str, sample: int = 0) -> Trajectory:
    """The episode of these turns."""
    actions = [action for action in map(parse_action, turns) if action is not None]
    answers = [action.content for action in actions if action.kind == "answer"]
    return Trajectory(
        Question(name, f"{name}?", ("red",)),
        [Segment("policy", (1,), text, turn, (0.0,)) for turn, text in enumerate(turns)],
        [Search(action.content) for action in actions if action.kind == "search"],
        end="answered" if answers else "unanswered", answer=answers[0] if answers else None,
        valid_actions=len(actions), sample=sample, phase=phase,
    )  # fmt: skip


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log with right episodes by one and by two searches, wrong ones and odd ones."""
    episodes = [
        played("a", "eval", LOOK, RED),
        played("a", "eval", "<search>  FLAG</search>", RED, sample=1),
        played("a", "eval", LOOK, AGAIN, RED + " and", sample=2),
        played("a", "eval", LOOK, "<answer> blue </answer>", sample=3),
        played("b", "eval", LOOK, LOOK, RED),
        played("b", "eval", "hm", LOOK, RED, sample=1),
        played("b", "eval", LOOK, sample=2),
        played("b", "val", LOOK, RED),
    ]
    with LogWriter(tmp_path / "log", RunInfo("run")) as writer:
        for phase in ("eval", "val"):
            writer.write(0, phase, [Record(each) for each in episodes if each.phase == phase], {})
    return tmp_path


def test_an_episode_is_whole_right_and_unlike_the_others_of_its_question(log):
    out = log / "d.jsonl"
    made = write_logged_demonstrations(log, out, per_question=4)
    assert (made.written.total(), made.left_out.total()) == (2, 6)
    assert [each.id for each in read_demonstrations(out)] == ["a", "a#2"]
    assert read_demonstrations(out)[1].metadata["turns"][-1] == "<answer> red </answer>"
    assert write_logged_demonstrations(log, out, "searches = 2").written.total() == 1
    assert write_logged_demonstrations(log, out, "true", 4).written.total() == 2
    with pytest.raises(CheckFailed):
        write_logged_demonstrations(log, out, "em = 0 AND searches = 2")


def test_questions_are_chosen_by_how_often_they_are_answered(log):
    assert questions_where(log, "avg(em) BETWEEN 0.7 AND 0.8") == {"a", "b"}
    assert questions_where(log, "count(*) FILTER (em = 0) = 1 AND max(searches) < 3") == {"a", "b"}
    assert questions_where(log, "bool_or(phase = 'val')") == {"b"}
    for condition in ("avg(em) > 1", "not a condition"):
        with pytest.raises(UserError):
            questions_where(log, condition)
