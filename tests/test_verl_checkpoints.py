"""Which of verl's checkpoints a run resumes from, and which are kept."""

import pytest

from srl.files import CHECKPOINT, DamagedError, checksums, write_manifest
from srl.train.resume import check_for_verl
from srl.train.run_directory import (
    CHECKPOINTS,
    VERL_LATEST,
    checkpoint_path,
    checkpoints,
    superseded_checkpoints,
)


def checkpoint(run, step, settled=True):
    folder = checkpoint_path(run, step, "verl")
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model.pt").write_bytes(bytes(1000))
    if settled:
        write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})
    return folder


def test_a_checkpoint_counts_once_its_step_is_in_the_log_and_verl_is_told_which_is_the_latest(tmp_path):
    """verl saves it before the validation of its step; its manifest comes last."""
    latest = tmp_path / CHECKPOINTS / VERL_LATEST
    checkpoint(tmp_path, 20, settled=False)
    assert checkpoints(tmp_path, "verl") == {}
    latest.write_text("20")
    check_for_verl(tmp_path, -1)
    assert not latest.exists()
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    assert list(checkpoints(tmp_path, "verl")) == [9, 10]
    check_for_verl(tmp_path, 10)
    assert latest.read_text() == "10"


def test_damaged_checkpoint_is_not_gone_on_from_until_it_is_moved_aside(tmp_path):
    checkpoint(tmp_path, 9)
    folder = checkpoint(tmp_path, 10)
    check_for_verl(tmp_path, 10)
    (folder / "actor" / "model.pt").write_bytes(bytes(999) + b"x")
    with pytest.raises(DamagedError):
        check_for_verl(tmp_path, 10)
    folder.rename(tmp_path / "aside")
    assert list(checkpoints(tmp_path, "verl")) == [9]


@pytest.mark.parametrize(
    ("keep", "val_em", "kept"),
    [
        (1, None, [3]), (2, None, [2, 3]), (None, None, [1, 2, 3]), (1, {1: 0.1, 2: 0.5, 3: 0.2}, [2, 3]),
        (1, {1: 0.5, 2: 0.5, 3: 0.2}, [1, 3]), (1, {1: 0.1, 2: 0.2, 3: 0.3}, [3]),
        (1, {1: 0.1, 4: 0.9}, [1, 3]), (1, {9: 0.9}, [3]),
    ],
)  # fmt: skip
def test_the_newest_and_the_first_best_by_validation_are_kept(tmp_path, keep, val_em, kept):
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step, settled=step < 4)
    gone = superseded_checkpoints(tmp_path, keep, "verl", val_em)
    assert [checkpoint_path(tmp_path, step, "verl") for step in (1, 2, 3) if step not in kept] == gone
