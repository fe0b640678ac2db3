"""`srl eval rescore`: other measures of the answers in a run's log, computed by rewards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import duckdb
import pyarrow as pa

import srl.store
from srl.config import Config, load_saved
from srl.config.paths import option_paths
from srl.errors import UserError
from srl.evaluate.intervals import Interval, interval
from srl.evaluate.retrieval_metrics import document_of
from srl.files import digest_path
from srl.plugins import manager
from srl.process import run_async
from srl.progress import counted
from srl.reward import RewardMix
from srl.store.batches import batches
from srl.store.rescores import read_rescores, rescore_file, writing_rescores
from srl.store.schema import RESCORE_SCHEMA
from srl.trajectory import Score, Trajectory

_QUESTIONS = """
SELECT phase, step, any_value(metadata), question_id, count(*), avg(coalesce(em, 0)), measure,
    avg(value)
FROM (SELECT id AS trajectory_id, * FROM trajectories) AS episodes
JOIN rescores USING (run_id, trajectory_id, step, phase)
WHERE rewards = $rewards AND (phase, step) IN (
    SELECT (phase, unnest([min(step), max(step)])) FROM trajectories GROUP BY phase
)
GROUP BY phase, step, question_id, measure ORDER BY phase, step, question_id
"""
"""The means over the samples of each question, in the first and the last step of each phase."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean of a measure over questions, and its 95% interval where its values are from 0 to 1."""

    mean: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Row:
    """The episodes of a phase and step: the old EM and the new measures."""

    phase: str
    step: int
    episodes: int
    em: Measured
    measures: Mapping[str, Measured]


@dataclass(frozen=True, slots=True)
class Rescored:
    """What `rescore` did: `scored` trajectories now; `before` had been scored by the same rewards earlier."""

    run: str
    rewards: str
    scored: int
    before: int
    rows: Sequence[Row]


def rescore(run: Path, names: Sequence[str]) -> Rescored:
    """Score the trajectories in the log of `run` with these rewards, and keep the scores in its `rescores`.

    Options of the rewards are those of the run's configuration. Trajectories that the same rewards have
    scored are left out. All scores appear, or none. Raises UserError.
    """
    config, names = load_saved(run), sorted(set(names))
    rewards = " + ".join(describe(name, config) for name in names)
    mixes = {name: RewardMix({name: 1.0}, {name: config.reward.options(name)}) for name in names}
    try:
        with srl.store.open(run) as log:
            (directory,) = srl.store.find_logs(run)
            file = rescore_file(directory, rewards)
            before = read_rescores(file)
            scored_ids = set(before["trajectory_id"].to_pylist())
            scored = _score_all(log, mixes, rewards, before, scored_ids, file)
        with srl.store.open(run) as log:
            return Rescored(run.name, rewards, scored, len(scored_ids), _rows(log, rewards, names))
    except duckdb.Error as error:
        raise UserError(f"the log of {run.name} could not be read: {srl.store.in_one_line(error)}") from error


def describe(name: str, config: Config) -> str:
    """A reward with its options and digests: of the files that options name, of a user's own code."""
    plugin = manager.find("reward", name)
    options = config.reward.options(name)
    parts = [f"code {plugin.version}"] if manager.is_import_path(name) else []
    parts += [f"{key}={json.dumps(value)}" for key, value in sorted(options.items())]
    for (key, *_), _ in option_paths("reward", name, options):
        if (path := Path(options[key])).exists():
            parts.append(f"{key} {digest_path(path)[:12]}")
    return name + (f" ({', '.join(parts)})" if parts else "")


def _score_all(
    log: duckdb.DuckDBPyConnection,
    mixes: Mapping[str, RewardMix],
    rewards: str,
    before: pa.Table,
    scored_ids: set[str],
    file: Path,
) -> int:
    """Write the scores of the trajectories not in `scored_ids`, after `before`; how many they are."""
    ids = {name for (name,) in log.execute("SELECT id FROM trajectories").fetchall()}
    scored, missing = 0, ids - scored_ids
    if not ids:
        raise UserError("the log has no episodes yet")
    if not missing:
        return 0
    ((run_id,),) = log.execute("SELECT DISTINCT run_id FROM trajectories").fetchall()
    now = datetime.now(UTC).replace(tzinfo=None)
    with (
        asyncio.Runner() as runner,
        writing_rescores(file) as write,
        counted("rescoring", len(missing)) as count,
    ):
        write(before)
        for batch in batches(log):
            trajectories = [record.trajectory for record, _ in batch]
            new = [trajectory for trajectory in trajectories if trajectory.id in missing]
            rows = [
                (run_id, trajectory.id, trajectory.step, trajectory.phase, rewards, measure, value, now)
                for name, mix in mixes.items()
                for trajectory, score in zip(new, _scores(name, mix, new, runner), strict=True)
                for measure, value in score.parts.items()
            ]
            columns = [dict(zip(RESCORE_SCHEMA.names, row, strict=True)) for row in rows]
            write(pa.Table.from_pylist(columns, RESCORE_SCHEMA))
            scored += len(new)
            count(scored)
    return scored


def _scores(name: str, mix: RewardMix, trajectories: list[Trajectory], runner: asyncio.Runner) -> list[Score]:
    """The scores by one reward. Raises UserError that names it, for what it raises and for no score."""
    with manager.named_errors(manager.find("reward", name)):
        scores = run_async(mix.score(trajectories), runner)
    for trajectory, score in zip(trajectories, scores, strict=True):
        if score.error:
            raise UserError(f"episode {trajectory.id}: {score.error}; nothing was kept")
    return scores


def _rows(log: duckdb.DuckDBPyConnection, rewards: str, measures: Sequence[str]) -> list[Row]:
    """The first and the last step of each phase."""
    groups: dict[tuple[str, int], dict[str, list[tuple[int, float, float, Hashable]]]] = {}
    for phase, step, metadata, question, count, em, measure, value in log.execute(
        _QUESTIONS, {"rewards": rewards}
    ).fetchall():
        document = document_of(json.loads(metadata)) or (question,)
        groups.setdefault((phase, step), {}).setdefault(measure, []).append((count, em, value, document))
    rows = []
    for (phase, step), by_measure in groups.items():
        counts, ems, _, documents = zip(*by_measure[measures[0]], strict=True)
        new = {name: mean_of([value for _, _, value, _ in by_measure[name]], documents) for name in measures}
        rows.append(Row(phase, step, sum(counts), mean_of(ems, documents), new))
    return rows


def mean_of(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Measured:
    """The mean over questions with its interval; values outside [0, 1] have none."""
    inside = 0 <= min(values) <= max(values) <= 1
    return Measured(fmean(values), interval(values, clusters) if inside else None)
