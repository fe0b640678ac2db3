"""The log is written beside training: in order, one step at a time, and before what relies on it."""

from pathlib import Path
from threading import Event

import pytest
from tests.store_builder import log_rows
from tests.training import config, train, write_setting

from srl.store import LogWriter
from srl.train import loop
from srl.train.loop import Loop
from srl.train.run_directory import LOG
from srl.workspace import Workspace


class Log:
    """Keeps what is written, until the disk is full."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def write(self, step, phase, records, metrics):
        if step == 2:
            raise OSError("the disk is full")
        self.written.append(step)


def test_failed_write_ends_the_next_step_and_nothing_is_written_after_it():
    parts = dict.fromkeys(("config", "terminal", "splits", "environment", "reward", "engine", "actor"))
    run = Loop(**parts)  # type: ignore[arg-type]
    run.log = Log()  # type: ignore[assignment]
    run.record(1, "train", [], {})
    run.record(2, "train", [], {})
    with pytest.raises(OSError, match="the disk is full"):
        run.record(3, "train", [], {})
    with pytest.raises(OSError, match="the disk is full"):
        run.wait_for_log()
    assert run.log.written == [1]


def test_checkpoint_is_saved_when_the_log_has_every_step_before_it(tmp_path, monkeypatch):
    write_setting(tmp_path)
    may, real_write, real_wait, seen = Event(), LogWriter.write, Loop.wait_for_log, []

    def write(log: LogWriter, *arguments: object) -> None:
        assert may.wait(60)
        real_write(log, *arguments)  # type: ignore[arg-type]

    def wait(run: Loop) -> None:
        may.set()
        real_wait(run)
        may.clear()

    def saved(path: Path, *rest: object, **named: object) -> None:
        steps = log_rows(
            path.parent.parent / LOG, "SELECT step FROM steps WHERE phase = 'train' ORDER BY step"
        )
        seen.append((path.name, [step for (step,) in steps]))

    monkeypatch.setattr(LogWriter, "write", write)
    monkeypatch.setattr(Loop, "wait_for_log", wait)
    monkeypatch.setattr(loop, "save_checkpoint", saved)
    few = {"trainer.total_training_steps": 3, "trainer.val_before_train": False, "trainer.test_freq": 0}
    train(config(tmp_path, "grpo", **few), tmp_path / "workspace", "grpo")
    assert seen == [(f"step-{last:06d}", list(range(1, last + 1))) for last in (1, 2, 3)]
    assert len(Workspace(tmp_path / "workspace").all_runs()) == 1
