"""Runs and evaluations on a cassette: what is recorded, replayed, gone on with and left alone."""

from pathlib import Path

import pytest
from tests.kills import differences
from tests.training import Said, config, only_run, setting, stop_at, train
from tests.two_retrievers import place, scripted, searched, settings

from srl.config import Config
from srl.errors import UserError
from srl.train import search as searching
from srl.train.eval_run import evaluate_model
from srl.train.loop import Loop
from srl.train.model_settings import settings_of
from srl.train.run import resume
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")
__all__ = ["place", "scripted", "setting"]


def on_cassette(setting: Path, mode: str, cassette: Path, **given: object) -> Config:
    given = {"rollout__deterministic": True, "trainer__test_freq": 2, **given}
    return config(setting, "grpo", [f"search.cassette={mode} {cassette}"], **given)


@pytest.fixture(scope="module")
def recorded(setting):
    """A run of two steps and its cassette."""
    cassette = setting / "recorded" / "run.cassette"
    train(on_cassette(setting, "record", cassette), setting / "recorded")
    return only_run(setting / "recorded"), cassette


def test_a_recorded_run_is_replayed_bit_for_bit_without_an_index(setting, recorded, tmp_path, monkeypatch):
    run, cassette = recorded
    monkeypatch.setattr(searching, "open_index", None)
    train(on_cassette(setting, "replay", cassette, data__corpus=None), tmp_path)
    assert len(searched(run)) > 1
    assert differences(only_run(tmp_path), run) == []
    assert not list((tmp_path / "indexes").glob("*"))


def test_a_resumed_run_goes_on_with_its_cassette(setting, tmp_path, monkeypatch):
    cassette = tmp_path / "run.cassette"
    monkeypatch.setattr(Loop, "score", stop_at(2))
    with pytest.raises(KeyboardInterrupt):
        train(on_cassette(setting, "record", cassette), tmp_path / "recorded")
    recorded = only_run(tmp_path / "recorded")
    resume(recorded, workspace=Workspace(tmp_path / "recorded"), terminal=Said())
    train(on_cassette(setting, "replay", cassette), tmp_path / "replayed")
    assert differences(only_run(tmp_path / "replayed"), recorded) == []


def test_an_evaluation_has_its_own_cassette_not_that_of_the_models_run(place, tmp_path, scripted):
    train(settings(place, f"search.cassette=record {tmp_path / 'run.cassette'}"), tmp_path)
    model = only_run(tmp_path) / "checkpoints" / "step-000001"
    before = (tmp_path / "run.cassette").read_bytes()
    replays = settings(place, f"search.cassette=replay {tmp_path / 'run.cassette'}")
    with pytest.raises(UserError) as refused:
        searching.load_search(
            replays.with_settings({"search.retrievers": {}}), Workspace(tmp_path), lambda text: None
        )
    assert refused.value.key == "search.retrievers"
    plain = settings_of(model, None, None, {}, [])
    assert plain.search.cassette is None
    files, workspace = [str(place / "train.parquet")], Workspace(tmp_path)
    cassette = tmp_path / "eval.cassette"
    figures = [
        evaluate_model(settings_of(model, None, None, {}, sets), files, workspace).settings["search"].metrics
        for sets in ([], [f"search.cassette=record {cassette}"], [f"search.cassette=replay {cassette}"])
    ]
    assert figures[0] == figures[1] == figures[2]
    assert (tmp_path / "run.cassette").read_bytes() == before
