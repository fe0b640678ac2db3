"""Evaluations as runs: their log, resuming, what is taken from an earlier one, and what makes a new one."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import TableSearch
from tests.tiny_models import byte_level_tokenizer, tiny_model

import srl.store
from srl.answers import exact_match
from srl.cli import main
from srl.data.corpus import write_corpus
from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.evaluate import wilson_interval
from srl.files import locked
from srl.index import build_index
from srl.model import save_model
from srl.protocol import template
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, EngineFault, Sampling, ScriptedEngine
from srl.rollout.environment import Environment
from srl.rollout.episode import EpisodeOptions
from srl.store import LogWriter, RunInfo, read_records, rows
from srl.train.evaluate_model import ModelReport, evaluate_model, settings_of
from srl.train.evaluation import generate as generating
from srl.train.evaluation.generate import RunningEm, generate
from srl.trajectory import Passage, Question, SearchTool, Trajectory
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")

TOWNS = [f"town{number}" for number in range(12)]
SMALL = [
    "data.max_prompt_length=512", "data.max_response_length=256", "rollout.max_turns=1",
    "rollout.max_turn_tokens=64", "rollout.min_answer_tokens=4", "rollout.max_obs_length=64",
    "rollout.max_num_seqs=1", "trainer.threads=1",
]  # fmt: skip


def question(town: str, builder: str = "Ada Brix", text: str = "Who built {}?") -> Question:
    asked = text.format(town)
    return Question(
        f"towers/test/{town}", asked, (builder,), "towers", "test", template("search-r1").messages(asked),
        {"hops": 1 + int(town[4:]) % 2},
    )  # fmt: skip


QUESTIONS = [question(town) for town in TOWNS]


class Says(ScriptedEngine):
    """Searches, then answers: right for every third town. It counts its episodes, and fails as told."""

    def __init__(self, codec: Codec, fails: dict[str, Exception] | None = None) -> None:
        super().__init__(codec, lambda request, turn: "")
        self.asked: list[str] = []
        self.fails = fails or {}

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        town = request_id.split("/")[4]
        if town in self.fails:
            raise self.fails[town]
        if "Doc 1(Title" in self.codec.decode(token_ids):
            said = f"<answer>{'Ada Brix' if int(town[4:]) % 3 == 0 else town}</answer>"
        else:
            self.asked.append(town)
            said = f"<search>{town}</search>"
        ids = tuple(self.codec.encode_text(said))
        return Completion(ids, (0.0,) * len(ids), "stop")


class Place:
    """A folder with a model, a corpus, its index and questions; `engine` is what the evaluations ran on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.fails = folder, dict[str, Exception]()
        self.engine: Says | None = None
        self.notes: list[str] = []
        self.save_model(seed=0)
        self.ask(QUESTIONS)
        self.index("built by Ada Brix")
        monkeypatch.setattr("srl.train.load_components.load_engine", self._load)

    def _load(self, config: Any, policy: Any, note: Any) -> Says:
        self.engine = Says(policy.codec, self.fails)
        return self.engine

    def save_model(self, seed: int) -> None:
        save_model(tiny_model(max_length=1024, seed=seed), byte_level_tokenizer(), self.folder / f"m{seed}")
        (self.folder / "model").unlink(missing_ok=True)
        (self.folder / "model").symlink_to(self.folder / f"m{seed}")

    def ask(self, questions: Sequence[Question]) -> None:
        write_questions(self.folder / "test.parquet", questions)

    def index(self, text: str) -> None:
        passages = [Passage(town, f'"{town}"\n{town} was {text}.') for town in TOWNS]
        corpus = self.folder / f"{text}.jsonl"
        write_corpus(corpus, passages)
        build_index(corpus, self.folder / f"{text} index", "bm25", {})
        (self.folder / "index").unlink(missing_ok=True)
        (self.folder / "index").symlink_to(self.folder / f"{text} index")

    def evaluate(self, *sets: str, **options: Any) -> ModelReport:
        config = settings_of(
            self.folder / "model", None, None, {"search.index": self.folder / "index"}, [*SMALL, *sets]
        )
        self.notes = []
        files = [str(self.folder / "test.parquet")]
        return evaluate_model(config, files, Workspace.resolve(), note=self.notes.append, **options)

    @property
    def asked(self) -> list[str]:
        assert self.engine is not None
        return sorted(self.engine.asked)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(generating, "PAUSE_S", 0.0)
    return Place(tmp_path, monkeypatch)


