"""A workspace names its runs so that they sort by start, and finds them by what a person types."""

import re
from pathlib import Path

import pytest

from srl.errors import UserError
from srl.workspace import EVALUATION, IMPORT, Workspace


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path / "ws")


def add_run(workspace: Workspace, name: str) -> Path:
    run = workspace.runs / name
    run.mkdir(parents=True)
    return run


def test_option_beats_environment_beats_default(monkeypatch, tmp_path):
    monkeypatch.delenv("SRL_WORKSPACE", raising=False)
    assert Workspace.resolve().root == Path("srl-workspace")
    monkeypatch.setenv("SRL_WORKSPACE", str(tmp_path))
    assert Workspace.resolve().root == tmp_path
    assert Workspace.resolve(tmp_path / "x").root == tmp_path / "x"


def test_new_run_is_a_directory_with_the_agreed_name(workspace):
    run = workspace.new_run("tiny", "grpo", 7)
    assert run.is_dir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-tiny-grpo-s7-[0-9a-f]{4}", run.name)


def test_last_is_the_latest_started_also_within_one_second(workspace):
    for number in range(20):
        run = workspace.new_run("zz" if number % 2 else "aa", "grpo", number)
        assert workspace.find_run("last") == run
        assert workspace.all_runs()[-1] == run
    assert len(workspace.all_runs()) == 20


def test_beginning_or_end_of_a_name_finds_its_run(workspace):
    one = add_run(workspace, "20260101T000000Z-tiny-grpo-s0-0a0a")
    two = add_run(workspace, "20260102T000000Z-tiny-grpo-s0-0b0b")
    assert workspace.find_run("20260101") == one
    assert workspace.find_run("0b0b") == two
    assert workspace.find_run(one.name) == one
    assert workspace.find_run(str(one)) == one


def test_the_last_run_with_a_model_is_neither_an_evaluation_nor_an_import(workspace):
    trained = workspace.new_run("tiny", "grpo", 0)
    others = [workspace.new_run("verl", algo, 0) for algo in (IMPORT, EVALUATION)]
    assert workspace.find_run("last", (EVALUATION, IMPORT)) == trained
    assert workspace.find_run("last", [EVALUATION]) == others[0]
    for other in others:
        with pytest.raises(UserError):
            workspace.find_run(other.name, (EVALUATION, IMPORT))


def test_ambiguous_name_lists_the_candidates(workspace):
    add_run(workspace, "20260101T000000Z-tiny-grpo-s0-0a0a")
    add_run(workspace, "20260102T000000Z-tiny-grpo-s0-0b0b")
    with pytest.raises(UserError, match=r"0a0a, .*0b0b"):
        workspace.find_run("2026")


def test_unknown_run_says_what_there_is(workspace):
    add_run(workspace, "20260101T000000Z-tiny-grpo-s0-0a0a")
    for name in ("nope", ""):
        with pytest.raises(UserError, match="0a0a"):
            workspace.find_run(name)


def test_other_things_among_the_runs_are_no_runs(workspace):
    run = add_run(workspace, "20260101T000000Z-tiny-grpo-s0-0a0a")
    add_run(workspace, ".20260109T000000Z-tiny-grpo-s0-0a0a.tmp-host-1-00000000")
    (workspace.runs / "20260109T000000Z-tiny-grpo-s0-0a0a").write_text("")
    assert workspace.all_runs() == [run]
