"""Runs and evaluations on a cassette: what is recorded, replayed, gone on with and left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kills import differences
from tests.training import Said, config, train, write_setting
from tests.two_retrievers import only_run, script, searched, settings, write_place

from srl.config import Config
from srl.train import search as searching
from srl.train.eval_run import evaluate_model
from srl.train.loop import Loop
from srl.train.model_settings import settings_of
from srl.train.run import resume
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrievers")
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


def on_cassette(towns: Path, mode: str, cassette: Path, **given: object) -> Config:
    given = {"rollout__deterministic": True, "trainer__test_freq": 2, **given}
    return config(towns, "grpo", [f"search.cassette={mode} {cassette}"], **given)


@pytest.fixture(scope="module")
def recorded(towns):
    """A run of two steps and its cassette."""
    cassette = towns / "recorded" / "run.cassette"
    train(on_cassette(towns, "record", cassette), towns / "recorded")
    return only_run(towns / "recorded"), cassette


def test_a_recorded_run_is_replayed_bit_for_bit_without_an_index(towns, recorded, tmp_path, monkeypatch):
    run, cassette = recorded
    monkeypatch.setattr(searching, "open_index", None)
    train(on_cassette(towns, "replay", cassette, data__corpus=None), tmp_path)
    assert len(searched(run)) > 1
    assert differences(only_run(tmp_path), run) == []
    assert not list((tmp_path / "indexes").glob("*"))


def test_a_resumed_run_goes_on_with_its_cassette(towns, tmp_path, monkeypatch):
    cassette, real, left = tmp_path / "run.cassette", Loop.score, [1]

    def score(runner, trajectories):
        if (trajectories[0].phase, trajectories[0].step) == ("train", 2) and left:
            left.pop()
            raise KeyboardInterrupt
        return real(runner, trajectories)

    monkeypatch.setattr(Loop, "score", score)
    with pytest.raises(KeyboardInterrupt):
        train(on_cassette(towns, "record", cassette), tmp_path / "recorded")
    recorded = only_run(tmp_path / "recorded")
    resume(recorded, workspace=Workspace(tmp_path / "recorded"), terminal=Said())
    train(on_cassette(towns, "replay", cassette), tmp_path / "replayed")
    assert differences(only_run(tmp_path / "replayed"), recorded) == []


def test_an_evaluation_has_its_own_cassette_not_that_of_the_models_run(place, tmp_path, scripted):
    train(settings(place, f"search.cassette=record {tmp_path / 'run.cassette'}"), tmp_path)
    model = only_run(tmp_path) / "checkpoints" / "step-000001"
    before = (tmp_path / "run.cassette").read_bytes()
    plain = settings_of(model, None, None, {}, [])
    assert plain.search.cassette is None
    files, workspace, cassette = (
        [str(place / "train.parquet")],
        Workspace(tmp_path),
        tmp_path / "eval.cassette",
    )
    figures = [
        evaluate_model(settings_of(model, None, None, {}, sets), files, workspace).settings["search"].metrics
        for sets in ([], [f"search.cassette=record {cassette}"], [f"search.cassette=replay {cassette}"])
    ]
    assert figures[0] == figures[1] == figures[2]
    assert (tmp_path / "run.cassette").read_bytes() == before
