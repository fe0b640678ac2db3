"""Paths in a saved configuration are absolute, so that a run goes on from anywhere."""

from pathlib import Path

import pytest

from srl.config import Config, load_config, load_saved, save_config
from srl.workspace import Workspace

RUN = "20261122T000000Z-tiny-ppo-s0-0001"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a workspace and files beside it, and where one stands."""
    for folder in ("srl-workspace/models/cold", f"srl-workspace/runs/{RUN}", "my index", "encoder", "named"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("srl-workspace/worlds/train.parquet", "mine.parquet", "mine.txt", "api.yaml", "tiny"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("name: x\nurl: http://127.0.0.1/?q={query}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(**settings: object) -> Config:
    return load_config(flags={name.replace("__", "."): value for name, value in settings.items()}).config


def run_of(workspace: Path) -> Path:
    return workspace / "runs" / RUN


def test_saved_paths_are_absolute(here, monkeypatch):
    config = configured(
        model__path="srl-workspace/models/cold",
        data__train_files=["srl-workspace/worlds/train.parquet", "mine.parquet"],
        data__template="mine.txt",
        search__index="my index",
    )
    save_config(run_of(here / "srl-workspace"), config)
    monkeypatch.chdir("/")
    saved, workspace = load_saved(run_of(here / "srl-workspace")), here / "srl-workspace"
    assert saved.model.path == str(workspace / "models" / "cold")
    assert saved.data.train_files == (str(workspace / "worlds" / "train.parquet"), str(here / "mine.parquet"))
    assert (saved.data.template, saved.search.index) == (str(here / "mine.txt"), str(here / "my index"))


def test_a_cassette_and_the_options_of_retrievers_have_absolute_paths(here, monkeypatch):
    config = configured(
        search__cassette="record cassettes/run.jsonl",
        retriever__e5={"model": "encoder", "index": "Flat"},
        retriever__hybrid={"retrievers": {"bm25": {}, "e5": {"model": "encoder"}}},
        retriever__rerank={"model": "encoder", "retrievers": {"e5": {"model": "encoder"}}},
        search__retrievers={
            "web": {"retriever": "web", "options": {"provider": "brave", "cache": "l.sqlite"}}
        },
    )
    save_config(run_of(here / "srl-workspace"), config)
    monkeypatch.chdir("/")
    saved, encoder = load_saved(run_of(here / "srl-workspace")), str(here / "encoder")
    assert saved.search.cassette == f"record {here}/cassettes/run.jsonl"
    assert saved.retriever.options("e5")["model"] == encoder
    assert saved.retriever.options("hybrid")["retrievers"]["e5"]["model"] == encoder
    assert saved.retriever.options("rerank")["model"] == encoder
    assert saved.retriever.options("rerank")["retrievers"]["e5"]["model"] == encoder
    assert saved.search.retrievers["web"].options["cache"] == str(here / "l.sqlite")


def test_a_run_knows_its_workspace_wherever_one_stands(here, monkeypatch):
    run = run_of(here / "srl-workspace")
    assert Workspace.around(run / "checkpoints" / "step-000001") == Workspace(here / "srl-workspace")
    assert Workspace.around(here / "encoder") is None
    monkeypatch.chdir(run)
    assert Workspace.around(Path()) == Workspace(here / "srl-workspace")
