"""A model behind a server: `srl eval run` and `srl data demonstrations` against one on this machine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli_mistakes import Shell, shell  # noqa: F401 - a fixture
from tests.fake_openai import MODEL, FakeServer, Reply, completion, listing
from tests.training import TOWNS, questions

from srl.data.demonstration_file import read_demonstrations
from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.protocol import parse_action
from srl.reward import RewardMix
from srl.train.write_demonstrations import Acceptance, Journal, _demonstrations, key_of
from srl.trajectory import Hit, Passage, Question, Score, Search, Segment, Trajectory

ASKED = 6


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Questions about the flags of towns, each about another."""
    write_questions(tmp_path / "q.parquet", questions("train", ASKED))
    return tmp_path


class Teacher:
    """Searches for the town and answers with its flag, but not of the towns that it does not `know`."""

    def __init__(self, *unknown: str, chat: bool = False) -> None:
        self.unknown, self.chat = unknown, chat
        self.down: set[str] = set()
        self.queries = False
        """Whether it searches with other words each time."""
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
            query = f"{town} {self.asked.count(town)}" if self.queries else town
            return self.said(f"<think> I look it up </think> <search> {query} ")
        flag = "purple" if town in self.unknown else TOWNS[town]
        return self.said(f"<think> I know </think> <answer> {flag} ")

    def said(self, text: str) -> Reply:
        reply = completion(text)
        if self.chat:
            reply.body["choices"][0] = {"message": {"content": text}, "finish_reason": "stop"}
        return reply


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
        "rollout.engine=openai", f"rollout.openai.url={url}", "rollout.openai.retries=0",
        "data.max_response_length=1000", "rollout.max_turn_tokens=100", "eval.max_failed=0.1",
        "rollout.openai.price_in=2", "rollout.openai.price_out=10", *more,
    ]  # fmt: skip
    return [part for setting in sets for part in ("--set", setting)]


@pytest.fixture
def corpus(place):
    """An index of the towns' pages."""
    from tests.training import PASSAGES

    from srl.data.corpus import write_corpus
    from srl.index import build_index

    write_corpus(place / "corpus.jsonl", PASSAGES)
    build_index(place / "corpus.jsonl", place / "index", "bm25", {})
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
        "requests": 13, "failed_requests": 0, "prompt_tokens": 120, "completion_tokens": 60, "cost": 0.00084,
    }  # fmt: skip
    _, _, err = shell.typed(*command, "--fresh")
    assert "13 requests, 120 tokens in, 60 out, cost 0.0008" in err


@pytest.mark.parametrize("teacher", [Teacher(chat=True)])
def test_server_with_a_chat_api_only_is_evaluated(shell: Shell, place, corpus, server):  # noqa: F811
    command = ("eval", "run", "--data", place / "q.parquet", "--index", corpus, "--json")
    code, out, err = shell.typed(*command, *options(server, "rollout.openai.api=chat"))
    assert code == 0, err
    assert json.loads(out)["search"]["metrics"]["em"] == 1


def test_episodes_that_a_server_fails_count_zero_and_end_with_exit_code_1(
    shell: Shell, place, corpus, server, teacher  # noqa: F811
):  # fmt: skip
    teacher.down = {"velmar"}
    command = ("eval", "run", "--data", place / "q.parquet", "--index", corpus, *options(server))
    code, out, err = shell.typed(*command)
    assert code == 1
    assert "the engine failed in 16.7% of the episodes" in err
    assert "HTTP 500: oops" in err.splitlines()[-1]
    assert "lost to faults" in out


def test_server_that_is_not_there_is_one_line(shell: Shell, place, corpus):  # noqa: F811
    command = ("eval", "run", "--data", place / "q.parquet", "--index", corpus)
    assert "http://127.0.0.1:9/v1" in shell.refused(*command, *options("http://127.0.0.1:9/v1"))


def test_without_a_model_and_a_server_the_command_asks_which(shell: Shell, place, corpus):  # noqa: F811
    said = shell.refused("eval", "run", "--data", place / "q.parquet", "--index", corpus)
    assert "which model? name its directory or run, or set rollout.engine=openai" in said


def test_right_episodes_of_a_teacher_become_demonstrations(
    shell: Shell, place, corpus, server, teacher  # noqa: F811
):  # fmt: skip
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    code, out, err = shell.typed(*command, *options(server))
    assert code == 0, err
    assert out.splitlines()[0] == "d.jsonl  5 demonstrations of 6 questions"
    assert out.splitlines()[-1].split() == ["1", "a", "wrong", "answer"]
    assert "13 requests, 120 tokens in, 60 out, cost 0.0008" in err
    found = read_demonstrations(Path("d.jsonl"))
    assert {item.golden_answers[0] for item in found} == {TOWNS[town] for town in TOWNS if town != "brusk"}
    assert found[0].metadata["turns"] == [
        "<think> I look it up </think> <search> velmar </search>",
        "<think> I know </think> <answer> red </answer>",
    ]
    assert not list(shell.folder.glob("*.partial"))
    assert "--overwrite" in shell.refused(*command, *options(server))


