"""How a stopped run is resumed, on either backend: what may change, from which checkpoint, what to type.

`Loop.resume` loads the checkpoint and drops later steps from the log; on verl `log_writer.py` drops them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path

from srl import process
from srl.config import Config, load_saved, save_config, with_changes
from srl.config.keys import keys, plain
from srl.config.load import typed_settings
from srl.config.unread import kind_of
from srl.errors import SrlError, UserError, first_line, is_out_of_memory
from srl.files import (
    DamagedError,
    NotWritten,
    check_checkpoint,
    digest_file,
    digest_text,
    is_disk_full,
)
from srl.progress import Note
from srl.rollout.engine import LogitsNotFinite
from srl.store.run_info import is_finished
from srl.train.run_directory import (
    LOG,
    BackendName,
    Progress,
    RunRecord,
    checkpoint_path,
    checkpoints,
    name_latest_verl_step,
    steps_key,
)
from srl.trajectory import FailedEpisodes
from srl.workspace import Workspace

CHANGEABLE = tuple(key.name for key in keys() if key.facts.resumes)
"""The keys that a resumed run may change (`resumes` in `srl.config.sections`): memory, speed, search servers,
checkpoints; none decides what is learned."""
_QUESTIONS = ("train_files", "exclude_files", "val_files", "test_files")
_FIXED = {
    "reference": "the reference policy of {run}",
    "base": "the model under the adapter of {run}",
    "episodes": "what {run} learns from",
}
"""The inputs that must stay: what is learned would be neither run's."""
_NAMES = {"glue": "text of the chat template around results"}


def resume_command(run: Path) -> str:
    """The command that resumes `run`; it names the workspace unless that is the default one."""
    return Workspace(run.parent.parent).command("train", "--resume", "--run", run.name)


def resume_with(run: Path) -> str:
    """The end of an error message: what to type once its cause is gone."""
    return f"resume with `{resume_command(run)}`"


@contextmanager
def tells_how_to_go_on(run: Path, backend: BackendName) -> Iterator[None]:
    """Adds what to type to a signal, a full disk or an error that ends the body and does not say it, if the
    run has begun its log. Raises UserError, with what takes less, where a GPU without memory ends it."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            rollout, actor = load_saved(run).rollout, load_saved(run).actor
            raise UserError(
                f"{first_line(error)} If another program took it, {resume_with(run)} once it is free. "
                f"Otherwise add --set rollout.max_num_seqs=N (below {rollout.max_num_seqs}) if sampling ran "
                f"out of memory, or --set actor.ppo_max_token_len=N (below {actor.ppo_max_token_len}; of a "
                "critic, critic.ppo_max_token_len) if the update did"
            ) from error
        stopped = isinstance(error, KeyboardInterrupt | NotWritten) or process.signal_received()
        has_no_hint = isinstance(error, SrlError) and str(error) == error.what
        has_no_hint &= not isinstance(error, LogitsNotFinite)  # the same weights would give them again
        resumes = stopped or is_disk_full(error) or has_no_hint
        if resumes and not hasattr(error, "__notes__") and (run / LOG).is_dir():
            newest = max(checkpoints(run, backend), default=0)
            start = f"from step {newest}" if newest else "from the start, since there is no checkpoint yet"
            error.add_note(f"{resume_with(run)}: {start}")
        raise


def too_many_failures(run: Path, failures: FailedEpisodes, limit: float) -> UserError | None:
    """The error that ends `run` if a fault cost more than the share `limit` of a step's episodes."""
    if failures.failed <= limit * failures.episodes:
        return None
    return UserError(
        f"{failures.what} failed in {failures.failed} of {failures.episodes} episodes, more than "
        f"search.max_failed={limit:g} ({failures.fault})",
        hint=f"once it works again, {resume_with(run)}",
    )


def check_for_verl(run: Path, step: int) -> None:
    """Have verl go on from its checkpoint of `step`, or from the start where that is −1. Reads the checkpoint
    whole. Raises DamagedError, with what to type, where a file differs from what was saved."""
    name_latest_verl_step(run, step)
    if step >= 0:
        folder = checkpoint_path(run, step, "verl")
        with without_damaged(folder):
            check_checkpoint(folder)


