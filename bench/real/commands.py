"""Commands of `srl` in a cache directory: what is done is not done again, what was stopped is resumed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from srl.files import write_json

T = TypeVar("T")
SMALL = (
    "data.train_batch_size=2", "rollout.n=2", "rollout.max_turns=2", "rollout.max_turn_tokens=64",
    "rollout.max_obs_length=120", "data.max_response_length=512",
    "data.max_prompt_length=4096", "actor.ppo_mini_batch_size=2",
    "critic.ppo_mini_batch_size=2", "eval.val_questions=4", "sft.batch_size=2", "trainer.critic_warmup=0",
    "sft.filter=em >= 0", "trainer.test_freq=1", "trainer.save_freq=1", "trainer.threads=1",
    "model.dtype=bfloat16",
)  # fmt: skip
"""Settings of the smoke run."""
SMOKE_STEPS = 2


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished training run: its directory, its summary, and the wall time of all its attempts."""

    run: Path
    summary: dict[str, Any]
    minutes: float

    @property
    def workspace(self) -> Path:
        return self.run.parent.parent


@dataclass(frozen=True, slots=True)
class Bench:
    """What every part is given. Outputs are in `cache`; `state/` has a file for each thing that is done."""

    cache: Path
    data: Path
    model: Path
    seed: int
    preset: str
    sets: tuple[str, ...] = ()
    smoke: bool = False
    budget: int | None = None
    """Test questions of a row at most."""

    @property
    def prepared(self) -> Path:
        return self.cache / "prepared"

    @property
    def index(self) -> Path:
        return self.cache / "index"

    @property
    def evaluations(self) -> Path:
        """The workspace of the evaluations."""
        return self.cache / "evaluations"

    def srl(self, workspace: Path, *arguments: object) -> str:
        """What the command prints on stdout. Its messages pass."""
        program = Path(sys.executable).with_name("srl")
        command = [str(program), "--workspace", str(workspace), *map(str, arguments)]
        print(f"$ srl {shlex.join(command[1:])}", file=sys.stderr, flush=True)
        return output_of(command)

    def once(self, key: str, make: Callable[[], T]) -> T:
        """`make()`, or what it returned before; it has to be JSON."""
        file = self.state(key)
        if not file.is_file():
            began, value = time.perf_counter(), make()
            write_json(file, {"value": value, "minutes": round((time.perf_counter() - began) / 60, 2)})
        return json.loads(file.read_text(encoding="utf-8"))["value"]

    def state(self, key: str) -> Path:
        (self.cache / "state").mkdir(exist_ok=True)
        return self.cache / "state" / f"{key}.json"

    def train(self, name: str, *arguments: object, steps: int | None = None) -> Trained:
        """The run `name` with this seed, started, resumed, or as it ended. `steps` are made at most.

        Each run has a workspace of its own, so that the one to resume is known.
        """
        workspace = self.cache / "runs" / self.key(name)
        begun = sorted(workspace.glob("runs/*/run.json"))
        how: list[object]
        if begun:
            how = ["--resume", "--run", begun[-1].parent.name]
        else:
            workspace.mkdir(parents=True, exist_ok=True)
            sets = [*self.sets, *(SMALL if self.smoke else ())]
            how = ["--preset", self.preset, "--seed", self.seed, *arguments, *options(sets)]
        limit = SMOKE_STEPS if self.smoke and steps is None else steps
        how += [] if limit is None else ["--steps", limit]
        return self._finished(workspace, [*how, "--json"])

    def _finished(self, workspace: Path, how: list[object]) -> Trained:
        clock, began = workspace / "seconds", time.perf_counter()
        before = float(clock.read_text()) if clock.is_file() else 0.0
        try:
            out = self.srl(workspace, "train", *how)
        finally:
            spent = before + time.perf_counter() - began
            clock.write_text(f"{spent:.1f}\n")
        summary = json.loads(out[out.index("{") :])
        return Trained(workspace / "runs" / summary["run_id"], summary, round(spent / 60, 2))

    def key(self, name: str) -> str:
        """The name of a run with its seed."""
        return f"{name}-s{self.seed}"

    def trained(self, name: str) -> Trained | None:
        """The run `name` if it has finished, else None."""
        file = self.state(self.key(name))
        if not file.is_file():
            return None
        value = json.loads(file.read_text(encoding="utf-8"))["value"]
        return Trained(self.cache / value["run"], value["summary"], value["minutes"])

    def train_once(self, name: str, *arguments: object, steps: int | None = None) -> Trained:
        """`train`, or the run as it ended before."""

        def make() -> dict[str, Any]:
            found = self.train(name, *arguments, steps=steps)
            run = str(found.run.relative_to(self.cache))
            return {"run": run, "summary": found.summary, "minutes": found.minutes}

        self.once(self.key(name), make)
        found = self.trained(name)
        assert found is not None, "it was just written"
        return found


def output_of(command: Sequence[str]) -> str:
    """What `command` prints on stdout. Ctrl-C ends it first, which may save a checkpoint, and then the bench.

    Raises CalledProcessError for another exit code than 0.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            out, _ = child.communicate()
        except KeyboardInterrupt:  # the terminal sent it to the child too
            child.wait()
            raise
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return out


def options(sets: list[str]) -> list[str]:
    return [part for setting in sets for part in ("--set", setting)]