def test_interrupted_demonstrations_go_on_where_they_stopped(
    shell: Shell, place, corpus, server, teacher  # noqa: F811
):  # fmt: skip
    teacher.down = {"velmar", "ostrey"}
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    code, _, err = shell.typed(*command, *options(server))
    assert code == 1
    assert "type the same command again" in err
    assert not Path("d.jsonl").exists()
    with Path("d.jsonl.partial").open("a") as file:
        file.write('{"id": "cut o')
    teacher.down, teacher.asked = {"velmar"}, []
    assert shell.typed(*command, *options(server))[0] == 1
    assert teacher.asked == ["ostrey"]
    teacher.down, teacher.asked = set(), []
    code, out, err = shell.typed(*command, *options(server))
    assert code == 0, err
    assert teacher.asked == ["velmar"]
    assert "5 episodes of an earlier call are kept" in err
    assert out.splitlines()[0] == "d.jsonl  5 demonstrations of 6 questions"
    assert len(read_demonstrations(Path("d.jsonl"))) == 5


def test_answers_are_kept_by_question_and_not_by_id(shell: Shell, place, corpus, server, teacher):  # noqa: F811
    """The data are prepared anew, so that ids name other questions; and fewer are asked than before."""
    teacher.down = {"velmar"}
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    assert shell.typed(*command, *options(server))[0] == 1
    asked = questions("train", ASKED)
    names = [item.id for item in asked]
    moved = [replace(item, id=name) for item, name in zip(asked[1:] + asked[:1], names, strict=True)]
    write_questions(place / "q.parquet", moved)
    teacher.down, teacher.asked = set(), []
    code, _, err = shell.typed(*command, "--limit", "2", *options(server))
    assert code == 0, err
    assert "d.jsonl.partial is kept: it has answers to other questions" in err
    known = {item.text: item.golden_answers for item in asked}
    for item in read_demonstrations(Path("d.jsonl")):
        assert known[item.text] == item.golden_answers
        assert item.golden_answers[0] in item.metadata["turns"][-1]


def test_a_damaged_line_and_an_output_that_cannot_be_written_are_one_line(
    shell: Shell, place, corpus, server, teacher  # noqa: F811
):  # fmt: skip
    teacher.down = {"velmar"}
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    assert shell.typed(*command, *options(server))[0] == 1
    with Path("d.jsonl.partial").open("a") as file:
        file.write('{"question": "x"}\n')
    code, _, err = shell.typed(*command, *options(server))
    assert (code, err.count("d.jsonl.partial:7 is damaged")) == (2, 1)
    Path("file").write_text("")
    teacher.asked = []
    for out in ("file/d.jsonl", "."):
        assert shell.typed(*command[:-1], out, "--overwrite", *options(server))[0] == 2
    assert teacher.asked == []


def test_answers_of_another_teacher_are_not_mixed_in(shell: Shell, place, corpus, server, teacher):  # noqa: F811
    teacher.down = {"velmar"}
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    assert shell.typed(*command, *options(server))[0] == 1
    before = shell.left()
    code, _, err = shell.typed(*command, "--temperature", "0.5", *options(server))
    assert code == 2
    assert "another teacher or setting (temperature); remove it to start over" in err.splitlines()[-1]
    assert shell.left() == before


def test_answers_that_were_accepted_without_evidence_are_not_taken_for_others(
    shell: Shell, place, corpus, server, teacher  # noqa: F811
):  # fmt: skip
    """Also where the reward weighs the evidence."""
    teacher.down = {"velmar"}
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl",
               "--min-reward", "0.01")  # fmt: skip
    weights = options(server, "reward.weights.format=1", "reward.weights.evidence=0.25")
    assert shell.typed(*command, *weights)[0] == 1
    code, _, err = shell.typed(*command, "--evidence", *weights)
    assert code == 2, err
    assert "another teacher or setting (acceptance); remove it to start over" in err.splitlines()[-1]


