"""Which of verl's checkpoints a run resumes from, and which are kept."""

from __future__ import annotations

import pytest

from srl.files import CHECKPOINT, HAS_MANIFEST, DamagedError, checksums, write_json, write_manifest
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


def checkpoint(run, step, parts=VERL_PARTS, settled=False):
    folder = checkpoint_path(run, step, "verl")
    for part in parts:
        path = folder / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if part == "actor" else path.write_text("{}")
    if settled:
        (folder / "actor" / "model.pt").write_bytes(bytes(1000))
        write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})
    return folder


def latest(run):
    return run / CHECKPOINTS / VERL_LATEST


def test_run_goes_on_from_the_checkpoint_that_is_named(tmp_path):
    assert step_to_resume(tmp_path, "verl") == -1
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)
    write_latest_verl_step(tmp_path, 1)
    assert step_to_resume(tmp_path, "verl") == 1
    assert latest(tmp_path).read_text() == "1"


@pytest.mark.parametrize("left", [VERL_PARTS[:1], VERL_PARTS[:2], VERL_PARTS[1:]])
@pytest.mark.parametrize("named", ["20", "", "nonsense", "7"])
def test_half_written_checkpoint_is_never_taken_and_a_wrong_name_is_set_right(tmp_path, left, named):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20, left)
    latest(tmp_path).write_text(named)
    assert whole_verl_steps(tmp_path) == [9, 10]
    assert step_to_resume(tmp_path, "verl") == 10
    assert latest(tmp_path).read_text() == "10"


def test_name_goes_where_no_checkpoint_is_whole(tmp_path):
    checkpoint(tmp_path, 3, ("actor",))
    latest(tmp_path).write_text("3")
    assert step_to_resume(tmp_path, "verl") == -1
    assert not latest(tmp_path).exists()


def test_first_checkpoint_counts_once_its_step_has_ended(tmp_path):
    """It is saved before the validation of its step, and gets checksums and the name after it."""
    checkpoint(tmp_path, 100)
    assert step_to_resume(tmp_path, "verl") == -1
    folder = checkpoint_path(tmp_path, 100, "verl")
    write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})
    assert step_to_resume(tmp_path, "verl") == 100


@pytest.mark.parametrize("damage", ["a part", "its manifest"])
def test_damaged_checkpoint_is_not_gone_on_from_until_it_is_moved_aside(tmp_path, damage):
    """A step that is only told to the user is neither read nor named."""
    checkpoint(tmp_path, 9, settled=True)
    folder = checkpoint(tmp_path, 10, settled=True)
    assert step_to_resume(tmp_path, "verl") == 10
    latest(tmp_path).write_text("7")
    if damage == "a part":
        (folder / "actor" / "model.pt").write_bytes(bytes(999) + b"x")
    else:
        (folder / "manifest.json").unlink()
        write_json(folder / VERL_STATE, {"format": 1, **HAS_MANIFEST})
    assert step_to_resume(tmp_path, "verl", is_told=True) == 10
    assert latest(tmp_path).read_text() == "7"
    with pytest.raises(DamagedError):
        step_to_resume(tmp_path, "verl")
    folder.rename(tmp_path / "aside")
    assert step_to_resume(tmp_path, "verl") == 9


@pytest.mark.parametrize(
    ("keep", "val_em", "kept"),
    [
        (1, None, [3]),
        (2, None, [2, 3]),
        (None, None, [1, 2, 3]),
        (1, {1: 0.1, 2: 0.5, 3: 0.2}, [2, 3]),
        (1, {1: 0.5, 2: 0.5, 3: 0.2}, [1, 3]),
        (1, {1: 0.1, 2: 0.2, 3: 0.3}, [3]),
        (1, {1: 0.1, 4: 0.9}, [1, 3]),
        (1, {9: 0.9}, [3]),
    ],
)
def test_the_newest_and_the_first_best_by_validation_are_kept_of_those_that_are_whole(
    tmp_path, keep, val_em, kept
):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 4, VERL_PARTS[:1])
    gone = superseded_checkpoints(tmp_path, keep, "verl", val_em)
    assert [checkpoint_path(tmp_path, step, "verl") for step in (1, 2, 3, 4) if step not in kept] == gone
