"""Starts and resumes runs on either backend, from configuration to summary.

A backend is a module, `srl.train.local_backend` or `srl.train.verl.launch`, with two functions that raise
UserError: `check(config)` makes the checks that need no file, and `prepare(config, algo, workspace,
terminal)` loads and checks everything that a run needs, and returns a `Trainer`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from srl import __version__
from srl.config import Config, load_saved, located, save_config
from srl.models.hub import hub_name
from srl.store import RunInfo
from srl.store.lock import LogLock
from srl.store.run_info import check_name, check_not_written, has_log, load
from srl.train import resume as resuming
from srl.train.cold_start import cold_started
from srl.train.load_protocol import with_base_tokenizer, with_day, with_protocol
from srl.train.make_missing import check_demonstrations, start_of, with_local_models, with_world
from srl.train.report import Terminal, check_loggers
from srl.train.run_directory import (
    LOG,
    SFT,
    BackendName,
    Progress,
    RunRecord,
    checkpoint_path,
    checkpoints,
    steps_key,
)
from srl.train.search import new_cassette
from srl.workspace import Workspace


class Trainer(Protocol):
    """A run that is loaded and checked, but has no directory yet.

    `questions` is the number of training questions, `where` says in words what the run trains on, and
    `inputs` are digests as in `RunRecord`.
    """

    @property
    def questions(self) -> int: ...

    @property
    def where(self) -> str: ...

    @property
    def inputs(self) -> Mapping[str, str]: ...

    def train(self, run: Path, info: RunInfo, resumed_from: int | None) -> Progress:
        """Train to the end. `resumed_from` is the checkpoint's step, −1 for none; None for a new run."""
        ...


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a run; the last line of `srl train --json`."""

    run_id: str
    algo: str
    seed: int
    steps: int
    seconds: float
    test_em_start: float | None
    test_em_end: float | None
    val_em_best: float | None
    checkpoint: str | None


def start(
    config: Config, *, preset: str, algo: str, workspace: Workspace, terminal: Terminal,
    backend: BackendName = "local",
) -> Summary:  # fmt: skip
    """A new run. Its directory is created after all checks, so one that cannot start leaves nothing."""
    from srl.models.load import pick_device, pick_dtype

    began = time.perf_counter()
    trains = load_backend(backend)
    trains.check(config)
    with new_cassette(config):
        config = with_paths(config, algo, workspace, terminal)
        check_loggers(config.trainer.logger)
        if backend == "local":  # a run keeps the precision that auto means where it starts
            dtype = pick_dtype(config.model.dtype, pick_device(config.model.device))
            config = config.with_settings({"model.dtype": str(dtype).removeprefix("torch.")})
        trainer = trains.prepare(config, algo, workspace, terminal)
    inputs = {**trainer.inputs, **resuming.question_digests(config)}
    record = RunRecord(preset, algo, resuming.utc_now(), backend, inputs)
    run = workspace.new_run(preset, algo, config.trainer.seed)
    with removed_unless_begun(run):
        save_config(run, config)
        record.save(run)
        terminal.note(
            f"run {run.name}: {trainer.questions:,} questions, {trainer.where}, "
            f"set up in {time.perf_counter() - began:.1f} s"
        )
        return _train(run, config, record, trainer)


def resume(
    run: Path, *, workspace: Workspace, terminal: Terminal, steps: int | None = None,
    sets: Sequence[str] = (),
) -> Summary:  # fmt: skip
    """Resume `run` from its newest checkpoint, or from the start where it has none.

    `steps` is the new number of steps in all, `sets` are changes of settings. A finished run that has made
    all of its steps, no fewer and no more, is left as it is. Raises UserError where another process trains
    it.
    """
    record, before = RunRecord.read(run), load_saved(run)
    with LogLock(run / LOG) as lock:  # so no other process trains it meanwhile
        if has_log(run / LOG):  # the lock is none on a file system without locks
            check_not_written(run / LOG)
            check_name(run / LOG, run.name, load(run / LOG))
        step = max(checkpoints(run, record.backend), default=-1)
        steps_done = max(0, step)
        if record.backend == "verl":
            resuming.check_for_verl(run, step)
        config = resuming.changed_config(run, record, before, sets, steps, steps_done, terminal.note)
        if steps in (None, steps_done) and (
            progress := resuming.progress_if_finished(run, record, before, steps_done, terminal.note)
        ):
            if sets:
                terminal.note("warning: --set has no effect on a finished run; --steps N makes it longer")
            return _summary(run, config, record, progress)
        trains = load_backend(record.backend)
        trains.check(config)
        check_loggers(config.trainer.logger)
        config = with_local_models(config, terminal.note)
        trainer = trains.prepare(config, record.algo, workspace, terminal)
        inputs = {**trainer.inputs, **resuming.question_digests(config)}
        resuming.check_inputs(run, record, inputs, config, terminal.note)
        terminal.note(f"resuming {run.name}")
        record = resuming.with_changes_noted(run, record, before, config, steps_done, terminal.note)
        if record.backend == "verl":  # another process writes the log
            lock.release()
        return _train(run, config, record, trainer, resumed_from=step)


def load_backend(name: BackendName) -> Any:
    """The module of a backend."""
    return import_module("srl.train.verl.launch" if name == "verl" else "srl.train.local_backend")


@contextmanager
def removed_unless_begun(run: Path) -> Iterator[None]:
    """Removes the directory of a run that ends, ctrl-C included, before it has a log."""
    try:
        yield
    except BaseException:
        if not (run / LOG).is_dir():
            shutil.rmtree(run, ignore_errors=True)
        raise


def with_paths(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> Config:
    """`config` with every path filled in and absolute: the world's files, models from the hub, the start.

    Without a model of the user's own, fine-tuning starts from the base and RL from the cold-started base.
    """
    if algo == SFT:
        check_demonstrations(config, workspace)
    config = located(with_world(located(config), workspace, terminal.note))
    config = with_local_models(config, terminal.note)
    if config.model.path is not None:
        return with_day(with_protocol(config, terminal.note))
    config = with_protocol(config, terminal.note)
    starts = with_base_tokenizer(config)
    if algo == SFT:
        return located(starts.with_settings({"model.path": str(start_of(config))}))
    path = cold_started(starts, workspace, terminal.note)
    return located(config.with_settings({"model.path": str(path)}))


def run_info(run: Path, config: Config, record: RunRecord) -> RunInfo:
    """What the log says of the run."""
    steps = steps_key(record.algo)
    since = {
        "extended": [change for change in record.changed if change["key"] == steps],
        "changed": [change for change in record.changed if change["key"] != steps],
    }
    settings = config.model_dump() | {name: changes for name, changes in since.items() if changes}
    return RunInfo(
        run_id=run.name, preset=record.preset, algo=record.algo, seed=config.trainer.seed,
        model=hub_name(config.model.path) or config.model.path or "", config=settings,
        index_digest=record.inputs.get("index", ""), srl_version=__version__, started=record.started,
    )  # fmt: skip


def _train(
    run: Path, config: Config, record: RunRecord, trainer: Trainer, resumed_from: int | None = None
) -> Summary:
    with resuming.tells_how_to_go_on(run, record.backend):
        progress = trainer.train(run, run_info(run, config, record), resumed_from)
    return _summary(run, config, record, progress)


def _summary(run: Path, config: Config, record: RunRecord, progress: Progress) -> Summary:
    checkpoint = checkpoint_path(run, progress.step, record.backend)
    return Summary(
        run.name, record.algo, config.trainer.seed, progress.step, round(progress.seconds, 3),
        progress.test_em_start, progress.test_em_end, max(progress.val_em.values(), default=None),
        str(checkpoint) if checkpoint.is_dir() else None,
    )  # fmt: skip