def logged(run: Path) -> list[Trajectory]:
    """Every trajectory in the run's log, by question and sample."""
    with srl.store.open(run) as log:
        found = [record.trajectory for record in read_records(log)]
    return sorted(found, key=lambda item: (item.question.id, item.sample))


def test_an_evaluation_is_a_run_whose_log_holds_every_answer(place: Place) -> None:
    found = place.evaluate().settings["search"]
    [run] = Workspace.resolve().all_runs()
    assert found.run == run
    assert run.name.split("-")[1:3] == ["defaults", "eval"]
    files = {"config.yaml", "run.json", "evaluation.json", "coverage.parquet", "log"}
    assert {item.name for item in run.iterdir()} == files
    trajectories = logged(run)
    assert [item.question for item in trajectories] == sorted(QUESTIONS, key=lambda item: item.id)
    assert {(item.phase, item.step) for item in trajectories} == {("eval", 0)}
    assert [item.answer for item in trajectories if item.question.id.endswith("town3")] == ["Ada Brix"]
    assert (found.metrics["eval/em"], found.generated) == (pytest.approx(1 / 3), 12)
    with srl.store.open(run) as log:
        assert log.execute(
            "SELECT status, algo, trajectories FROM runs JOIN steps USING (run_id)"
        ).fetchall() == [("finished", "eval", 12)]


def test_the_same_evaluation_again_generates_nothing(place: Place) -> None:
    first = place.evaluate()
    again = place.evaluate()
    assert place.asked == []
    assert (again.settings["search"].run, again.settings["search"].generated) == (
        first.settings["search"].run,
        0,
    )
    assert again.settings["search"].metrics == first.settings["search"].metrics
    assert any("12 of 12 episodes are in its log" in note for note in place.notes)


def test_fresh_generates_everything_anew_in_another_run(place: Place) -> None:
    first, fresh = place.evaluate().settings["search"], place.evaluate(fresh=True).settings["search"]
    assert len(place.asked) == 12
    assert fresh.run != first.run
    assert place.evaluate().settings["search"].run == fresh.run


def test_more_questions_and_samples_add_to_the_log(place: Place) -> None:
    few = place.evaluate("eval.temperature=1", limit=5).settings["search"]
    assert len(place.asked) == 5
    all_of_them = place.evaluate("eval.temperature=1").settings["search"]
    assert len(place.asked) == 7
    assert all_of_them.run == few.run
    twice = place.evaluate("eval.temperature=1", n=2).settings["search"]
    assert place.asked == sorted(TOWNS)
    assert twice.run == few.run
    trajectories = logged(few.run)
    assert len({item.id for item in trajectories}) == len(trajectories) == 24
    assert place.evaluate("eval.temperature=1", limit=5).settings["search"].metrics == few.metrics


def test_an_evaluation_that_was_stopped_goes_on_where_it_was(place: Place, tmp_path: Path) -> None:
    place.fails["town7"] = UserError("the machine is gone")
    with pytest.raises(UserError, match="the machine is gone"):
        place.evaluate()
    [run] = Workspace.resolve().all_runs()
    before = {item.question.id for item in logged(run)}
    assert before
    place.fails.clear()
    found = place.evaluate().settings["search"]
    assert {f"towers/test/{town}" for town in place.asked} == {item.id for item in QUESTIONS} - before
    assert found.run == run
    never_stopped = place.evaluate(fresh=True).settings["search"]
    assert [item for item in found.metrics.items() if "timing_s" not in item[0]] == [
        item for item in never_stopped.metrics.items() if "timing_s" not in item[0]
    ]
    assert [replace_times(item) for item in logged(run)] == [
        replace_times(item) for item in logged(never_stopped.run)
    ]