def test_wrong_answers_are_asked_again_up_to_the_number_of_attempts(
    shell: Shell, place, corpus, server, teacher  # noqa: F811
):  # fmt: skip
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    assert "--temperature 1" in shell.refused(*command, "--attempts", "3", *options(server))
    code, _, err = shell.typed(*command, "--attempts", "3", "--temperature", "1", *options(server))
    assert code == 0, err
    assert sorted(teacher.asked) == sorted([*TOWNS, "brusk", "brusk"])


@pytest.mark.parametrize("teacher", [Teacher(*TOWNS)])
def test_teacher_that_is_never_right_writes_nothing_and_more_attempts_go_on(
    shell: Shell, place, corpus, server  # noqa: F811
):  # fmt: skip
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    code, _, err = shell.typed(*command, *options(server))
    assert code == 1
    assert "no episode of 6 questions was accepted" in err
    assert "(a wrong answer: 6; " in err
    assert " tokens); remove d.jsonl.partial and try --attempts 4 --temperature 1, or" in err
    assert [path.name for path in shell.folder.glob("d.jsonl*")] == ["d.jsonl.partial"]
    assert Path("d.jsonl.partial").read_text().count('"a wrong answer"') == 6
    Path("d.jsonl.partial").unlink()
    warmer = (*command, "--temperature", "1", "--attempts")
    for attempts in ("1", "2"):  # the second asks what the first said it would
        code, _, err = shell.typed(*warmer, attempts, *options(server))
        assert code == 1
        assert " tokens); try more --attempts, which go on from d.jsonl.partial" in err
        assert Path("d.jsonl.partial").read_text().count('"a wrong answer"') == 6 * int(attempts)


def test_episodes_of_a_question_are_accepted_once_for_the_same_queries(
    shell: Shell, place, corpus, server, teacher  # noqa: F811
):  # fmt: skip
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    command += ("--per-question", "2", "--temperature", "1", "--json")
    assert "needs as many --attempts" in shell.refused(*command, "--attempts", "1", *options(server))
    code, out, err = shell.typed(*command, *options(server))
    assert code == 0, err
    found = json.loads(out)
    assert (found["answered"], found["demonstrations"]) == (5, 5)
    assert found["rejected"] == {"the queries of another demonstration": 5, "a wrong answer": 2}
    teacher.queries = True
    code, out, err = shell.typed(*command, "--overwrite", *options(server))
    assert code == 0, err
    assert json.loads(out)["demonstrations"] == 10
    ids = [item.id for item in read_demonstrations(Path("d.jsonl"))]
    assert ids[:2] == [ids[0], f"{ids[0]}#2"]


def test_a_reward_can_decide_instead_of_the_exact_match(shell: Shell, place, corpus, server):  # noqa: F811
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    weights = ("reward.weights.em=0", "reward.weights.format=1")
    code, out, err = shell.typed(*command, "--min-reward", "0.01", "--json", *options(server, *weights))
    assert code == 0, err
    assert json.loads(out)["demonstrations"] == 6
    assert json.loads(out)["rejected"] == {}


def test_an_episode_that_the_reward_cannot_score_is_asked_again(
    shell: Shell, place, corpus, server, teacher, monkeypatch  # noqa: F811
):  # fmt: skip
    async def no_score(self, trajectories):
        return [Score(0.0, error="reward 'judge' gave no score: it is down") for _ in trajectories]

    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    command = (*command, "--min-reward", "1", *options(server))
    with monkeypatch.context() as patch:
        patch.setattr(RewardMix, "score", no_score)
        code, _, err = shell.typed(*command)
    assert code == 1
    assert "failed for 6 of 6 questions" in err
    teacher.asked = []
    code, out, err = shell.typed(*command)
    assert code == 0, err
    assert len(teacher.asked) == 6
    assert out.splitlines()[0] == "d.jsonl  5 demonstrations of 6 questions"


def test_no_more_episodes_are_asked_for_once_none_can_be_kept(
    shell: Shell, place, corpus, server, monkeypatch  # noqa: F811
):  # fmt: skip
    asked: list[str] = []

    async def rollout(questions, *given, on_done, **named):
        for question in questions:
            asked.append(question.id)
            on_done(Trajectory(question, [], [], end="answered"))
            for _ in range(3):
                await asyncio.sleep(0)
        return []

    async def broken(self, trajectories):
        raise UserError("the reward is broken")

    monkeypatch.setattr("srl.train.write_demonstrations.rollout", rollout)
    monkeypatch.setattr(RewardMix, "score", broken)
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    code, _, err = shell.typed(*command, "--min-reward", "1", *options(server))
    assert (code, err.splitlines()[-1]) == (2, "srl: the reward is broken")
    assert len(asked) == 2


