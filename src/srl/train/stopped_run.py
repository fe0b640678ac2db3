"""A run that is stopped loses only the step under way, unless the step has begun to change weights.

The state before the step is then gone, and a resumed run repeats all steps since the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from srl.config.sections import Trainer
from srl.errors import UserError, first_line
from srl.train.make_missing import Note
from srl.train.run_directory import Progress, checkpoints
from srl.update.optimiser import Optimiser


def newest_once_stopped(run: Path, trainer: Trainer, step: int) -> int | None:
    """The step of the newest checkpoint that a run leaves which an error ends after `step` whole steps; None
    without one. It is that of `step`, unless `saved_if_stopped` saves none."""
    return step if trainer.save_freq and step > 0 else max(checkpoints(run), default=None)


@contextmanager
def saved_if_stopped(
    run: Path, trainer: Trainer, progress: Progress, optimisers: Iterable[Optimiser],
    save: Callable[[], object], note: Note,
) -> Iterator[None]:  # fmt: skip
    """Call `save` where a signal, a UserError or a GPU without memory ends the body, unless the checkpoint of
    `progress` is there.

    It is not called once the body has begun to change weights or counted its step, at step 0, and where
    `trainer.save_freq` is 0. A checkpoint that cannot be written is reported with `note`, and the error of
    the body is raised.
    """
    followed = list(optimisers)
    step, begun = progress.step, [each.begun for each in followed]
    try:
        yield
    except (KeyboardInterrupt, UserError, torch.OutOfMemoryError):
        is_whole = progress.step == step and begun == [each.begun for each in followed]
        if trainer.save_freq and step > 0 and is_whole and step not in checkpoints(run):
            note(f"stopping: saving the checkpoint of step {step}")
            try:
                save()
            except (UserError, OSError) as error:
                note(f"warning: the checkpoint of step {step} was not saved: {first_line(error)}")
        raise
