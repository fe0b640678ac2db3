"""Evaluations killed at random moments that go on, with an engine that plays a script.

One kill in five comes while the process starts. Each evaluation must give the table of one that was never
killed, and no process may ask what its log held when it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tiny_models import byte_level_tokenizer, new_model

import srl.store
from srl.data.corpus import write_corpus
from srl.index import build_index
from srl.models.weights import save_model
from srl.protocol import template
from srl.rollout.engine import Completion, Sampling, ScriptedEngine
from srl.store import find_logs
from srl.trajectory import Passage
from srl.workspace import Workspace, is_evaluation

TOWNS = 1000
KILLED_QUESTIONS = 400
TEMPLATE = "search-r1"
SETS = (
    "data.max_prompt_length=256", "data.max_response_length=192", "rollout.max_turns=1",
    "rollout.max_turn_tokens=64", "rollout.max_obs_length=64", "rollout.max_num_seqs=16", "trainer.threads=1",
)  # fmt: skip
_PROCESSES = multiprocessing.get_context("forkserver")
"""Processes that have their imports behind them, so that most kills fall into the evaluation."""
_PROCESSES.set_forkserver_preload(["srl.cli", "srl.train.eval_run", "transformers.models.qwen2"])


class Scripted(ScriptedEngine):
    """Searches for the town of a question, then answers: right for every third."""

    def __init__(self, codec: Any, asked: Path, turn_s: float) -> None:
        super().__init__(codec, self._say)
        self._asked = asked.open("a", buffering=1, encoding="utf-8")
        self._turn_s = turn_s

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        if self._turn_s:
            await asyncio.sleep(self._turn_s)
        return await super().generate(request_id, token_ids, sampling)

    def _say(self, request: str, turn: int) -> str:
        number = int(request.split("/")[-3])
        if turn == 0:
            self._asked.write(f"{number}\n")
            return f"<search> town{number % TOWNS} </search>"
        return f"<answer> {'red' if number % 3 == 0 else 'blue'} </answer>"


def evaluate(arguments: list[str], asked: Path, report: Path, turn_s: float) -> None:
    """`srl` with these arguments in this process, with the scripted engine; stdout goes to `report`."""
    from srl.cli import main as srl_main
    from srl.train import load_components

    load_components.load_engine = lambda config, policy, note: Scripted(policy.codec, asked, turn_s)
    with report.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        code = srl_main(arguments)
    sys.exit(code)


def write_place(folder: Path, questions: int) -> None:
    """Questions, and an index over the towns that they ask for."""
    towns = [f"town{number}" for number in range(TOWNS)]
    write_corpus(
        folder / "corpus.jsonl", (Passage(town, f'"{town}"\nThe flag of {town} is red .') for town in towns)
    )
    build_index(folder / "corpus.jsonl", folder / "index", "bm25", {})
    words = byte_level_tokenizer().train_new_from_iterator([template(TEMPLATE).prompt, *towns], 1000)
    sizes = {"layers": 1, "width": 16, "heads": 2, "ffn": 16, "max_length": 4096}
    ends = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    save_model(new_model("qwen2", vocab_size=len(words), **ends, **sizes), words, folder / "model")
    with (folder / "test.jsonl").open("w", encoding="utf-8") as file:
        for number in range(questions):
            asked = f"what flag has town{number % TOWNS} in the year {number}"
            row = {"id": str(number), "question": asked, "golden_answers": ["red"]}
            file.write(json.dumps(row | {"metadata": {"hops": 1 + number % 2}}) + "\n")


@dataclass
class Session:
    """One process that evaluates."""

    folder: Path
    workspace: Path
    turn_s: float = 0.0

    def __post_init__(self) -> None:
        self.asked_file, self.report = (Path(tempfile.mkstemp(dir=self.folder)[1]) for _ in range(2))
        self.before = logged(self.workspace)
        sets = [part for text in SETS for part in ("--set", text)]
        given = ["--data", str(self.folder / "test.jsonl"), "--index", str(self.folder / "index"), "--json"]
        model = str(self.folder / "model")
        begun = [run.name for run in Workspace(self.workspace).all_runs() if is_evaluation(run)]
        goes_on = ["--run", begun[0]] if begun else []
        arguments = ["-q", "--workspace", str(self.workspace), "eval", "run", model, *given, *sets, *goes_on]
        self.process = _PROCESSES.Process(
            target=evaluate, args=(arguments, self.asked_file, self.report, self.turn_s)
        )
        self.process.start()

    @property
    def asked(self) -> list[str]:
        return self.asked_file.read_text(encoding="utf-8").split()

    def wait_for(self, episodes: float) -> bool:
        """Until so many episodes were asked for; False where it ended before."""
        while self.process.is_alive():
            if self.asked_file.read_bytes().count(b"\n") >= episodes:
                return True
            self.process.join(0.02 if self.turn_s else 0.5)
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def finish(self) -> dict[str, Any]:
        """The report of a process that ends by itself."""
        self.wait_for(math.inf)
        if self.process.exitcode != 0:
            raise SystemExit("the evaluation failed")
        found: dict[str, Any] = json.loads(self.report.read_text(encoding="utf-8"))
        return found

    def repeated(self) -> set[str]:
        """What it asked for although the log held it when it started."""
        return self.before & set(self.asked)


def logged(workspace: Path) -> set[str]:
    """The numbers of the questions in the logs of a workspace. Raises ValueError for one logged twice."""
    found: list[str] = []
    for run in Workspace(workspace).all_runs():
        if find_logs(run):
            with srl.store.open(run) as log:
                found += [row[0] for row in log.execute("SELECT question_id FROM trajectories").fetchall()]
    if len(set(found)) < len(found):
        raise ValueError("a trajectory is in the log twice")
    return {name.rpartition("/")[2] for name in found}


def table(report: dict[str, Any]) -> dict[str, Any]:
    """What a report says of the answers; not the times."""
    found = report["search"]
    metrics = {name: value for name, value in found["metrics"].items() if "timing_s" not in name}
    return {"metrics": metrics, "em_interval": found["em_interval"]}


def killed(
    folder: Path, expected: dict[str, Any], kills: int, rng: random.Random, turn_s: float
) -> list[str]:
    """Evaluations in new workspaces, killed `kills` times in all; in what they were not as they should be."""
    wrong: list[str] = []
    while kills:
        workspace = Path(tempfile.mkdtemp(dir=folder))
        session = Session(folder, workspace, turn_s)
        while kills:
            rest = KILLED_QUESTIONS - len(session.before)
            starting = rng.random() < 0.2
            if starting:
                time.sleep(rng.uniform(0, 2))
            elif not session.wait_for(rng.randint(1, max(rest - 1, 1))):
                break
            session.kill()
            kills -= 1
            wrong += [f"{len(found)} asked again" for found in [session.repeated()] if found]
            session = Session(folder, workspace, turn_s)
        report = session.finish()
        wrong += [f"{len(found)} asked again" for found in [session.repeated()] if found]
        if table(report) != expected:
            wrong.append(f"another table: {table(report)}")
        if len(Workspace(workspace).all_runs()) != 1:
            wrong.append("more than one run")
        shutil.rmtree(workspace)
    return wrong


def never_killed(folder: Path) -> dict[str, Any]:
    """The table of an evaluation that is left alone."""
    workspace = Path(tempfile.mkdtemp(dir=folder))
    return table(Session(folder, workspace).finish())
