"""Which of verl's checkpoints a run goes on from."""

from __future__ import annotations

import subprocess

import pytest

from srl.manifests import CHECKPOINT, DamagedError, checksums, write_manifest
from srl.train.verl.checkpoints import (
    MARKER,
    PARTS,
    STATE,
    folder_of,
    name_latest,
    settled,
    whole_steps,
)


def checkpoint(folder, step, parts=PARTS):
    for part in parts:
        path = folder_of(folder, step) / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if part == "actor" else path.write_text("{}")


def test_run_without_checkpoint_starts_over(tmp_path):
    assert settled(tmp_path / "checkpoints") == -1


def test_run_goes_on_from_the_checkpoint_that_is_named(tmp_path):
    checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2)
    name_latest(tmp_path, 1)
    assert settled(tmp_path) == 1
    assert (tmp_path / MARKER).read_text() == "1"


@pytest.mark.parametrize("left", [PARTS[:1], PARTS[:2], PARTS[1:]])
def test_half_written_checkpoint_is_never_taken(tmp_path, left):
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20, left)
    name_latest(tmp_path, 20)
    assert whole_steps(tmp_path) == [10]
    assert settled(tmp_path) == 10
    assert (tmp_path / MARKER).read_text() == "10"


@pytest.mark.parametrize("text", ["", "nonsense", "7"])
def test_marker_that_names_nothing_is_set_right(tmp_path, text):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 10)
    (tmp_path / MARKER).write_text(text)
    assert settled(tmp_path) == 10
    assert (tmp_path / MARKER).read_text() == "10"


def test_marker_goes_where_no_checkpoint_is_whole(tmp_path):
    (tmp_path / MARKER).write_text("3")
    checkpoint(tmp_path, 3, ("actor",))
    assert settled(tmp_path) == -1
    assert not (tmp_path / MARKER).exists()


def test_checkpoint_that_lost_its_manifest_is_not_gone_on_from(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoint(checkpoints, 9)
    assert settled(checkpoints) == 9, "an older version wrote none"
    checkpoint(checkpoints, 10)
    name_latest(checkpoints, 10)
    (folder_of(checkpoints, 10) / STATE).write_text('{"format": 1, "manifest": true}')
    with pytest.raises(DamagedError, match=r"10/manifest\.json is missing.*is global_step_9; to go on"):
        settled(checkpoints)


def test_damaged_checkpoint_is_not_gone_on_from_and_says_how_to_go_on_without_it(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (9, 10):
        checkpoint(checkpoints, step)
        folder = folder_of(checkpoints, step)
        (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(bytes(1000))
        write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})
    assert settled(checkpoints) == 10
    (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(bytes(999) + b"x")
    with pytest.raises(DamagedError, match=r"rank_0\.pt is damaged.*is global_step_9; to go on") as said:
        settled(checkpoints)
    move = str(said.value).rpartition("type: ")[2].partition(" && ")[0]
    subprocess.run(move.split(), check=True)
    assert settled(checkpoints) == 9
