"""What the scripts for a bare GPU machine share: pieces that are joined whole or refused, and the clock."""

import json
from pathlib import Path

import pytest
from bench.bare_gpu.pieces import Clock, Phase, PieceError, Run, join, pack, split, unpack


@pytest.fixture
def pieces(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 5)
    assert split(file, tmp_path / "pieces", 500) == 3
    return tmp_path / "pieces"


def test_pieces_make_the_file_again(pieces, tmp_path):
    join(pieces, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()
    assert max(path.stat().st_size for path in pieces.glob("*/part")) == 500


def lost(pieces: Path) -> None:
    (pieces / "2" / "part").unlink()


def cut(pieces: Path) -> None:
    (pieces / "3" / "part").write_bytes(b"less")


def mixed(pieces: Path) -> None:
    manifest = pieces / "1" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("sha256", "sha256 ", 1))


def garbled(pieces: Path) -> None:
    for manifest in pieces.glob("*/manifest.json"):
        manifest.write_bytes(b'\xff{"sha')


def emptied(pieces: Path) -> None:
    for manifest in pieces.glob("*/manifest.json"):
        manifest.write_text("{}")


@pytest.mark.parametrize("damage", [lost, cut, mixed, garbled, emptied])
def test_what_is_not_whole_is_refused_in_one_line(pieces, tmp_path, damage):
    damage(pieces)
    with pytest.raises(PieceError) as caught:
        join(pieces, tmp_path / "again")
    assert "\n" not in str(caught.value)


def test_folder_travels_and_is_unpacked_once(tmp_path):
    folder = tmp_path / "folder"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "questions").write_text("who")
    pack(folder, tmp_path / "pieces")
    store = unpack(tmp_path / "pieces")
    assert (store / "data" / "questions").read_text() == "who"
    (store / "data" / "questions").write_text("changed by a run")
    assert (unpack(tmp_path / "pieces") / "data" / "questions").read_text() == "changed by a run"


@pytest.fixture
def run(tmp_path):
    now = [0.0]
    run = Run(tmp_path, tmp_path, Clock(100, lambda: now[0]), smoke=True)
    return run, now


def figures(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.out / "figures.jsonl").read_text().splitlines()]


def test_phase_has_what_is_left_until_its_share_of_the_time(run):
    run, now = run
    left = {}

    def work(name, seconds):
        def phase(run, clock):
            left[name] = clock.seconds
            now[0] += seconds

        return phase

    run.phases([Phase("a", 0.3, work("a", 10)), Phase("b", 0.5, work("b", 50)), Phase("c", 0.6, work("c", 1)),
                Phase("d", 1.0, work("d", 1))])  # fmt: skip
    assert left == {"a": 30, "b": 40, "d": 40}
    assert [one["figure"] for one in figures(run) if "left_out" in one] == ["c"]


def test_phase_that_fails_is_a_figure_of_one_line_and_the_next_goes_on(run):
    run, _ = run
    fails = "import sys; print('first\\nlast', file=sys.stderr); sys.exit(3)"
    prints = "print('{\"n\": 1}')"
    run.phases([
        Phase("broken", 0.5, lambda run, clock: run.python(Clock(60), "-c", fails)),
        Phase("next", 1.0, lambda run, clock: run.figures_of(Clock(60), "-c", prints)),
    ])  # fmt: skip
    found = figures(run)
    assert "last" in found[0]["failed"]
    assert any(one.get("n") == 1 for one in found)
