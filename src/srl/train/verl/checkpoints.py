"""Which of verl's checkpoints a run goes on from: one that is whole, and whose step is in the log.

verl names the latest checkpoint in a file of its own. We write that file, once the step's figures are in
the log, so that a run which goes on leaves no gap there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from srl.files import atomic_file
from srl.manifests import ABOUT, DamagedError, check_checkpoint
from srl.train.resuming import go_on_without

if TYPE_CHECKING:
    from omegaconf import DictConfig

MARKER = "latest_checkpointed_iteration.txt"
"""verl's file in `checkpoints/`: the number of the latest step that is saved."""
STATE = ABOUT
"""What we keep beside verl's own parts of a checkpoint."""
PARTS = ("actor", "data.pt", STATE)
"""What a whole checkpoint holds; verl writes `data.pt` last."""
_NAME = re.compile(r"global_step_(\d+)")


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"global_step_{step}"


def whole_steps(checkpoints: Path) -> list[int]:
    """The steps whose checkpoint has all its parts, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [(path, _NAME.fullmatch(path.name)) for path in checkpoints.iterdir()]
    return sorted(
        int(match[1]) for path, match in found if match and all((path / part).exists() for part in PARTS)
    )


def settled(checkpoints: Path) -> int:
    """The step to go on from, −1 where there is none: the one that is named, if it is whole, else the newest.

    The file that verl reads names it from here on. Its files are read whole. Raises DamagedError, with what
    to type, where one is not as it was saved.
    """
    whole, marker = whole_steps(checkpoints), checkpoints / MARKER
    if not whole:
        marker.unlink(missing_ok=True)
        return -1
    named = marker.read_text(encoding="utf-8").strip() if marker.is_file() else ""
    if named.isdecimal() and int(named) in whole:
        step = int(named)
    else:
        step = whole[-1]
        name_latest(checkpoints, step)
    folder = folder_of(checkpoints, step)
    try:
        check_checkpoint(folder)
    except DamagedError as error:
        raise DamagedError(f"{error}; {go_on_without(folder)}") from error
    return step


def name_latest(checkpoints: Path, step: int) -> None:
    """Name the checkpoint of `step` the latest, whole or not at all."""
    with atomic_file(checkpoints / MARKER) as file:
        file.write(str(step))


@contextmanager
def unnamed(config: DictConfig) -> Iterator[None]:
    """Inside, verl saves without naming the checkpoint the latest, as it does where saving goes on behind.

    Only the trainer reads this of the configuration; the workers, who save, have their own.
    """
    from omegaconf import open_dict

    section = config.actor_rollout_ref.actor.checkpoint
    before = section.get("async_save", False)
    with open_dict(section):
        section.async_save = True
    try:
        yield
    finally:
        section.async_save = before
