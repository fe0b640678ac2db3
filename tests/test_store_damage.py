"""A log with damaged files is read without them; a resumed run sets parts aside and ends whole."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.cli_mistakes import cut
from tests.store_builder import new_log, run_info, write_step

import srl.store
from srl.errors import UserError
from srl.store import LogWriter, parts

GOOD, BAD = "20250102T030405Z-tiny-grpo-s1-00aa", "20250103T030405Z-tiny-ppo-s1-01ab"


HARMS = {
    "cut short": lambda part: cut(part / "trajectories.parquet"),
    "empty": lambda part: (part / "searches.parquet").write_bytes(b""),
    "missing": lambda part: (part / "steps.parquet").unlink(),
    "of another version": lambda part: pq.write_table(pa.table({"mood": [1]}), part / "segments.parquet"),
}


def part_of(run: Path, step: int) -> Path:
    (part,) = (run / "log" / "parts").glob(f"step-{step:06d}-*")
    return part


def steps(connection) -> list[int]:
    """The steps whose rows can be read, in every table."""
    for table in ("trajectories", "segments", "searches"):
        connection.execute(f"SELECT count(hash(one)) FROM {table} AS one")
    return [step for (step,) in connection.execute("SELECT step FROM steps ORDER BY step").fetchall()]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of three steps that nothing is wrong with, and one to damage."""
    for name in (GOOD, BAD):
        log = new_log(tmp_path / name)
        for step in (1, 2, 3):
            write_step(log, step)
    return tmp_path


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_part_is_left_out_and_named(runs, harm, caplog):
    harm(part_of(runs / BAD, 2))
    said: list[str] = []
    assert srl.store.reading([runs / BAD], steps, warn=said.append) == [1, 3]
    assert srl.store.reading([runs], steps, warn=said.append) == [1, 1, 2, 3, 3]
    assert len(said) == 2
    for line in said:
        assert "\n" not in line
        assert all(text in line for text in (BAD, "parquet", "train step 2")), line
    with srl.store.open(runs / BAD) as connection:
        assert steps(connection) == [1, 3]
    assert BAD in caplog.text


@pytest.mark.parametrize("content", [b"{", b'{"format": 1, "kind": "log"}', b'{"format": 9, "kind": "log"}'])
def test_a_run_whose_manifest_cannot_be_read_is_left_out_and_not_taken_up(runs, content):
    (runs / BAD / "log" / "manifest.json").write_bytes(content)
    said: list[str] = []
    assert srl.store.reading([runs], steps, warn=said.append) == [1, 2, 3]
    (line,) = said
    assert all(text in line for text in (BAD, "manifest.json"))
    with pytest.raises(UserError, match=r"manifest\.json"):
        srl.store.reading([runs / BAD], steps, warn=pytest.fail)
    with pytest.raises(UserError, match=r"manifest\.json"):
        LogWriter(runs / BAD / "log", run_info(BAD))
    assert (runs / BAD / "log" / "manifest.json").read_bytes() == content


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_run_sets_a_damaged_part_aside_and_ends_whole(runs, harm, step):
    """One that it trains again, or one before its checkpoint, which is lost."""
    harm(part_of(runs / BAD, 2))
    said: list[str] = []
    with LogWriter(runs / BAD / "log", run_info(BAD), warn=said.append) as log:
        log.drop_steps_after(step)
        for later in range(step + 1, 5):
            write_step(log, later)
    (line,) = said
    assert "train step 2" in line
    assert (runs / BAD / "log" / "parts" / "damaged-step-000002-train-main-000002").is_dir()
    left = [1, 3, 4] if step == 2 else [1, 2, 3, 4]
    assert srl.store.reading([runs / BAD], steps, warn=pytest.fail) == left


@pytest.mark.parametrize(
    "error", [PermissionError(13, "no"), OSError(24, "too many open files"), MemoryError()]
)
def test_a_part_that_is_only_out_of_reach_is_not_set_aside(runs, monkeypatch, error):
    def failing(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(parts.pq, "read_schema", failing)
        with pytest.raises(type(error)):
            LogWriter(runs / BAD / "log", run_info(BAD))
    assert srl.store.reading([runs / BAD], steps, warn=pytest.fail) == [1, 2, 3]
