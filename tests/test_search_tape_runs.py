"""Runs and evaluations on a tape: what is recorded, replayed, gone on with and left alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from bench.resume import differences
from tests.training import Said, config, train, write_setting
from tests.two_engines import only_run, script, searched, settings, write_place

from srl.config import Config
from srl.errors import UserError
from srl.reward import RewardMix
from srl.serve.cassette import Recorder, Replay
from srl.serve.tape import read_tape
from srl.train import cold_start
from srl.train import search as searching
from srl.train.evaluate_model import evaluate_model, settings_of
from srl.train.run import resume
from srl.train.search import load_search, new_tape
from srl.train.verl import launch
from srl.train.verl.config_check import refused
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    write_place(folder)
    return folder


@pytest.fixture
def scripted(monkeypatch):
    script(monkeypatch)


@pytest.fixture(scope="module")
def towns(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    return folder


def loaded(config: Config, workspace: Path) -> object:
    return load_search(config, Workspace(workspace), lambda text: None)


def on_tape(towns: Path, mode: str, tape: Path, **given: object) -> Config:
    given = {"rollout__deterministic": True, "trainer__test_freq": 2, **given}
    return config(towns, "grpo", [f"search.cassette={mode} {tape}"], **given)


@pytest.fixture(scope="module")
def recorded(towns):
    """A run of two steps and its tape."""
    tape = towns / "recorded" / "run.tape"
    train(on_tape(towns, "record", tape), towns / "recorded")
    return only_run(towns / "recorded"), tape


def test_a_recorded_run_is_replayed_bit_for_bit_without_an_index(towns, recorded, tmp_path, monkeypatch):
    run, tape = recorded
    monkeypatch.setattr(searching, "open_index", None)
    train(on_tape(towns, "replay", tape, data__corpus=None), tmp_path)
    assert len(searched(run)) > 1
    assert differences(only_run(tmp_path), run) == []
    assert not list((tmp_path / "indexes").glob("*"))


def test_a_run_on_tape_is_the_run_without_one(towns, recorded, tmp_path):
    train(config(towns, "grpo", rollout__deterministic=True, trainer__test_freq=2), tmp_path)
    assert differences(only_run(tmp_path), recorded[0]) == []


def test_a_resumed_run_goes_on_with_its_tape(towns, tmp_path, monkeypatch):
    tape, real, left = tmp_path / "run.tape", RewardMix.score, [1]

    async def score(mix, trajectories):
        if (trajectories[0].phase, trajectories[0].step) == ("train", 2) and left:
            left.pop()
            raise KeyboardInterrupt
        return await real(mix, trajectories)

    monkeypatch.setattr(RewardMix, "score", score)
    with pytest.raises(KeyboardInterrupt):
        train(on_tape(towns, "record", tape), tmp_path / "recorded")
    recorded = only_run(tmp_path / "recorded")
    resume(recorded, workspace=Workspace(tmp_path / "recorded"), terminal=Said())
    train(on_tape(towns, "replay", tape), tmp_path / "replayed")
    assert differences(only_run(tmp_path / "replayed"), recorded) == []


def test_a_query_that_is_not_on_the_tape_ends_the_run_in_one_line(towns, recorded, tmp_path):
    other = on_tape(towns, "replay", recorded[1], trainer__seed=5, rollout__temperature=5.0)
    with pytest.raises(UserError, match="has no answer to") as caught:
        train(other, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_new_run_leaves_a_tape_that_is_there_alone(towns, tmp_path):
    tape = tmp_path / "run.tape"
    tape.write_text("mine")
    with pytest.raises(UserError, match="is there already; name another file"):
        train(on_tape(towns, "record", tape), tmp_path / "recorded")
    assert tape.read_text() == "mine"


def test_a_run_that_cannot_start_leaves_no_tape(towns, tmp_path):
    tape = tmp_path / "run.tape"
    with pytest.raises(UserError, match="this model reads"):
        train(on_tape(towns, "record", tape, data__max_prompt_length=4096), tmp_path / "recorded")
    assert not tape.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        train(on_tape(towns, "record", tmp_path / "file" / "run.tape"), tmp_path / "recorded")


def test_a_run_on_verl_that_would_record_starts_nothing(towns, tmp_path):
    tape, workspace = tmp_path / "run.tape", Workspace(tmp_path / "ws")
    with pytest.raises(UserError, match="record with --backend local and replay the tape here"):
        launch.start(
            on_tape(towns, "record", tape), preset="test", algo="grpo", workspace=workspace, terminal=Said()
        )
    assert list(tmp_path.iterdir()) == []
    assert list(refused(on_tape(towns, "replay", tape))) == []


def test_processes_of_one_run_replay_one_tape(recorded, towns):
    """On verl the launcher and every worker open the tape: each is answered as if it were alone."""
    _, tape = recorded
    here = load_search(on_tape(towns, "replay", tape), Workspace(towns), print)
    query = next(entry.search.query for entry in read_tape(tape).entries)
    code = (
        "import asyncio, sys; from srl.serve.cassette import Replay; "
        "found = asyncio.run(Replay(sys.argv[1], topk=1).search(sys.argv[2])); "
        "print([hit.passage.id for hit in found.hits])"
    )
    there = subprocess.run(
        [sys.executable, "-c", code, tape, query], capture_output=True, text=True, check=True
    ).stdout
    assert there.strip() == str([hit.passage.id for hit in asyncio.run(here.search(query)).hits])


def test_a_tape_is_of_all_engines(place, tmp_path, scripted):
    tape = tmp_path / "run.tape"
    with new_tape(settings(place, f"search.cassette=record {tape}")):
        recorder = loaded(settings(place, f"search.cassette=record {tape}"), tmp_path)
    assert isinstance(recorder, Recorder)
    train(settings(place, f"search.cassette=record {tmp_path / 'other.tape'}"), tmp_path / "recorded")
    gone = [f"search.cassette=replay {tmp_path / 'other.tape'}", "search.engines.papers.index=gone"]
    replay = loaded(settings(place, *gone, search__index="gone"), tmp_path)
    assert isinstance(replay, Replay)
    assert tuple(replay.engines) == ("papers",)
    train(settings(place, *gone, search__index="gone"), tmp_path / "replayed")
    assert searched(only_run(tmp_path / "replayed")) == searched(only_run(tmp_path / "recorded"))


def test_an_evaluation_has_its_own_tape_not_that_of_the_models_run(place, tmp_path, scripted):
    train(settings(place, f"search.cassette=record {tmp_path / 'run.tape'}"), tmp_path)
    model = only_run(tmp_path) / "checkpoints" / "step-000001"
    before = (tmp_path / "run.tape").read_bytes()
    plain = settings_of(model, None, None, {}, [])
    assert plain.search.cassette is None
    files, workspace, tape = [str(place / "train.parquet")], Workspace(tmp_path), tmp_path / "eval.tape"
    figures = [
        evaluate_model(settings_of(model, None, None, {}, sets), files, workspace).settings["search"].metrics
        for sets in ([], [f"search.cassette=record {tape}"], [f"search.cassette=replay {tape}"])
    ]
    assert figures[0] == figures[1] == figures[2]
    assert (tmp_path / "run.tape").read_bytes() == before


def test_the_cold_start_that_runs_share_is_on_the_tape_of_none(towns, tmp_path, monkeypatch):
    seen = []

    def look(config, *rest):
        seen.append(config.search.cassette)
        raise UserError("enough")

    monkeypatch.setattr(cold_start, "load_search", look)
    (tmp_path / "demos.jsonl").write_text("")
    tape = tmp_path / "run.tape"
    taped = on_tape(towns, "record", tape, sft__train_files=str(tmp_path / "demos.jsonl"))
    with pytest.raises(UserError, match="enough"):
        cold_start.cold_started(taped, Workspace(tmp_path), lambda text: None)
    assert seen == [None]
    assert not tape.exists()