def replace_times(trajectory: Trajectory) -> Trajectory:
    """The trajectory without how long its searches took."""
    searches = [replace(search, latency_s=0.0) for search in trajectory.searches]
    return replace(trajectory, searches=searches)


def test_what_a_fault_ended_is_asked_again(place: Place) -> None:
    place.fails["town3"] = EngineFault("out of memory")
    lost = place.evaluate().settings["search"]
    assert lost.metrics["eval/failed_share"] == pytest.approx(1 / 12)
    place.fails.clear()
    mended = place.evaluate().settings["search"]
    assert (mended.run, mended.generated, place.asked) == (lost.run, 1, ["town3"])
    assert mended.metrics["eval/failed_share"] == 0
    assert len(logged(lost.run)) == 12
    with srl.store.open(lost.run) as log:
        assert log.execute("SELECT trajectories FROM steps").fetchall() == [(12,)]


CHANGES: dict[str, tuple[Callable[[Place], None], str]] = {
    "model": (lambda place: place.save_model(seed=1), r"the model .*model has changed since {}"),
    "index": (lambda place: place.index("built by someone"), r"the index .*index has changed since {}"),
    "text": (
        lambda place: place.ask([question(TOWNS[0], text="Who planned {}?"), *QUESTIONS[1:]]),
        r"1 questions have changed since {}, the first is towers/test/town0",
    ),
    "answers": (
        lambda place: place.ask([*QUESTIONS[:-1], question(TOWNS[-1], "Ivo Stell")]),
        r"1 questions have changed since {}, the first is towers/test/town11",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_under_an_evaluation_is_said_and_starts_a_new_one(place: Place, name: str) -> None:
    before = place.evaluate().settings["search"].run
    change, told = CHANGES[name]
    change(place)
    after = place.evaluate().settings["search"]
    assert (after.run != before, after.generated) == (True, 12)
    pattern = told.format(before.name) + ": a new evaluation starts"
    [note] = [note for note in place.notes if "new evaluation" in note]
    assert re.search(pattern, note)
    assert place.evaluate().settings["search"].generated == 0


@pytest.mark.parametrize(
    "setting",
    ["rollout.max_turns=2", "data.template=tiny", "eval.temperature=1", "trainer.seed=3", "search.topk=1"],
)
def test_other_settings_are_another_evaluation(place: Place, setting: str) -> None:
    before = place.evaluate().settings["search"].run
    found = place.evaluate(setting).settings["search"]
    assert (found.run != before, found.generated) == (True, 12)
    assert not any("changed" in note for note in place.notes)


def test_two_evaluations_of_the_same_at_once_are_refused(place: Place) -> None:
    run = place.evaluate(limit=3).settings["search"].run
    with locked(run, "taken"), pytest.raises(UserError, match=f"another process evaluates in {run.name}"):
        place.evaluate()
    assert place.evaluate().settings["search"].generated == 9


def test_what_is_no_evaluation_is_left_as_it_is_and_a_newer_one_is_left_out(place: Place) -> None:
    workspace = Workspace.resolve()
    foreign, newer = workspace.new_run("tiny", "eval", 0), workspace.new_run("tiny", "eval", 0)
    (foreign / "thesis.txt").write_text("mine", encoding="utf-8")
    (newer / "evaluation.json").write_text('{"format": 2}', encoding="utf-8")
    found = place.evaluate(limit=2).settings["search"]
    assert workspace.all_runs() == [foreign, newer, found.run]
    assert (foreign / "thesis.txt").read_text(encoding="utf-8") == "mine"
    [note] = [note for note in place.notes if note.startswith("warning")]
    assert f"{newer.name} is left out" in note
    assert "format 2" in note


def test_a_workspace_that_cannot_be_written_is_one_line(place: Place, workspace: Path) -> None:
    workspace.mkdir()
    (workspace / "runs").write_text("", encoding="utf-8")
    with pytest.raises((UserError, OSError), match=r"runs"):
        place.evaluate()


def test_each_setting_is_a_run(place: Place) -> None:
    found = place.evaluate(no_search_too=True)
    runs = [item.run for item in found.settings.values()]
    assert runs == Workspace.resolve().all_runs()
    assert [json.loads((run / "evaluation.json").read_text())["setting"] for run in runs] == [
        "search",
        "no_search",
    ]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda row: row | {"golden_answers": []}, "answer"),
        (lambda row: row | {"id": "other"}, "id"),
    ],
)
def test_rows_without_an_answer_and_ids_that_repeat_are_refused(
    place: Place,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], dict[str, Any]],
    complaint: str,
) -> None:
    row = {"id": "other", "question": "Who?", "golden_answers": ["me"]}
    lines = [row, change({"id": "one", "question": "Who?", "golden_answers": ["me"]})]
    data = place.folder / "test.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    sets = [part for text in SMALL for part in ("--set", text)]
    code = main(
        [
            "eval",
            "run",
            str(place.folder / "model"),
            "--data",
            str(data),
            "--index",
            str(place.folder / "index"),
            *sets,
        ]
    )
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    [line] = [line for line in said.err.splitlines() if line.startswith("srl:")]
    assert "test.jsonl" in line
    assert complaint in line
    assert Workspace.resolve().all_runs() == []


