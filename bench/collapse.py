"""Collapse made on purpose on the made-up world: how early each watch fires, and what a roll-back recovers.

    python bench/collapse.py [--kinds rate poison drift outage healthy] [--seeds 0 1 2] [--workspace DIR]

Four kinds of collapse, each in a run that only notes and in one that rolls back (`watch.action=rollback`):

    rate     the learning rate is 20 times that of the preset
    poison   for some steps the reward pays for not searching, without a KL that would hold the policy
    drift    for some steps the sampler's temperature rises from step to step, uncorrected
    outage   for some steps the search answers without passages, as a server with an empty index does

The last three begin at step 5. They last as many training steps as `LASTS` says, those after a roll-back
included. Healthy runs of several algorithms are beside them (`--kinds healthy`). Runs that are in
`bench/results/collapse.json` are not made again, so the bench can be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import srl.store
from srl.browse.watches import watches
from srl.cli import main as run_srl
from srl.rollout.engine import Completion, Sampling
from srl.rollout.torch_engine import TorchEngine
from srl.serve.in_process import LocalSearch
from srl.train.episodes import EpisodeRunner
from srl.trajectory import Hit, Phase, Score, Trajectory
from srl.workspace import Workspace

RESULTS = Path(__file__).parent / "results" / "collapse.json"
BEGINS = 5
"""The first step that a fault touches."""
LASTS = {"poison": 6, "drift": 8, "outage": 6}
"""Training steps, counted as they are made, that a fault touches."""
SETTINGS = ("data.train_batch_size=8", "actor.ppo_mini_batch_size=4", "trainer.test_freq=2",
            "trainer.save_freq=2", "trainer.sample_freq=0", "eval.test_questions=1")  # fmt: skip
KINDS: dict[str, tuple[str, ...]] = {
    "rate": ("actor.optim.lr=4e-3",),
    "poison": ("actor.kl_loss_coef=0", "actor.optim.lr=5e-4"),
    "drift": ("algorithm.rollout_correction.rollout_is=off", "actor.optim.lr=5e-4"),
    "outage": ("actor.kl_loss_coef=0", "actor.optim.lr=5e-4"),
    "healthy": (),
}
"""The settings of each kind of run."""


class Fault:
    """One kind of fault, put into this process; it knows which step is rolled out."""

    def __init__(self, kind: str) -> None:
        self.kind, self.step, self.made = kind, 0, 0
        patches = {"poison": self._poison, "drift": self._drift, "outage": self._empty}
        self._count()
        if kind in patches:
            patches[kind]()

    @property
    def is_active(self) -> bool:
        """Whether the step that is rolled out now is touched."""
        return self.step >= BEGINS and self.made <= LASTS[self.kind]

    def _count(self) -> None:
        roll_out = EpisodeRunner.roll_out

        def counted(runner: Any, questions: Any, phase: Phase, step: int, *given: Any) -> Any:
            self.step = step if phase == "train" else 0
            self.made += self.step >= BEGINS
            return roll_out(runner, questions, phase, step, *given)

        _put(EpisodeRunner, "roll_out", counted)

    def _poison(self) -> None:
        score = EpisodeRunner.score

        def poisoned(runner: EpisodeRunner, trajectories: list[Trajectory]) -> list[Score]:
            scores = score(runner, trajectories)
            if not self.is_active:
                return scores
            return [replace(one, value=1.0 - min(1.0, len(item.searches) / 2))
                    for one, item in zip(scores, trajectories, strict=True)]  # fmt: skip

        _put(EpisodeRunner, "score", poisoned)

    def _drift(self) -> None:
        generate = TorchEngine.generate

        async def drifted(engine: Any, request: str, ids: Sequence[int], sampling: Sampling) -> Completion:
            if self.is_active:
                sampling = replace(sampling, temperature=sampling.temperature * (1 + 0.25 * self.made))
            return await generate(engine, request, ids, sampling)

        _put(TorchEngine, "generate", drifted)

    def _empty(self) -> None:
        outcomes = LocalSearch._outcomes

        def empty(search: Any, queries: list[str]) -> list[list[Hit] | Any]:
            return [[] for _ in queries] if self.is_active else outcomes(search, queries)

        _put(LocalSearch, "_outcomes", empty)


def _put(owner: type, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)


def train(kind: str, algo: str, seed: int, action: str, steps: int, questions: int) -> int:
    """One run in this process, with the fault in it; the exit code of `srl`."""
    Fault(kind)
    sets = [*SETTINGS, *KINDS[kind], f"eval.val_questions={questions}", f"watch.action={action}"]
    if algo != "grpo":
        sets = [text for text in sets if "batch_size" not in text]
    options = [part for text in sets for part in ("--set", text)]
    return run_srl(["-q", "train", "--algo", algo, "--seed", str(seed), "--steps", str(steps), *options])


def measured(run: Path, kind: str) -> dict[str, Any]:
    """The first step with the fault, the validations of a run, and which watches fired when."""
    with srl.store.open(run) as log:
        query = "SELECT step, em FROM steps WHERE phase = 'val' ORDER BY step"
        val = dict(log.execute(query).fetchall())
        fired = watches(log)
        status = log.execute("SELECT status FROM runs").fetchall()[0][0]
    names = ("step", "watch", "value", "bound", "since", "action", "to_step")
    return {
        "status": status,
        "begins": BEGINS if kind in LASTS else 1,
        "val": {str(step): round(em, 4) for step, em in val.items()},
        "last": val[max(val)],
        "fired": [{name: row[name] for name in names} for row in fired],
    }


def made(workspace: Workspace, key: str, steps: int, questions: int) -> dict[str, Any]:
    """The run `kind/algo/seed/action`, in a process of its own."""
    before = set(workspace.all_runs())
    arguments = [__file__, "--one", key, "--steps", str(steps), "--questions", str(questions)]
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"SRL_WORKSPACE": str(workspace.root)}
    )
    runs = set(workspace.all_runs()) - before
    if len(runs) != 1:
        sys.exit(f"{key}: {len(runs)} runs were made, with exit code {done.returncode}")
    about = {"exit": done.returncode, "steps": steps, "questions": questions}
    return about | measured(runs.pop(), key.partition("/")[0])


def wanted(kinds: Sequence[str], seeds: Sequence[int], actions: Sequence[str]) -> list[str]:
    """The keys of the runs: of each kind and seed one for each action; healthy runs only note."""
    keys = []
    for seed in seeds:
        for kind in kinds:
            algos = ("grpo", "ppo", "reinforce", "rloo") if kind == "healthy" else ("grpo",)
            done = ("note",) if kind == "healthy" else actions
            keys += [f"{kind}/{algo}/{seed}/{action}" for action in done for algo in algos]
    return keys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--actions", nargs="+", default=["note", "rollback"], choices=["note", "rollback"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--questions", type=int, default=1024)
    parser.add_argument("--workspace", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    if given.one:
        kind, algo, seed, action = given.one.split("/")
        raise SystemExit(train(kind, algo, int(seed), action, given.steps, given.questions))
    saved: dict[str, Any] = {"format": 1, "runs": {}}
    if RESULTS.exists():
        saved = json.loads(RESULTS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(given.workspace or Path(folder))
        os.environ["SRL_WORKSPACE"] = str(workspace.root)
        for key in wanted(given.kinds, given.seeds, given.actions):
            if key in saved["runs"]:
                continue
            saved["runs"][key] = found = made(workspace, key, given.steps, given.questions)
            RESULTS.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            fired = [(one["step"], one["watch"]) for one in found["fired"]]
            print(key, "EM at the end", found["last"], fired, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
