"""The runs of an evaluation: one for each setting, continued by name, and several where it has shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from srl import __version__
from srl.config import Config, load_saved, save_config
from srl.config.keys import flat
from srl.config.load import CHANGEABLE
from srl.errors import UserError
from srl.files import FORMAT, read_json, write_json
from srl.rollout.engine import Engine
from srl.rollout.environment import Environment, Key
from srl.serve.named_retrievers import aclose, connect
from srl.store import QUESTION_DIGEST, LogWriter, Record, RunInfo, find_logs, question_digest, reading
from srl.train.make_missing import Note
from srl.train.run_directory import RunRecord
from srl.train.search import as_inputs
from srl.trajectory import Question, Trajectory
from srl.workspace import EVALUATION, Workspace

FILE = "evaluation.json"
PAUSE_S = 0.25
"""Seconds between two writes to the log."""
_MAY_DIFFER = (*CHANGEABLE, "rollout.engine", "rollout.deterministic", "eval.max_failed",
               "model.path", "model.device", "search.index", "data.corpus", "cluster")  # fmt: skip
"""Keys, and a section, that do not decide what is answered, or whose content is compared instead."""


@dataclass(frozen=True, slots=True)
class About:
    """What a run of an evaluation is of. The runs of its settings and shards have the same `evaluation`."""

    evaluation: str
    setting: str
    indexes: Mapping[str, str] = field(default_factory=dict)
    """The digest of each retriever's index by its name; "" is the default one."""

    @classmethod
    def read(cls, run: Path) -> About:
        """Raises UserError where `run` is not one of an evaluation."""
        if not (run / FILE).is_file():
            raise UserError(f"{run.name} is not an evaluation", key="run")
        return read_json(run / FILE, cls)


def runs_by_setting(directories: Sequence[Path]) -> dict[str, list[Path]]:
    """The runs of the evaluations that `directories` are of, in the order of the names. Raises UserError."""
    runs: dict[str, list[Path]] = {}
    for name in dict.fromkeys(About.read(run).evaluation for run in directories):
        for run in sorted(directories[0].resolve().parent.glob(f"*/{FILE}")):
            about = About.read(run.parent)
            if about.evaluation == name:
                runs.setdefault(about.setting, []).append(run.parent)
    return runs


def check_same(run: Path, config: Config, digests: Mapping[str, str], questions: Iterable[Question]) -> None:
    """Raises UserError where `run` was of another configuration, index, or question of the same id."""
    hint = "leave out --run to start another evaluation"
    before, now = (dict(flat(each.model_dump(mode="json"))) for each in (load_saved(run), config))
    for path in before.keys() | now.keys():
        key, old, new = ".".join(path), before.get(path), now.get(path)
        if old != new and not key.startswith(_MAY_DIFFER):
            raise UserError(f"{key} was {old} in {run.name} and is {new}", key=key, hint=hint)
    if About.read(run).indexes != digests:
        raise UserError(f"{run.name} searched another index", key="search.index", hint=hint)
    logged: dict[str, str] = {}
    if find_logs(run):
        query = f"SELECT question_id, {QUESTION_DIGEST} FROM trajectories"
        logged = dict(reading([run], lambda log: log.execute(query).fetchall()))
    for question in questions:
        if question.id in logged and logged[question.id] != question_digest(question):
            raise UserError(f"the question {question.id} has changed since {run.name}", key="data", hint=hint)


def new_run(
    config: Config, setting: str, evaluation: str, workspace: Workspace, preset: str,
    digests: Mapping[str, str],
) -> Path:  # fmt: skip
    """A new run without a log, of an `evaluation` that has runs, or of one that is called after it."""
    run = workspace.new_run(preset, EVALUATION, config.trainer.seed)
    about = About(evaluation or run.name, setting, digests)
    write_json(run / FILE, {"format": FORMAT, **asdict(about)})
    save_config(run, config)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    RunRecord(preset, EVALUATION, started, inputs=as_inputs(digests)).save(run)
    return run


def run_info(run: Path, setting: str, model: str, config: Config, digests: Mapping[str, str]) -> RunInfo:
    """What the log says of the run."""
    record = RunRecord.read(run)
    return RunInfo(
        run_id=run.name, preset=record.preset, algo=EVALUATION, seed=config.trainer.seed, model=model,
        config=config.model_dump() | {"setting": setting}, index_digest=digests.get("", ""),
        srl_version=__version__, started=record.started,
    )  # fmt: skip


class Plan(NamedTuple):
    """The episodes to sample, the trajectories that they replace, and the exact match of the others."""

    wanted: list[tuple[Question, int]]
    replaced: set[str]
    done: list[float]

    @classmethod
    def of(cls, runs: Sequence[Path], questions: Sequence[Question], n: int, warn: Note) -> Plan:
        """What `n` episodes for each of `questions` take beside those in the logs of `runs`.

        Those that a fault ended are sampled again.
        """
        query = (
            "SELECT question_id, sample, id, valid, coalesce(em, 0) FROM trajectories WHERE phase = 'eval'"
        )
        logs = [run for run in runs if find_logs(run)]
        rows = reading(logs, lambda log: log.execute(query).fetchall(), warn=warn) if logs else []
        valid = {(question, sample): em for question, sample, _, is_valid, em in rows if is_valid}
        failed = {(question, sample): name for question, sample, name, is_valid, _ in rows if not is_valid}
        plan = cls([], set(), [])
        for question in questions:
            for sample in range(n):
                key = (question.id, sample)
                if key in valid:
                    plan.done.append(valid[key])
                else:
                    plan.wanted.append((question, sample))
                    plan.replaced.update({failed[key]} if key in failed else ())
        return plan


async def generate(
    episodes: Sequence[tuple[Question, int]],
    engine: Engine,
    environment: Environment,
    log: LogWriter,
    *,
    at_once: int,
    seed: int = 0,
    on_written: Callable[[Sequence[Trajectory]], None] = lambda trajectories: None,
) -> None:
    """Run an episode for each question and sample number of `episodes`, `at_once` at a time, into `log`.

    What has ended is written every `PAUSE_S`, also where an error ends it, and not kept: memory does not grow
    with the questions. `on_written` is called with it. Raises UserError if a search server does not answer.
    """
    ended, last_write = list[Trajectory](), time.monotonic()

    def write() -> None:
        nonlocal last_write
        batch, ended[:] = ended[:], []
        if batch:
            log.write(0, "eval", [Record(trajectory) for trajectory in batch], {})
            on_written(batch)
        last_write = time.monotonic()

    async def on_done(_: int, trajectory: Trajectory) -> None:
        ended.append(trajectory)
        if time.monotonic() - last_write >= PAUSE_S:
            write()

    keyed = ((question, Key(seed, "eval", 0, sample)) for question, sample in episodes)
    try:
        await connect(environment.search)
        await environment.play_each(engine, keyed, on_done, min(at_once, len(episodes)))
    finally:
        try:
            write()
        finally:
            await aclose(environment.search)