def test_a_question_is_lost_only_if_every_attempt_failed(
    shell: Shell, place, corpus, server, teacher, monkeypatch  # noqa: F811
):  # fmt: skip
    add = Journal.add
    fails = {0: {"brusk", "velmar"}, 1: {"velmar"}}

    def failing(journal, file, trajectory, reward, attempt):
        if any(town in trajectory.question.text for town in fails[attempt]):
            trajectory.end, trajectory.error = "failed", "engine failed: gone"
        add(journal, file, trajectory, reward, attempt)

    monkeypatch.setattr(Journal, "add", failing)
    command = ("data", "demonstrations", "--data", place / "q.parquet", "--index", corpus, "--out", "d.jsonl")
    command = (*command, "--attempts", "2", "--temperature", "1", *options(server))
    code, _, err = shell.typed(*command)
    assert code == 1
    assert "failed for 1 of 6 questions, more than eval.max_failed=0.1" in err
    code, _, err = shell.typed(*command, "--set", "eval.max_failed=0.2")
    assert code == 0, err
    assert "every attempt failed for 1 of 6 questions; the same command with --overwrite asks them" in err
    assert Path("d.jsonl.partial").exists()
    fails.clear()
    fails.update({0: set(), 1: set()})
    code, _, err = shell.typed(*command, "--overwrite")
    assert code == 0, err
    assert not Path("d.jsonl.partial").exists()


def test_one_process_at_a_time_keeps_a_teachers_answers(tmp_path):
    path, header = tmp_path / "d.jsonl.partial", {"format": 3}
    with Journal(path, header, Acceptance()).open():
        with pytest.raises(UserError, match=r"another process writes .*d\.jsonl\.partial; wait for it"):
            Journal(path, header, Acceptance()).open()
    with pytest.raises(UserError, match="answers of another teacher"):
        Journal(path, {"format": 4}, Acceptance()).open()
    Journal(path, header, Acceptance()).open().close()


def test_questions_with_the_same_words_and_answers_have_their_demonstrations_once(tmp_path):
    journal = Journal(tmp_path / "d.jsonl.partial", {"format": 4}, Acceptance())
    turns = ["<search> x </search>", "<answer> red </answer>"]
    asked = [Question(name, "?", ("red",)) for name in ("a", "b")] + [Question("c", "what?", ("red",))]
    for item in asked[1:]:
        row = {"question": key_of(item), "attempt": 0, "rejected": None, "turns": turns, "queries": []}
        journal._keep(row)
    assert [item.id for item in _demonstrations(asked, journal)] == ["a", "c"]


def played(*turns: str, shown: str = "b", gold: tuple[str, ...] = ("b",)) -> Trajectory:
    """An episode of these turns; each search shows the passage `shown`."""
    question = Question("q", "?", ("red",), metadata={"supporting_ids": list(gold)})
    hit = Hit(Passage(shown, "text"), 1.0)
    searches = [
        Search(parsed.content, (hit,), shown=1)
        for turn in turns
        if (parsed := parse_action(turn)) is not None and parsed.kind == "search"
    ]
    last = parse_action(turns[-1])
    answer = last.content if last is not None and last.kind == "answer" else None
    return Trajectory(
        question, [Segment("policy", (1,), turn, number) for number, turn in enumerate(turns)], searches,
        end="unanswered" if answer is None else "answered", answer=answer,
        valid_actions=sum(parse_action(turn) is not None for turn in turns),
    )  # fmt: skip


RED, LOOK = "<answer> red </answer>", "<search> flag </search>"


@pytest.mark.parametrize(
    ("episode", "acceptance", "reason"),
    [
        (played(LOOK, RED), Acceptance(), None),
        (played(LOOK, "<answer> blue </answer>"), Acceptance(), "a wrong answer"),
        (played(LOOK), Acceptance(), "no answer"),
        (played("hm", LOOK, RED), Acceptance(), "a turn without a search or an answer"),
        (played(LOOK, "<search>  FLAG </search>", RED), Acceptance(), "a repeated query"),
        (played(LOOK, RED, shown="a"), Acceptance(), None),
        (played(LOOK, RED, shown="a"), Acceptance(evidence=True), "gold passages not shown"),
        (played(LOOK, RED, gold=("a", "b")), Acceptance(evidence=True), "gold passages not shown"),
        (played(LOOK, RED, gold=()), Acceptance(evidence=True), "gold passages not shown"),
        (played(LOOK, RED), Acceptance(evidence=True), None),
        (played(LOOK, RED), Acceptance(min_reward=0.8), "a reward below 0.8"),
    ],
)
def test_an_episode_is_accepted_or_not_for_a_stated_reason(episode, acceptance, reason):
    assert acceptance.reason_against(episode, 0.7) == reason