def environment(codec: Codec, search: SearchTool | None = None) -> Environment:
    return Environment(codec, template("search-r1"), EpisodeOptions(), search)


def test_at_most_as_many_episodes_as_said_are_in_memory(tmp_path: Path) -> None:
    """Those that run and those that wait to be written, while writing takes longer than generating."""
    codec, began, written, most = Codec(byte_level_tokenizer()), 0, 0, 0

    class Counted(Says):
        async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
            nonlocal began, most
            began += 1
            most = max(most, began - written)
            ids = tuple(self.codec.encode_text("<answer>x</answer>"))
            return Completion(ids, (0.0,) * len(ids), "stop")

    def count(batch: Sequence[Trajectory]) -> None:
        nonlocal written
        written += len(batch)

    wanted = [(replace(QUESTIONS[0], id=f"towers/test/town{number}"), 0) for number in range(60)]
    with LogWriter(tmp_path / "log", RunInfo("run"), adds=True) as log:
        asyncio.run(
            generate(
                wanted, Counted(codec), environment(codec), log, at_once=4, on_written=count,
            )
        )  # fmt: skip
    assert written == 60
    assert most <= 3 * 4


def test_an_episode_that_cannot_be_written_ends_it_with_everything_closed(tmp_path: Path) -> None:
    codec, closed = Codec(byte_level_tokenizer()), list[str]()

    class Closes(TableSearch):
        async def aclose(self) -> None:
            closed.append("search")

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with LogWriter(tmp_path / "log", RunInfo("run"), adds=True) as log:
        log.write = full  # type: ignore[method-assign,assignment]
        before = threading.active_count()
        with pytest.raises(OSError, match="No space left"):
            asyncio.run(
                generate(
                    [(QUESTIONS[0], 0)], Says(codec), environment(codec, Closes()), log, at_once=4,
                )
            )  # fmt: skip
        assert threading.active_count() == before
    assert closed == ["search"]


