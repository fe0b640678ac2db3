"""How a stopped run is resumed, on either backend: from which checkpoint, to which step, what to type."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

import srl.store
from srl import process
from srl.config import Config, load_saved, save_config
from srl.config.keys import plain
from srl.config.load import CHANGEABLE, SAVED
from srl.errors import UserError, first_line, is_out_of_memory
from srl.files import (
    DamagedError,
    NotWritten,
    check_checkpoint,
    digest_file,
    digest_text,
    is_checked,
    is_disk_full,
)
from srl.store import run_info
from srl.store.lock import LogLock
from srl.store.run_info import check_not_written, has_log, is_finished, left_behind
from srl.train.learning_rate import rate_notes
from srl.train.make_missing import Note
from srl.train.run_directory import (
    CHECKPOINTS,
    LOG,
    RFT,
    SFT,
    VERL_LATEST,
    BackendName,
    Progress,
    RunRecord,
    checkpoint_path,
    checkpoints,
    steps_key,
    whole_verl_steps,
    write_latest_verl_step,
)
from srl.trajectory import FailedEpisodes
from srl.workspace import Workspace

_QUESTIONS = ("train_files", "exclude_files", "val_files", "test_files")
LEFT_BEHIND_S = 60.0
"""Longest wait, in seconds, for a process that a stopped run left behind; Ray's end by themselves."""
_FIXED = {
    "reference": "the reference policy of {run}",
    "base": "the model under the adapter of {run}",
    "episodes": "what {run} learns from",
}
"""The inputs that must stay: what is learned would be neither run's."""
_LAST_STEP = "SELECT max(step) FROM steps"


def resume_command(run: Path) -> str:
    """The command that resumes `run`; it names the workspace unless that is the default one."""
    return Workspace(run.parent.parent).command("train", "--resume", "--run", run.name)


def how_to_resume(run: Path, step: int, algo: str = "") -> str:
    """One line; `step` is that of the newest checkpoint, below 1 if there is none."""
    command = resume_command(run)
    if step > 0:
        return f"resume from step {step} with `{command}`"
    if algo == RFT:
        return f"there is no checkpoint yet: `{command}` continues round 1 with the episodes of its log"
    return f"there is no checkpoint yet: `{command}` starts over from step 0"


def resume_with(run: Path) -> str:
    """The end of an error message: what to type once its cause is gone."""
    return f"resume with `{resume_command(run)}`"


@contextmanager
def tells_how_to_resume(how: Callable[[], str], run: Path) -> Iterator[None]:
    """Adds the note `how()` to a signal or a full disk that ends the body, if the run has begun its log."""
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | NotWritten) or process.signal_received()
        is_told = bool(getattr(error, "__notes__", ()))
        if (stopped or is_disk_full(error)) and not is_told and (run / LOG).is_dir():
            error.add_note(how())
        raise


@contextmanager
def tells_what_takes_less_memory(run: Path) -> Iterator[None]:
    """Raises UserError, with what to type, where a GPU without memory ends the body."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        config = load_saved(run)
        episodes, tokens = config.rollout.max_num_seqs, config.actor.ppo_max_token_len
        raise UserError(
            f"{first_line(error)} If another program took the memory, {resume_with(run)} once it is free. "
            f"Otherwise add --set rollout.max_num_seqs=N (below {episodes}) if sampling ran out of memory, "
            f"or --set actor.ppo_max_token_len=N (below {tokens}; of a critic, critic.ppo_max_token_len) if "
            "the update did"
        ) from error


def new_run_command(run: Path, setting: str, step: int | None, *options: str) -> str:
    """A new run's command with the settings of `run` but `setting`, from its checkpoint at `step` if any."""
    model = [] if step is None else ["--model", str(checkpoint_path(run, step))]
    given = ["--config", str(run / SAVED), *options, *model, "--set", setting]
    return Workspace(run.parent.parent).command("train", *given)


def too_many_failures(run: Path, found: FailedEpisodes, limit: float) -> UserError | None:
    """The error that ends `run` if a fault cost more than the share `limit` of a step's episodes."""
    if found.failed <= limit * found.episodes:
        return None
    return UserError(
        f"{found.what} failed in {found.failed} of {found.episodes} episodes, more than "
        f"search.max_failed={limit:g} ({found.fault}); once it works again, {resume_with(run)}"
    )


