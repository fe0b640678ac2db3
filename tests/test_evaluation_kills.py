"""A killed evaluation gives the table of one that was not, and asks nothing again that its log has."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli_mistakes import place
from tests.store_builder import log_rows
from tests.training import questions

from srl.data.parquet import write_questions
from srl.store import find_logs
from srl.workspace import Workspace

pytest.importorskip("srl_bm25")
__all__ = ["place"]
QUESTIONS = 400
CHILD = """
import asyncio, sys
from srl.cli import main
from srl.rollout.engine import ScriptedEngine
from srl.train import load_components

asked = open(sys.argv[1], "a", buffering=1)

def say(request, turn):
    if turn == 0:
        asked.write(request.split("/")[-3] + "\\n")
        return "<search> velmar </search>"
    return "<answer> red </answer>"

class Scripted(ScriptedEngine):
    async def generate(self, *given):
        await asyncio.sleep(0.02)
        return await super().generate(*given)

load_components.load_engine = lambda config, policy, note: Scripted(policy.codec, say)
sys.exit(main(sys.argv[2:]))
"""
"""`srl` with a policy that searches, then says `red`, which is right for every third question."""


class Session:
    """A process that evaluates, or goes on with the evaluation of its workspace."""

    def __init__(self, workspace: Path, typed: list[object]) -> None:
        self.before = logged(workspace)
        self.file = workspace.with_suffix(f".{len(list(workspace.parent.iterdir()))}")
        self.file.touch()
        goes_on = [part for run in Workspace(workspace).all_runs() for part in ("--run", run.name)]
        command = [sys.executable, "-c", CHILD, self.file, "-q", "--workspace", workspace, *typed, *goes_on]
        self.process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)

    @property
    def asked(self) -> set[str]:
        return set(self.file.read_text().split())

    def kill_when(self, holds: Callable[[], bool], at_latest_s: float = 300) -> None:
        waited = 0.0
        while not holds() and waited < at_latest_s and self.process.poll() is None:
            try:
                self.process.wait(0.02)
            except subprocess.TimeoutExpired:
                waited += 0.02
        assert self.process.poll() is None, "it ended before it was killed"
        self.process.kill()
        self.process.communicate()

    def table(self) -> dict[str, Any]:
        """What the report of a process that ends by itself says of the answers; not the times."""
        found = json.loads(self.process.communicate()[0])["search"]
        metrics = {name: value for name, value in found["metrics"].items() if "timing_s" not in name}
        return {"metrics": metrics, "em_interval": found["em_interval"]}


def logged(workspace: Path) -> set[str]:
    """The numbers of the questions in the logs of a workspace, each there once."""
    runs = [run for run in Workspace(workspace).all_runs() if find_logs(run)]
    found = [name for run in runs for (name,) in log_rows(run, "SELECT question_id FROM trajectories")]
    assert len(set(found)) == len(found)
    return {name.rpartition("/")[2] for name in found}


@pytest.mark.slow
def test_an_evaluation_that_is_killed_gives_the_same_table_and_generates_nothing_again(place, tmp_path):
    write_questions(tmp_path / "test.parquet", questions("test", QUESTIONS))
    typed = ["eval", "run", place / "model", "--config", place / "small.yaml", "--index", place / "index"]
    typed += ["--data", tmp_path / "test.parquet", "--set", "rollout.max_num_seqs=16", "--json"]
    expected = Session(tmp_path / "alone", typed).table()
    assert expected["metrics"]["em"] == sum(number % 3 == 0 for number in range(QUESTIONS)) / QUESTIONS
    rng, killed = random.Random(0), tmp_path / "killed"
    for moment in ("starting", "asking", "asking"):
        session = Session(killed, typed)
        after = rng.randint(1, QUESTIONS - len(session.before) - 1)
        if moment == "starting":
            session.kill_when(lambda: False, rng.uniform(0, 2))
        else:
            session.kill_when(lambda session=session, after=after: len(session.asked) >= after)
        assert not session.before & session.asked
    session = Session(killed, typed)
    assert session.table() == expected
    assert not session.before & session.asked
    assert len(Workspace(killed).all_runs()) == 1
