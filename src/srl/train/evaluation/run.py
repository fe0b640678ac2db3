"""The run of an evaluation: found again by its key, held by one process, and what its log has already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from srl import __version__
from srl.config import Config, save_config
from srl.errors import UserError
from srl.files import locked
from srl.store import QUESTION_DIGEST, RunInfo, find_logs, question_digest, reading
from srl.train.evaluation.subject import FILE, Subject
from srl.train.make_missing import Note
from srl.train.run_directory import LOG, RunRecord
from srl.train.search import IndexDigests
from srl.trajectory import Question
from srl.workspace import EVALUATION, Workspace, is_evaluation

_LOGGED = f"""
SELECT question_id, sample, id, valid, coalesce(em, 0), {QUESTION_DIGEST}
FROM trajectories WHERE phase = 'eval'
"""


class Episode(NamedTuple):
    """An episode in the log: the id of its trajectory, and whether no fault ended it."""

    trajectory: str
    valid: bool
    em: float


@dataclass(frozen=True, slots=True)
class Logged:
    """What an evaluation's log holds: episodes by question id and sample, digests of the questions by id."""

    episodes: Mapping[tuple[str, int], Episode] = field(default_factory=dict)
    questions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path, warn: Note) -> Logged:
        episodes: dict[tuple[str, int], Episode] = {}
        questions: dict[str, str] = {}
        rows = _rows(run, warn) if find_logs(run) else []
        for question, sample, trajectory, valid, em, digest in rows:
            episodes[question, sample] = Episode(trajectory, valid, em)
            questions[question] = digest
        return cls(episodes, questions)

    def changed(self, questions: Sequence[Question]) -> list[str]:
        """The ids of those `questions` that are not as they were asked."""
        return [
            item.id
            for item in questions
            if item.id in self.questions and self.questions[item.id] != question_digest(item)
        ]

    def plan(self, questions: Sequence[Question], n: int) -> Plan:
        """What `n` episodes for each of `questions` take; those that a fault ended are sampled again."""
        wanted, failed, done = [], set(), []
        for key in ((item, sample) for item in questions for sample in range(n)):
            found = self.episodes.get((key[0].id, key[1]))
            if found is not None and found.valid:
                done.append((key[0].id, found.em))
                continue
            wanted.append(key)
            if found is not None:
                failed.add(found.trajectory)
        return Plan(wanted, failed, done)


def _rows(run: Path, warn: Note) -> list[tuple[Any, ...]]:
    return reading([run], lambda log: log.execute(_LOGGED).fetchall(), warn=warn)


class Plan(NamedTuple):
    """The episodes to sample, the trajectories that they replace, and (question id, em) of the others."""

    wanted: list[tuple[Question, int]]
    replaced: set[str]
    done: list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class EvaluationRun:
    """The run of an evaluation, which this process holds."""

    path: Path
    logged: Logged

    @property
    def log(self) -> Path:
        return self.path / LOG


@contextmanager
def evaluation_run(
    subject: Subject,
    questions: Sequence[Question],
    config: Config,
    workspace: Workspace,
    *,
    preset: str,
    digests: IndexDigests,
    fresh: bool = False,
    note: Note = lambda text: None,
) -> Iterator[EvaluationRun]:
    """The run with the key of `subject`, or a new one; no other process evaluates in it meanwhile.

    A run in whose log one of `questions` is another one is left as it is; `note` is told why a new one
    starts. Raises UserError if another process is evaluating the same.
    """
    workspace.runs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with locked(workspace.runs):
            found = None if fresh else _find(subject, questions, workspace, note, held)
            if found is None:
                path = _create(subject, config, workspace, preset, digests)
                held.enter_context(locked(path))
                found = EvaluationRun(path, Logged())
        yield found


def _find(
    subject: Subject, questions: Sequence[Question], workspace: Workspace, note: Note, held: ExitStack
) -> EvaluationRun | None:
    """The newest run with the key of `subject` and the same questions, locked until `held` ends."""
    changes: list[str] = []
    for run in reversed(workspace.all_runs()):
        if not is_evaluation(run) or (before := _subject(run, note)) is None:
            continue
        if before.key != subject.key:
            changes += [f"{what} has changed since {run.name}" for what in subject.changes(before)]
            continue
        held.enter_context(locked(run, f"another process evaluates in {run.name}; wait for it, or stop it"))
        logged = Logged.read(run, note)
        changed = logged.changed(questions)
        if not changed:
            return EvaluationRun(run, logged)
        held.close()
        changes += [f"{len(changed):,} questions have changed since {run.name}, the first is {changed[0]}"]
    if changes:
        note(f"{changes[0]}: a new evaluation starts")
    return None


def _subject(run: Path, note: Note) -> Subject | None:
    """What the evaluation `run` is of; None for one that cannot be read, which `note` is told."""
    if not (run / FILE).is_file() and not (run / LOG).exists():  # killed while created, or not ours
        return None
    try:
        return Subject.read(run)
    except (UserError, OSError) as error:
        note(f"warning: {run.name} is left out: {error}")
        return None


def _create(
    subject: Subject, config: Config, workspace: Workspace, preset: str, digests: IndexDigests
) -> Path:
    """A new run without a log; `evaluation.json` is written last."""
    run = workspace.new_run(preset, EVALUATION, config.trainer.seed)
    save_config(run, config)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    RunRecord(preset, EVALUATION, started, **digests.as_fields()).save(run)
    subject.save(run)
    return run


def run_info(run: Path, subject: Subject, config: Config, digests: IndexDigests) -> RunInfo:
    """What the log says of the run."""
    record = RunRecord.read(run)
    return RunInfo(
        run_id=run.name, preset=record.preset, algo=EVALUATION, seed=config.trainer.seed,
        model=subject.names["model"], config=config.model_dump() | {"setting": subject.setting},
        index_digest=digests.index_digest, srl_version=__version__, started=record.started,
    )  # fmt: skip
