"""The directory of a run, on either backend: `config.yaml`, `run.json`, `checkpoints/` and `log/`.

Imports no torch, so that the command line and the processes that only pass a run's state on start quickly.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from srl.errors import UserError
from srl.files import FORMAT, atomic_file, read_json, write_json
from srl.hub_models import HubName
from srl.manifests import ABOUT
from srl.renamed import current_fields
from srl.workspace import Workspace

BackendName = Literal["local", "verl"]
"""What trains: this process, or verl on a cluster."""
RECORD = "run.json"
LOG = "log"
"""The directory of the log; a run that has one has begun."""
CHECKPOINTS = "checkpoints"
VERL_LATEST = "latest_checkpointed_iteration.txt"
"""verl's file in `checkpoints/`: the number of the latest step that is saved. A later one is half-written."""
VERL_STATE = ABOUT
"""What `srl` saves beside verl's own parts of a checkpoint."""
VERL_PARTS = ("actor", "data.pt", VERL_STATE)
"""What a whole checkpoint of verl holds; verl writes `data.pt` last."""
_LOCAL_NAME = re.compile(r"step-(\d{6})")
_VERL_NAME = re.compile(r"global_step_(\d+)")


@dataclass(slots=True)
class Progress:
    """How far a run has come, and the figures its summary needs."""

    step: int = 0
    seconds: float = 0.0
    test_em_start: float | None = None
    test_em_end: float | None = None
    val_em_best: float | None = None
    val_em_best_step: int | None = None
    kl: dict[str, float] = field(default_factory=dict)
    """State of the KL controller."""

    def note_validation(self, em: float, step: int) -> None:
        """Keep the best exact match so far and its step; an equal one changes nothing."""
        if self.val_em_best is None or em > self.val_em_best:
            self.val_em_best, self.val_em_best_step = em, step


@dataclass(frozen=True, slots=True)
class Extension:
    """A change of a run's length: after step `at` its total went from `before` to `after` steps."""

    at: int
    before: int
    after: int
    when: str


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What a run is, saved as `run.json` when it starts."""

    preset: str
    algo: str
    started: str
    backend: BackendName = "local"
    reference_digest: str = ""
    index_digest: str = ""
    retriever_digests: dict[str, str] = field(default_factory=dict)
    extended: list[dict[str, Any]] = field(default_factory=list)
    """The fields of each `Extension`, in order."""

    def save(self, run: Path) -> None:
        write_json(run / RECORD, {"format": FORMAT, **asdict(self)})

    @classmethod
    def read(cls, run: Path) -> RunRecord:
        """The record in the directory `run`. Raises UserError where `run` is not the directory of a run."""
        path = run / RECORD
        if not path.is_file():
            raise UserError(f"{run} is not a run: it has no {RECORD}; `srl inspect runs` lists runs")
        return read_json(path, lambda **found: cls(**current_fields("run", found)))


def checkpoint_path(run: Path, step: int, backend: BackendName = "local") -> Path:
    """The checkpoint that a backend writes after `step`."""
    return run / CHECKPOINTS / (f"global_step_{step}" if backend == "verl" else f"step-{step:06d}")


def checkpoints(run: Path, backend: BackendName = "local") -> dict[int, Path]:
    """The checkpoints of `run` by step, oldest first. Those of verl may be half-written, ours never are."""
    folder, name = run / CHECKPOINTS, _VERL_NAME if backend == "verl" else _LOCAL_NAME
    paths = folder.iterdir() if folder.is_dir() else ()
    found = {int(match[1]): path for path in paths if (match := name.fullmatch(path.name))}
    return dict(sorted(found.items()))


def whole_verl_steps(run: Path) -> list[int]:
    """The steps whose checkpoint on verl has all its parts, oldest first."""
    found = checkpoints(run, "verl").items()
    return [step for step, path in found if all((path / part).exists() for part in VERL_PARTS)]


def superseded_checkpoints(run: Path, keep: int | None, backend: BackendName = "local") -> list[Path]:
    """The checkpoints to delete: all but the newest `keep` whole ones (None: only half-written ones)."""
    found = checkpoints(run, backend)
    whole = whole_verl_steps(run) if backend == "verl" else list(found)
    kept = whole[-keep:] if keep else whole
    return [path for step, path in found.items() if step not in kept]


def write_latest_verl_step(run: Path, step: int) -> None:
    """Tell verl that the checkpoint of `step` is the latest."""
    with atomic_file(run / CHECKPOINTS / VERL_LATEST) as file:
        file.write(str(step))


def model_directory(name: str, workspace: Workspace) -> Path:
    """The model that `name` means: a model directory, or the newest checkpoint of a run. Raises UserError.

    A name on the Hugging Face hub and a GGUF file are returned as they are.
    """
    path = Path(name)
    is_run = (path / CHECKPOINTS).is_dir() or (path / "config.yaml").is_file()
    if (path.is_dir() and not is_run) or path.suffix == ".gguf" or HubName.parse(name):
        return path
    if not is_run and not workspace.all_runs():
        raise UserError(f"no model directory {name}, and there are no runs in {workspace.runs}")
    run = path if is_run else workspace.find_run(name)
    found = list(checkpoints(run).values())
    if not found and checkpoints(run, "verl"):
        raise UserError(
            f"{run.name} was trained on verl, which saves sharded models; type "
            f"`srl train export {run.name} --out DIR` and give DIR"
        )
    if not found:
        raise UserError(f"the run {run.name} has no checkpoint yet; give a model directory")
    return found[-1]