def step_to_resume(run: Path, backend: BackendName, *, is_told: bool = False) -> int:
    """The step that `run` resumes from, −1 where it has no checkpoint.

    On verl it is the latest by verl's own file, if that checkpoint is whole, else the newest whole one; the
    file names it afterwards. Without the file, no step with a checkpoint has ended, unless its checksums were
    written. The checkpoint is read whole. Raises DamagedError, with what to type, where a
    file differs from what was saved. Where the step is only told to the user (`is_told`), nothing is read or
    changed: reading takes minutes for a large model.
    """
    if backend == "local":
        return max(checkpoints(run), default=-1)
    whole, latest = whole_verl_steps(run), run / CHECKPOINTS / VERL_LATEST
    if not latest.is_file():
        whole = [step for step in whole if is_checked(checkpoint_path(run, step, backend))]
    if not whole:
        if not is_told:
            latest.unlink(missing_ok=True)
        return -1
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    step = int(named) if named.isdecimal() and int(named) in whole else whole[-1]
    if is_told:
        return step
    write_latest_verl_step(run, step)
    folder = checkpoint_path(run, step, backend)
    with without_damaged(folder):
        check_checkpoint(folder)
    return step


@contextmanager
def without_damaged(checkpoint: Path) -> Iterator[None]:
    """Adds to a DamagedError of the newest checkpoint what to type to resume without it."""
    try:
        yield
    except DamagedError as error:
        aside = shlex.join(["mv", str(checkpoint), f"{checkpoint}.damaged"])
        command = resume_command(checkpoint.parent.parent)
        raise DamagedError(f"{error}; to resume without it type: {aside} && {command}") from error


def total_steps(config: Config, algo: str) -> int:
    """The number of steps of a run."""
    return config.sft.steps if algo == SFT else config.trainer.total_training_steps


def check_not_trained(run: Path, note: Note) -> None:
    """Raises UserError where another process trains `run`.

    The process that wrote its log for a run on verl ends soon after a killed launcher: it is waited for.
    """
    if writer := left_behind(run / LOG):
        note(f"waiting for {writer} of the stopped run to end")
        writer.wait(LEFT_BEHIND_S)
    check_not_written(run / LOG)


def check_name(run: Path) -> None:
    """Raises UserError where the directory `run` was copied or renamed: its log has another name."""
    if has_log(run / LOG):
        run_info.check_name(run / LOG, run.name, run_info.load(run / LOG))


@contextmanager
def only_this_process(run: Path, saved: Sequence[int], backend: BackendName) -> Iterator[LogLock]:
    """Locks the log of `run`, of which this process is about to resume the newest of the checkpoints `saved`.

    Raises UserError where another process is training it, or has trained it since `saved` was read.
    """
    with LogLock(run / LOG) as lock:
        check_not_written(run / LOG)
        if list(checkpoints(run, backend)) != list(saved):
            raise UserError(
                f"another process has trained {run.name} meanwhile; look with `srl inspect runs`, and "
                f"{resume_with(run)} if it is not finished"
            )
        yield lock


def with_steps(run: Path, record: RunRecord, config: Config, steps: int | None, done: int) -> Config:
    """`config` for `steps` steps in all, if given. Raises UserError where more are done already."""
    if steps is None:
        return config
    if steps < done:
        raise UserError(
            f"--steps {steps}: {run.name} has made {done} steps, and --steps is the new total: give {done} "
            "or a larger number, or leave it out"
        )
    if steps > done and _ended_early(run, record, config, done):
        raise UserError(
            f"--steps {steps}: {run.name} ended after {done} steps, by sft.patience or sft.epochs; leave it "
            f"out, or start a new run: srl train --algo sft --model {run.name}@best"
        )
    return config.with_settings({steps_key(record.algo): steps})


