"""The directory of a run, on either backend: `config.yaml`, `run.json`, `checkpoints/` and `log/`.

Imports no torch, so that the command line and the processes that only pass a run's state on start quickly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from srl.errors import UserError
from srl.files import ABOUT, FORMAT, MANIFEST, atomic_file, read_json, write_json

BackendName = Literal["local", "verl"]
"""What trains: this process, or verl on a cluster."""
SFT = "sft"
"""Fine-tuning, in the place of an algorithm's name."""
RFT = "rft"
"""Rounds of rejection-sampling fine-tuning, as well."""
RECORD = "run.json"
LOG = "log"
"""The directory of the log; a run that has one has begun."""
CHECKPOINTS = "checkpoints"
STATE = "trainer/state.json"
"""The `Progress` in a checkpoint of the local backend."""
VERL_LATEST = "latest_checkpointed_iteration.txt"
"""verl's file in `checkpoints/`: the number of the step that it goes on from."""
VERL_STATE = ABOUT
"""What `srl` saves beside verl's own parts of a checkpoint."""
_LOCAL_NAME = re.compile(r"step-(\d{6})")
_VERL_NAME = re.compile(r"global_step_(\d+)")


@dataclass(slots=True)
class Progress:
    """How far a run has come: what the log says, which alone has the results of evaluations."""

    step: int = 0
    seconds: float = 0.0
    """Of all training steps."""
    val_em: dict[int, float] = field(default_factory=dict)
    """Exact match of every validation so far, by step."""
    test_em: dict[int, float] = field(default_factory=dict)
    """The same of the test split, which chooses nothing."""

    @property
    def test_em_start(self) -> float | None:
        return self.test_em.get(0)

    @property
    def test_em_end(self) -> float | None:
        return self.test_em[max(self.test_em)] if any(self.test_em) else None

    def note(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Count a finished step or evaluation by its metrics in the log."""
        if phase in ("train", "sft"):
            self.step, self.seconds = step, self.seconds + metrics.get("timing_s/step", 0.0)
        elif phase == "val":
            self.val_em[step] = metrics["val/em"]
        elif phase == "test":
            self.test_em[step] = metrics["test/em"]

    @classmethod
    def of_log(cls, log: Path, step: int) -> Progress:
        """The progress at the end of `step`, as the log in the directory `log` has it."""
        from srl.store import reading

        progress = cls()
        rows = reading([log], lambda connection: connection.execute(_FIGURES, [step]).fetchall())
        for at_step, phase, name, value in rows:
            progress.note(at_step, phase, {name: value})
        progress.step = step
        return progress


_FIGURES = """SELECT step, phase, name, value FROM metrics
    WHERE step <= ? AND name IN ('timing_s/step', 'val/em', 'test/em') ORDER BY step"""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run is, saved as `run.json` when it starts."""

    preset: str
    algo: str
    started: str
    backend: BackendName = "local"
    inputs: dict[str, str] = field(default_factory=dict)
    """The digest of everything that the run is made from, by its name: `reference`, `base` (the model under
    an adapter), `index`, `index of NAME` (a named retriever's), the keys of the files of questions, and
    `episodes` (what a fine-tuning learns from)."""
    evaluation: str = ""
    """Of an evaluation: its name, which the runs of its settings and shards share."""
    setting: str = ""
    """`search`, `no_search` or a baseline."""
    changed: list[dict[str, Any]] = field(default_factory=list)
    """Settings that were changed as the run was resumed, its number of steps too: from step `at` + 1 on,
    `key` is `after`, and no longer `before`; and `when`."""

    def save(self, run: Path) -> None:
        write_json(run / RECORD, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, run: Path) -> RunRecord:
        """The record in the directory `run`. Raises UserError where `run` is not the directory of a run."""
        path = run / RECORD
        if not path.is_file():
            raise UserError(f"{run} is not a run: it has no {RECORD}; `srl inspect runs` lists runs")
        return read_json(path, cls)


def due(step: int, every: int) -> bool:
    """Whether `step` is one of every so many; none is where `every` is 0."""
    return every > 0 and step % every == 0


def steps_key(algo: str) -> str:
    """The key of a run's number of steps."""
    return "sft.steps" if algo == SFT else "trainer.total_training_steps"


def checkpoint_path(run: Path, step: int, backend: BackendName = "local") -> Path:
    """The checkpoint that a backend writes after `step`."""
    return run / CHECKPOINTS / (f"global_step_{step}" if backend == "verl" else f"step-{step:06d}")


def checkpoints(run: Path, backend: BackendName = "local") -> dict[int, Path]:
    """The whole checkpoints of `run` by step, oldest first: those with a manifest, which is written last."""
    folder, name = run / CHECKPOINTS, _VERL_NAME if backend == "verl" else _LOCAL_NAME
    paths = folder.iterdir() if folder.is_dir() else ()
    by_step = {int(match[1]): path for path in paths if (match := name.fullmatch(path.name))}
    is_whole = lambda path: backend == "local" or (path / MANIFEST).is_file()  # noqa: E731
    return {step: path for step, path in sorted(by_step.items()) if is_whole(path)}


def best_step(val_em: Mapping[int, float]) -> int | None:
    """The step with the highest exact match, the earliest of equal ones; None if there is none."""
    return max(val_em, key=lambda step: (val_em[step], -step), default=None)


def superseded_checkpoints(
    run: Path, keep: int | None, backend: BackendName = "local", val_em: Mapping[int, float] | None = None
) -> list[Path]:
    """The checkpoints to delete: all but the newest `keep` (None: none).

    `val_em` is the exact match of validations by step: the best of the checkpoints is kept too.
    """
    saved = checkpoints(run, backend)
    best = best_step({step: em for step, em in (val_em or {}).items() if step in saved})
    steps_kept = {*(list(saved)[-keep:] if keep else saved), best}
    return [path for step, path in saved.items() if step not in steps_kept]


def name_latest_verl_step(run: Path, step: int) -> None:
    """Tell verl that the checkpoint of `step` is the latest; −1: there is none."""
    latest = run / CHECKPOINTS / VERL_LATEST
    if step < 0:
        latest.unlink(missing_ok=True)
        return
    with atomic_file(latest) as file:
        file.write(str(step))
