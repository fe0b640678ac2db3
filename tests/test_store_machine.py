"""The contract of the log: after any history of changes and kills every reader sees what a dictionary would.

A kill ends a change at any of its calls that change the file system; nothing of the process runs after it.
What was written before is whole, what was dropped is there or not, and the same change again completes it.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import duckdb
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.store_builder import episode, new_log, record

import srl.store
from srl.store import lock, writer

Key = tuple[int, str]
State = dict[Key, set[str] | None]
"""The ids of each step's trajectories; None where the step is not in the log."""

CHANGES = ("rename", "replace", "mkdir", "rmdir", "unlink")
STEPS, PHASES = st.integers(0, 2), st.sampled_from(["train", "val"])
KILLS = st.none() | st.integers(0, 25)


class Killed(BaseException):
    """The process is gone."""


@contextmanager
def killed_at(call: int | None) -> Iterator[None]:
    """The process is killed at this call, from 0, that changes the file system; not at all if it is None."""
    calls = 0

    def counted(change: Callable) -> Callable:
        def changing(*arguments, **options):
            nonlocal calls
            calls += 1
            if call is not None and calls > call:
                raise Killed
            return change(*arguments, **options)

        return changing

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


def read(connection: duckdb.DuckDBPyConnection) -> State:
    """The steps and their trajectories, after checking that the tables agree."""
    state: State = {key: set() for key in connection.execute("SELECT step, phase FROM steps").fetchall()}
    for step, phase, name in connection.execute("SELECT step, phase, id FROM trajectories").fetchall():
        assert name not in state[step, phase], "each trajectory once"
        state[step, phase].add(name)
    pieces = "SELECT trajectory_id, count(*) FROM {} GROUP BY ALL"
    ids = set().union(*state.values())
    for table, count in (("segments", 4), ("searches", 1), ("hits", 2)):
        assert dict(connection.execute(pieces.format(table)).fetchall()) == dict.fromkeys(ids, count)
    return state


class History(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.compact_at, writer.COMPACT_AT = writer.COMPACT_AT, 3
        self.run = Path(mkdtemp()) / "run"
        self.state: State = {}
        self.number = 0
        self.log, self.mine = new_log(self.run), set[Key]()

    def teardown(self) -> None:
        writer.COMPACT_AT = self.compact_at
        self.ends()
        shutil.rmtree(self.run.parent)

    def ends(self) -> None:
        """The process ends, and its locks with it."""
        for file in lock._held.values():
            file.close()
        lock._held.clear()

    def restart(self) -> None:
        self.ends()
        self.log, self.mine = new_log(self.run), set()

    def change(self, change: Callable[[], object], after: State, kill: int | None) -> bool:
        """Do `change()`, which makes the log `after`; whether it was killed, and the run taken up again."""
        try:
            with killed_at(kill):
                change()
        except Killed:
            self.ends()
            with srl.store.open(self.run) as connection:
                left = read(connection)
            for key in left.keys() | self.state.keys() | after.keys():
                gone = [None] * (key in self.state and self.state[key] != after.get(key))
                assert left.get(key) in (self.state.get(key), after.get(key), *gone)
            self.state = left
            self.restart()
            return True
        self.state = {key: ids for key, ids in after.items() if ids is not None}
        return False

    def completed(self, change: Callable[[], object], after: State, kill: int | None) -> None:
        """Do `change()`; once more if it was killed."""
        if self.change(change, after, kill):
            self.change(change, after, None)

    @rule(step=STEPS, phase=PHASES, size=st.integers(1, 2), kill=KILLS)
    def write(self, step, phase, size, kill):
        """A step that this process has written gets more, one of an earlier process is replaced."""
        key = (step, phase)
        made = [record(episode(self.number + n, step=step, phase=phase)) for n in range(size)]
        self.number += size
        ids = {one.trajectory.id for one in made}
        before = self.state.get(key) or set() if key in self.mine else set()
        change = lambda: self.log.write(step, phase, made, {"m": 1.0})  # noqa: E731
        if self.change(change, self.state | {key: before | ids}, kill):
            self.change(change, self.state | {key: ids}, None)
        self.mine.add(key)

    @rule(last=STEPS, kill=KILLS)
    def drop_steps_after(self, last, kill):
        after = self.state | {key: None for key in self.state if key[0] > last}
        self.completed(lambda: self.log.drop_steps_after(last), after, kill)

    @rule(every=st.integers(1, 3), kill=KILLS)
    def drop_trajectories(self, every, kill):
        ids = set(sorted(set().union(*self.state.values()))[::every])
        after = {key: there - ids for key, there in self.state.items()}
        self.completed(lambda: self.log.drop_trajectories(ids), after, kill)

    @rule(finish=st.booleans(), kill=KILLS)
    def end(self, finish, kill):
        self.completed(lambda: self.log.finish() if finish else self.log.close("failed"), self.state, kill)
        self.restart()

    @invariant()
    def every_reader_sees_each_step_once(self):
        with srl.store.open(self.run) as connection:
            assert read(connection) == self.state
        if self.state and (self.run / "log" / "log.duckdb").exists():
            with duckdb.connect(self.run / "log" / "log.duckdb", read_only=True) as connection:
                assert read(connection) == self.state


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=10, stateful_step_count=10)


@pytest.mark.slow
def test_long_histories():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(History, settings=settings(max_examples=25, stateful_step_count=20))