def _ended_early(run: Path, record: RunRecord, config: Config, done: int) -> bool:
    """Whether fine-tuning has ended before its last step, by `sft.patience` or `sft.epochs`."""
    extended = bool(record.extended) and record.extended[-1]["at"] == done
    if record.algo != SFT or extended or done >= config.sft.steps or not is_finished(run / LOG):
        return False
    return srl.store.reading([run / LOG], lambda log: log.execute(_LAST_STEP).fetchone()) == (done,)


def progress_if_finished(
    run: Path, record: RunRecord, config: Config, done: int, note: Note
) -> Progress | None:
    """The progress of a run that has ended and closed its log; None while there is work left."""
    if not is_finished(run / LOG):
        return None
    if done >= total_steps(config, record.algo):
        note(f"{run.name} is finished, all {done} steps; to train longer: {resume_command(run)} --steps N")
    elif _ended_early(run, record, config, done):
        note(f"{run.name} is finished: sft.patience or sft.epochs ended it after {done} steps")
    else:
        return None
    return Progress.of_log(run / LOG, done)


def check_inputs(run: Path, record: RunRecord, now: Mapping[str, str], config: Config, note: Note) -> None:
    """Compare the digests of a run's inputs with those that it started with, where both are known.

    Raises UserError for a model or episodes that are others now; `note` is told of indexes and questions.
    """
    for name, before in record.inputs.items():
        digest = now.get(name, "")
        if digest == before or not (digest and before):
            continue
        if name in _FIXED:
            raise UserError(
                f"{_FIXED[name].format(run=run.name)} has changed: expected digest {before}, found {digest}",
                hint="put back what it was, or start a new run",
            )
        if name == "index":
            note(f"warning: {run.name} started with another index ({before[:12]})")
        elif name.startswith("index of "):
            retriever = name.removeprefix("index of ")
            was = f"the index of the retriever {retriever!r} {before[:12]}, which is {digest[:12]} now"
            note(f"warning: {run.name} started with {was}")
        else:
            files = ", ".join(getattr(config.data, name.removeprefix("data.")) or ())
            note(
                f"warning: {run.name} started with other questions: the files of {name} ({files}) have "
                "changed since; what is measured from here on does not compare with what was before"
            )


def dtype_here(config: Config) -> str:
    """What `model.dtype` comes to on this device."""
    from srl.models.load import pick_device, pick_dtype

    return str(pick_dtype(config.model.dtype, pick_device(config.model.device))).removeprefix("torch.")


def with_its_dtype(run: Path, record: RunRecord, config: Config, note: Note) -> Config:
    """`config` with the precision that `model.dtype=auto` meant where the run started."""
    if config.model.dtype != "auto" or not record.dtype:
        return config
    if (here := dtype_here(config)) != record.dtype:
        note(f"{run.name} goes on in {record.dtype}, as it began; on this device model.dtype=auto is {here}")
    return config.with_settings({"model.dtype": record.dtype})


def question_digests(config: Config) -> dict[str, str]:
    """A digest of the files of each set of questions, by the key that names them."""
    found = {key: getattr(config.data, key) or () for key in _QUESTIONS}
    return {
        f"data.{key}": digest_text(*map(digest_file, files))
        for key, files in found.items()
        if files and all(Path(file).is_file() for file in files)
    }


def with_changes_noted(
    run: Path, record: RunRecord, before: Config, config: Config, done: int, questions: int, note: Note
) -> RunRecord:
    """Save what a resumed run changes after step `done`, its steps and `CHANGEABLE` settings, and say it."""
    as_it_was, was, steps = record, total_steps(before, record.algo), total_steps(config, record.algo)
    if steps != was:
        note(f"{run.name} has {steps} steps now, not {was}")
        for line in rate_notes(before, config, done, record.algo, questions):
            note(line)
        extension = {"at": done, "before": was, "after": steps, "when": utc_now()}
        record = replace(record, extended=[*record.extended, extension])
    for key in CHANGEABLE:
        old, new = (plain(attrgetter(key)(each)) for each in (before, config))
        if old != new:
            note(f"{key} is {new} from here on, not {old}")
            change = {"at": done, "key": key, "before": old, "after": new, "when": utc_now()}
            record = replace(record, changed=[*record.changed, change])
    if record is not as_it_was:
        save_config(run, config)
        record.save(run)
    return record


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
