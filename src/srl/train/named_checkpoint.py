"""Which checkpoint a name means: `RUN` the newest, `RUN@best` the best by validation, `RUN@30` step 30's.

`last` is the latest run, and `best` alone the best checkpoint of the latest run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import srl.store
from srl.errors import UserError, parsing
from srl.models.hub import HubName
from srl.train.run_directory import CHECKPOINTS, best_step, checkpoints
from srl.workspace import EVALUATION, IMPORT, Workspace, split_at_step

BEST = "best"
_VALIDATIONS = "SELECT step, em FROM steps WHERE phase = 'val' AND em IS NOT NULL"


def model_directory(name: str, workspace: Workspace, note: Callable[[str], None] = lambda text: None) -> Path:
    """The model that `name` means: a model directory, or a checkpoint of a run. Raises UserError.

    A name on the Hugging Face hub is returned as it is. `note` says which is the best.
    """
    path, (run_name, suffix) = Path(name), split_name(name)
    is_run = _is_run(Path(run_name))
    if (path.is_dir() and not _is_run(path)) or (HubName.parse(name) and not is_run):
        return path
    if not is_run and not workspace.all_runs():
        raise UserError(f"no model directory {name}, and there are no runs in {workspace.runs}")
    run = Path(run_name) if is_run else workspace.find_run(run_name, (EVALUATION, IMPORT))
    saved = checkpoints(run)
    if not saved and checkpoints(run, "verl"):
        raise UserError(
            f"{run.name} was trained on verl, which saves sharded models; type "
            f"`srl train export {run.name}{suffix and f'@{suffix}'} --out DIR` and give DIR"
        )
    if not saved:
        raise UserError(f"the run {run.name} has no checkpoint yet; give a model directory")
    step = named_step(run, suffix, note) if suffix else max(saved)
    if step not in saved:
        raise UserError(f"{run.name} has no checkpoint of step {step}; it has {', '.join(map(str, saved))}")
    return saved[step]


def split_name(name: str) -> tuple[str, str]:
    """The run that `name` names, and what follows its `@`: `best`, a step, or nothing."""
    run, suffix = split_at_step(name)
    return ("last", BEST) if name == BEST else (run, suffix or "")


def named_step(run: Path, suffix: str, note: Callable[[str], None]) -> int:
    """The step of the checkpoint `suffix`: `best`, or a number. Raises UserError."""
    if suffix == BEST:
        return best_of_run(run, note)
    if not suffix.isdecimal():
        raise UserError(f"{run.name}@{suffix}: expected {run.name}@best, or the step of a checkpoint after @")
    with parsing(f"{run.name}@{suffix}"):
        return int(suffix)


def best_of_run(run: Path, note: Callable[[str], None]) -> int:
    """The step of the checkpoint with the best validation EM, which `note` says. Raises UserError."""
    with srl.store.open(run) as log:
        em: dict[int, float] = dict(log.execute(_VALIDATIONS).fetchall())
    saved = [*checkpoints(run), *checkpoints(run, "verl")]
    best = best_step({step: em[step] for step in saved if step in em})
    if best is None:
        why = "no checkpoint that it has was validated" if em else "it was never validated"
        raise UserError(f"{run.name} has no best checkpoint: {why}; {run.name} alone is its newest")
    note(f"the best checkpoint of {run.name}: step {best}, validation EM {em[best]:.3f}")
    return best


def _is_run(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir() or (path / "config.yaml").is_file()