@contextmanager
def without_damaged(checkpoint: Path) -> Iterator[None]:
    """Adds to a DamagedError of the newest checkpoint what to type to resume without it."""
    try:
        yield
    except DamagedError as error:
        aside = shlex.join(["mv", str(checkpoint), f"{checkpoint}.damaged"])
        command = resume_command(checkpoint.parent.parent)
        raise DamagedError(error, hint=f"to resume without it type: {aside} && {command}") from error


def changed_config(
    run: Path, record: RunRecord, config: Config, sets: Sequence[str], steps: int | None, steps_done: int,
    note: Note,
) -> Config:  # fmt: skip
    """`config` with `sets` (`a.b=value`), for `steps` steps in all if given; `note` is told what of it such a
    run does not read. Raises UserError for a key that may not change, and where more steps are done."""
    for key in [setting.key for setting in typed_settings(None, {}, sets)]:
        if key not in CHANGEABLE:
            may_change = f"memory, speed, search servers and checkpoints ({', '.join(CHANGEABLE)})"
            hint = f"leave it out, or start a new run: a resumed one may change {may_change}"
            raise UserError(f"--set {key}: a resumed run keeps it", key=key, hint=hint)
        if key == "search.url" and config.search.url is None:
            raise UserError(f"--set {key}: {run.name} searches an index in its own process", key=key)
    if sets:
        config, warnings = with_changes(config, sets, kind_of(record.algo), record.backend)
        for line in warnings:
            note(f"warning: {line}")
    if steps is None:
        return config
    if steps < steps_done:
        raise UserError(
            f"--steps {steps}: {run.name} has made {steps_done} steps, and --steps is the new total: give "
            f"{steps_done} or a larger number, or leave it out"
        )
    return config.with_settings({steps_key(record.algo): steps})


def progress_if_finished(
    run: Path, record: RunRecord, config: Config, steps_done: int, note: Note
) -> Progress | None:
    """The progress of a run that has made all steps and closed its log; None while there is work left."""
    if steps_done < attrgetter(steps_key(record.algo))(config) or not is_finished(run / LOG):
        return None
    note(f"{run.name} is finished, all {steps_done} steps; to train longer: {resume_command(run)} --steps N")
    return Progress.of_log(run / LOG, steps_done)


def check_inputs(run: Path, record: RunRecord, now: Mapping[str, str], config: Config, note: Note) -> None:
    """Compare the digests of a run's inputs with those that it started with, where both are known.

    Raises UserError for a model or episodes that are others now; `note` is told of the others.
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
        if not name.startswith("data."):
            note(f"warning: {run.name} started with another {_NAMES.get(name, name)} ({before[:12]})")
        else:
            files = ", ".join(getattr(config.data, name.removeprefix("data.")) or ())
            note(
                f"warning: {run.name} started with other questions: the files of {name} ({files}) have "
                "changed since; what is measured from here on does not compare with what was before"
            )


def question_digests(config: Config) -> dict[str, str]:
    """A digest of the files of each set of questions, by the key that names them."""
    sets = {key: getattr(config.data, key) or () for key in _QUESTIONS}
    return {
        f"data.{key}": digest_text(*map(digest_file, files))
        for key, files in sets.items()
        if files and all(Path(file).is_file() for file in files)
    }


def with_changes_noted(
    run: Path, record: RunRecord, before: Config, config: Config, steps_done: int, note: Note
) -> RunRecord:
    """Save what a resumed run changes after `steps_done` steps (steps, `CHANGEABLE` settings), and say it."""
    as_it_was, steps = record, steps_key(record.algo)
    for key in (steps, *CHANGEABLE):
        old, new = (plain(attrgetter(key)(each)) for each in (before, config))
        if old == new:
            continue
        if key == steps:
            note(f"{run.name} has {new} steps now, not {old}")
        else:
            note(f"{key} is {new} from here on, not {old}")
        change = {"at": steps_done, "key": key, "before": old, "after": new, "when": utc_now()}
        record = replace(record, changed=[*record.changed, change])
    if record is not as_it_was:
        save_config(run, config)
        record.save(run)
    return record


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