def test_episodes_that_ended_before_an_error_are_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "PAUSE_S", 60.0)
    codec, first, last = Codec(byte_level_tokenizer()), QUESTIONS[:5], QUESTIONS[5]

    class Broken(Says):
        async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
            if last.id in request_id:
                while len(self.asked) < len(first):
                    await asyncio.sleep(0)
                raise RuntimeError("the engine is broken")
            self.asked.append(request_id)
            ids = tuple(self.codec.encode_text("<answer>x</answer>"))
            return Completion(ids, (0.0,) * len(ids), "stop")

    with (
        pytest.raises(RuntimeError, match="the engine is broken"),
        LogWriter(tmp_path / "log", RunInfo("run"), adds=True) as log,
    ):
        asyncio.run(
            generate(
                [(item, 0) for item in (*first, last)], Broken(codec), environment(codec), log, at_once=6,
            )
        )  # fmt: skip
    assert {item.question.id for item in logged(tmp_path / "log")} == {item.id for item in first}


def test_progress_shows_the_exact_match_so_far_with_its_interval() -> None:
    shown: list[tuple[int, str]] = []
    running = RunningEm(lambda done, so_far="": shown.append((done, so_far)), [("a", 1.0), ("b", 0.0)])
    right = Trajectory(QUESTIONS[0], answer="Ada Brix", end="answered", phase="eval")
    assert exact_match(right.answer, right.question.golden_answers) == 1
    running([right, replace(right, question=QUESTIONS[1], answer=None, end="failed")])
    low, high = wilson_interval(0.5, 4)
    assert shown[0][0] == 2
    assert shown[1] == (4, f"EM 0.500 ({low:.3f} to {high:.3f})")


def test_the_last_run_of_the_training_commands_is_no_evaluation(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Workspace.resolve().new_run("tiny", "grpo", 0)
    evaluation = place.evaluate(limit=2).settings["search"].run
    workspace = Workspace.resolve()
    assert workspace.find_run() == evaluation
    assert workspace.find_run(trained=True) == trained
    assert main(["train", "--resume"]) == 2
    assert trained.name in capsys.readouterr().err
    assert main(["train", "--resume", "--run", evaluation.name]) == 2
    assert main(["train", "--resume", "--run", str(evaluation)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert f"{evaluation.name} is an evaluation" in said[-1]


def test_runs_and_trajectories_of_an_evaluation_are_listed(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place.evaluate().settings["search"].run
    assert main(["inspect", "runs", "--json"]) == 0
    [row] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["run_id"], row["status"], row["algo"], row["setting"]) == (
        run.name,
        "finished",
        "eval",
        "search",
    )
    assert row["eval_em"] == pytest.approx(1 / 3)
    assert main(["inspect", "trajectories", "--json", "--em", "1"]) == 0
    found = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [item["answer"] for item in found] == ["Ada Brix"] * 4
    assert main(["inspect", "show", found[0]["id"]]) == 0
    assert "<answer>Ada Brix</answer>" in capsys.readouterr().out


def test_a_log_adds_to_a_step_of_an_earlier_writer_only_if_it_says_so(tmp_path: Path) -> None:
    trajectories = [Trajectory(item, phase="eval", end="answered", answer="x") for item in QUESTIONS[:3]]
    kept = []
    for adds in (True, False):
        for trajectory in trajectories:
            with LogWriter(tmp_path / str(adds), RunInfo("run"), adds=adds) as log:
                log.write(0, "eval", [srl.store.Record(trajectory)], {})
        with srl.store.open(tmp_path / str(adds)) as log:
            kept.append(len(rows(log, "FROM trajectories")))
    assert kept == [3, 1]


def test_dropped_trajectories_are_in_no_table(tmp_path: Path) -> None:
    trajectories = [Trajectory(item, phase="eval", end="answered", answer="x") for item in QUESTIONS[:6]]
    with LogWriter(tmp_path / "log", RunInfo("run"), adds=True) as log:
        for start in (0, 3):
            log.write(0, "eval", [srl.store.Record(item) for item in trajectories[start : start + 3]], {})
        log.drop_trajectories({trajectories[1].id, trajectories[5].id})
    with srl.store.open(tmp_path) as log:
        kept = {row["id"] for row in rows(log, "SELECT id FROM trajectories")}
        assert kept == {trajectories[place].id for place in (0, 2, 3, 4)}
        assert log.execute("SELECT trajectories FROM steps").fetchall() == [(4,)]
