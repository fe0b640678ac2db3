"""Which of verl's checkpoints a run resumes from."""

from __future__ import annotations

import subprocess

import pytest

from srl.files import CHECKPOINT, DamagedError, checksums, write_manifest
from srl.train.resume import step_to_resume
from srl.train.run_directory import (
    CHECKPOINTS,
    VERL_LATEST,
    VERL_PARTS,
    VERL_STATE,
    checkpoint_path,
    superseded_checkpoints,
    whole_verl_steps,
    write_latest_verl_step,
)


def checkpoint(run, step, parts=VERL_PARTS):
    for part in parts:
        path = checkpoint_path(run, step, "verl") / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if part == "actor" else path.write_text("{}")
    return checkpoint_path(run, step, "verl")


def latest(run):
    return run / CHECKPOINTS / VERL_LATEST


def test_run_without_checkpoint_starts_over(tmp_path):
    assert step_to_resume(tmp_path, "verl") == -1


def test_run_goes_on_from_the_checkpoint_that_is_named(tmp_path):
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)
    write_latest_verl_step(tmp_path, 1)
    assert step_to_resume(tmp_path, "verl") == 1
    assert latest(tmp_path).read_text() == "1"


@pytest.mark.parametrize("left", [VERL_PARTS[:1], VERL_PARTS[:2], VERL_PARTS[1:]])
def test_half_written_checkpoint_is_never_taken(tmp_path, left):
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20, left)
    write_latest_verl_step(tmp_path, 20)
    assert whole_verl_steps(tmp_path) == [10]
    assert step_to_resume(tmp_path, "verl") == 10
    assert latest(tmp_path).read_text() == "10"


def test_a_step_that_is_only_told_is_neither_read_nor_named(tmp_path):
    checkpoint(tmp_path, 9)
    folder = checkpoint(tmp_path, 10)
    write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})
    latest(tmp_path).write_text("7")
    for damaged in folder.glob("*.json"):
        damaged.write_text("changed since")
    assert step_to_resume(tmp_path, "verl", is_told=True) == 10
    assert latest(tmp_path).read_text() == "7"
    with pytest.raises(DamagedError):
        step_to_resume(tmp_path, "verl")


@pytest.mark.parametrize("text", ["", "nonsense", "7"])
def test_marker_that_names_nothing_is_set_right(tmp_path, text):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    latest(tmp_path).write_text(text)
    assert step_to_resume(tmp_path, "verl") == 10
    assert latest(tmp_path).read_text() == "10"


def test_first_checkpoint_counts_once_its_step_has_ended(tmp_path):
    """It is saved before the validation of its step, and gets checksums and the marker after it."""
    checkpoint(tmp_path, 100)
    assert step_to_resume(tmp_path, "verl") == -1
    folder = checkpoint_path(tmp_path, 100, "verl")
    write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})
    assert step_to_resume(tmp_path, "verl") == 100


def test_marker_goes_where_no_checkpoint_is_whole(tmp_path):
    checkpoint(tmp_path, 3, ("actor",))
    latest(tmp_path).write_text("3")
    assert step_to_resume(tmp_path, "verl") == -1
    assert not latest(tmp_path).exists()


def test_checkpoint_that_lost_its_manifest_is_not_gone_on_from(tmp_path):
    run = tmp_path / "run"
    checkpoint(run, 9)
    write_latest_verl_step(run, 9)
    assert step_to_resume(run, "verl") == 9, "an older version wrote none"
    checkpoint(run, 10)
    write_latest_verl_step(run, 10)
    (checkpoint_path(run, 10, "verl") / VERL_STATE).write_text('{"format": 1, "manifest": true}')
    with pytest.raises(DamagedError, match=r"10/manifest\.json is missing.*is global_step_9; to resume"):
        step_to_resume(run, "verl")


def test_damaged_checkpoint_is_not_gone_on_from_and_says_how_to_go_on_without_it(tmp_path):
    run = tmp_path / "run"
    for step in (9, 10):
        checkpoint(run, step)
        folder = checkpoint_path(run, step, "verl")
        (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(bytes(1000))
        write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})
    assert step_to_resume(run, "verl") == 10
    (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(bytes(999) + b"x")
    with pytest.raises(DamagedError, match=r"rank_0\.pt is damaged.*is global_step_9; to resume") as said:
        step_to_resume(run, "verl")
    move = str(said.value).rpartition("type: ")[2].partition(" && ")[0]
    subprocess.run(move.split(), check=True)
    assert step_to_resume(run, "verl") == 9


@pytest.mark.parametrize(("keep", "steps"), [(1, [1, 2, 4]), (2, [1, 4]), (9, [4]), (None, [4])])
def test_half_written_checkpoints_and_those_beyond_the_newest_are_superseded(tmp_path, keep, steps):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 4, VERL_PARTS[:1])
    assert superseded_checkpoints(tmp_path, keep, "verl") == [
        checkpoint_path(tmp_path, step, "verl") for step in steps
    ]


@pytest.mark.parametrize(
    ("val_em", "kept"),
    [
        ({1: 0.1, 2: 0.5, 3: 0.2}, [2, 3]),
        ({1: 0.5, 2: 0.5, 3: 0.2}, [1, 3]),
        ({1: 0.1, 2: 0.2, 3: 0.3}, [3]),
        ({1: 0.1, 4: 0.9}, [1, 3]),
        ({9: 0.9}, [3]),
        ({}, [3]),
    ],
    ids=["earlier", "of equals the first", "the newest itself", "half-written is none", "not saved", "none"],
)
def test_the_best_by_validation_is_kept_beside_the_newest(tmp_path, val_em, kept):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 4, VERL_PARTS[:1])
    gone = superseded_checkpoints(tmp_path, 1, "verl", val_em)
    assert [checkpoint_path(tmp_path, step, "verl") for step in (1, 2, 3, 4) if step not in kept] == gone
