"""Evaluations as runs: their log, going on by name, shards, and what is refused."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.store_builder import log_records, log_rows
from tests.tiny_models import byte_level_tokenizer, tiny_model

from srl.cli import main
from srl.data.parquet import write_questions
from srl.errors import UserError
from srl.index import build_index
from srl.models.weights import save_model
from srl.protocol import template
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, EngineFault, Sampling, ScriptedEngine
from srl.train import eval_run as evaluations
from srl.train.eval_run import Evaluation, ModelReport, evaluate_model
from srl.train.model_settings import settings_of
from srl.trajectory import Passage, Question, Trajectory
from srl.workspace import EVALUATION, Workspace

pytest.importorskip("srl_bm25")

TOWNS = [f"town{number}" for number in range(12)]
SMALL = [
    "data.max_prompt_length=512", "data.max_response_length=256", "rollout.max_turns=1",
    "rollout.max_turn_tokens=64", "rollout.max_obs_length=64",
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
        build_index(passages, self.folder / f"{text} index")
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
    monkeypatch.setattr(evaluations, "PAUSE_S", 0.0)
    return Place(tmp_path, monkeypatch)


def logged(run: Path) -> list[Trajectory]:
    """Every trajectory in the run's log, by question and sample."""
    found = [record.trajectory for record in log_records(run)]
    return sorted(found, key=lambda item: (item.question.id, item.sample))


def test_an_evaluation_is_a_run_whose_log_holds_every_answer(place: Place) -> None:
    found = place.evaluate().settings["search"]
    [run] = Workspace.resolve().all_runs()
    assert found.run == run
    assert run.name.split("-")[1:3] == ["defaults", "eval"]
    files = {"config.yaml", "run.json", "log"}
    assert {item.name for item in run.iterdir()} == files
    trajectories = logged(run)
    assert [item.question for item in trajectories] == sorted(QUESTIONS, key=lambda item: item.id)
    assert {(item.phase, item.step) for item in trajectories} == {("eval", 0)}
    assert [item.answer for item in trajectories if item.question.id.endswith("town3")] == ["Ada Brix"]
    assert (found.metrics["eval/em"], found.generated) == (pytest.approx(1 / 3), 12)
    assert log_rows(run, "SELECT status, algo, trajectories FROM runs JOIN steps USING (run_id)") == [
        ("finished", "eval", 12)
    ]


def test_an_evaluation_that_goes_on_generates_only_what_its_log_lacks(place: Place) -> None:
    few = place.evaluate("eval.temperature=1", limit=5).settings["search"]
    assert len(place.asked) == 5
    cost = ("rollout.max_num_seqs=3", "eval.max_failed=0.5")  # what may change
    rest = place.evaluate("eval.temperature=1", *cost, runs=[few.run]).settings["search"]
    assert (len(place.asked), rest.run) == (7, few.run)
    twice = place.evaluate("eval.temperature=1", n=2, runs=[few.run]).settings["search"]
    assert (place.asked, twice.run) == (sorted(TOWNS), few.run)
    trajectories = logged(few.run)
    assert len({item.id for item in trajectories}) == len(trajectories) == 24
    again = place.evaluate("eval.temperature=1", limit=5, runs=[few.run]).settings["search"]
    assert (again.metrics, again.generated, place.asked) == (few.metrics, 0, [])
    assert place.evaluate(limit=5).settings["search"].run != few.run


def test_shards_are_parts_of_one_evaluation(place: Place) -> None:
    whole = place.evaluate().settings["search"]
    parts = [place.evaluate(shard=(number, 3)).settings["search"] for number in (1, 2, 3)]
    assert [part.generated for part in parts] == [4, 4, 4]
    assert len({part.run for part in parts}) == 3
    together = place.evaluate(runs=[part.run for part in parts]).settings["search"]
    assert (together.generated, times_apart(together)) == (0, times_apart(whole))


def times_apart(evaluation: Evaluation) -> dict[str, float]:
    return {name: value for name, value in evaluation.metrics.items() if "timing_s" not in name}


def test_what_a_fault_ended_is_asked_again(place: Place) -> None:
    place.fails["town3"] = EngineFault("out of memory")
    lost = place.evaluate().settings["search"]
    assert lost.metrics["eval/failed_share"] == pytest.approx(1 / 12)
    place.fails.clear()
    mended = place.evaluate(runs=[lost.run]).settings["search"]
    assert (mended.run, mended.generated, place.asked) == (lost.run, 1, ["town3"])
    assert mended.metrics["eval/failed_share"] == 0
    assert len(logged(lost.run)) == 12
    assert log_rows(lost.run, "SELECT trajectories FROM steps") == [(12,)]


CHANGES: dict[str, Callable[[Place], object]] = {
    "search.index": lambda place: place.index("built by someone"),
    "data": lambda place: place.ask([*QUESTIONS[:-1], question(TOWNS[-1], "Ivo Stell")]),
}


@pytest.mark.parametrize("key", [*CHANGES, "rollout.max_turns=2", "data.template=tiny", "trainer.seed=3"])
def test_an_evaluation_goes_on_only_as_it_was(place: Place, key: str) -> None:
    run = place.evaluate().settings["search"].run
    if key in CHANGES:
        CHANGES[key](place)
    with pytest.raises(UserError) as caught:
        place.evaluate(*([] if key in CHANGES else [key]), runs=[run])
    assert caught.value.key == key.partition("=")[0]
    assert len(logged(run)) == 12


def test_each_setting_is_a_run_and_each_names_the_evaluation(place: Place) -> None:
    found = place.evaluate(baselines=["r1"], limit=5).settings
    runs = [item.run for item in found.values()]
    assert runs == Workspace.resolve().all_runs()
    for named in runs:
        more = place.evaluate(baselines=["r1"], limit=5, runs=[named]).settings
        assert [(item.run, item.generated) for item in more.values()] == [(run, 0) for run in runs]
    rag = place.evaluate(baselines=["rag"], limit=5, runs=runs[:1]).settings["rag"]
    assert rag.generated == 5
    assert place.evaluate(baselines=["rag"], limit=5, runs=[rag.run]).settings["search"].run == runs[0]


def test_the_last_run_of_the_training_commands_is_no_evaluation(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Workspace.resolve().new_run("tiny", "grpo", 0)
    evaluation = place.evaluate(limit=2).settings["search"].run
    workspace = Workspace.resolve()
    assert workspace.find_run() == evaluation
    assert workspace.find_run(besides=[EVALUATION]) == trained
    assert main(["train", "--resume"]) == 2
    assert trained.name in capsys.readouterr().err
    assert main(["train", "--resume", "--run", evaluation.name]) == 2
    assert main(["train", "--resume", "--run", str(evaluation)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert f"{evaluation.name} is an evaluation" in said[-1]
