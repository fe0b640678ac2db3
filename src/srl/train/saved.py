"""What a run has saved: its checkpoints by step, and the model that a name means. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from srl.errors import UserError
from srl.workspace import Workspace

_NAME = re.compile(r"^step-(\d{6})$")


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def all_checkpoints(run: Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first; a half-written one has another name."""
    folder = run / "checkpoints"
    found = [path for path in folder.iterdir() if _NAME.match(path.name)] if folder.is_dir() else []
    return sorted(found)


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    found = all_checkpoints(run)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def model_directory(name: str, workspace: Workspace) -> Path:
    """The model that `name` means: its directory, or the newest checkpoint of a run. Raises UserError."""
    path = Path(name)
    is_run = (path / "checkpoints").is_dir() or (path / "config.yaml").is_file()
    if path.is_dir() and not is_run:
        return path
    if not is_run and not workspace.all_runs():
        raise UserError(f"no model directory {name}, and no runs in {workspace.runs} whose model it could be")
    run = path if is_run else workspace.find_run(name)
    checkpoints = all_checkpoints(run)
    if not checkpoints and any((run / "checkpoints").glob("global_step_*")):
        raise UserError(
            f"{run.name} was trained on verl, which saves a model in parts; type "
            f"`srl train export {run.name} --out DIR` and give DIR"
        )
    if not checkpoints:
        raise UserError(f"the run {run.name} has no checkpoint yet; give a model directory")
    return checkpoints[-1]
