"""`srl eval rescore`: other measures of the answers in a run's log, computed by rewards."""

from __future__ import annotations

import asyncio
import json
import math
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
from srl.store.beside import read_rescores, rescore_file, writing_rescores
from srl.store.schema import RESCORE_SCHEMA
from srl.trajectory import Score, Trajectory

REWARD = "reward"
"""The measure that is the weighted sum."""
_QUESTIONS = """
SELECT phase, step, data_source, any_value(metadata), question_id, count(*), avg(coalesce(em, 0)), measure,
    avg(value)
FROM (SELECT id AS trajectory_id, * FROM trajectories) AS episodes
JOIN rescores USING (run_id, trajectory_id, step, phase)
WHERE rewards = $rewards AND (phase, step) IN (
    SELECT (phase, unnest([min(step), max(step)])) FROM trajectories GROUP BY phase
)
GROUP BY phase, step, data_source, question_id, measure ORDER BY phase, step, data_source, question_id
"""
"""The means over the samples of each question, in the first and the last step of each phase."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean of a measure over questions, and its 95% interval where its values are from 0 to 1."""

    mean: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class Row:
    """The episodes of a phase and step, of one data source or all (""): the old EM and the new measures."""

    phase: str
    step: int
    source: str
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


def parse_rewards(texts: Sequence[str]) -> dict[str, float]:
    """The weights of `NAME[=WEIGHT]` or `module:Class[=WEIGHT]`. Raises UserError."""
    weights: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            weight = float(number) if equals else 1.0
        except ValueError:
            weight = math.nan
        if not name or not math.isfinite(weight) or name in weights:
            raise UserError(f"--reward {text}: expected NAME or NAME=WEIGHT, each name once", key="reward")
        weights[name] = weight
    return weights


def rescore(run: Path, weights: Mapping[str, float]) -> Rescored:
    """Score the trajectories in the log of `run` with these rewards, and keep the scores in its `rescores`.

    Options of the rewards are those of the run's configuration. Trajectories that the same rewards have
    scored are left out. All scores appear, or none. Raises UserError.
    """
    config = load_saved(run)
    rewards = " + ".join(describe(name, weight, config) for name, weight in sorted(weights.items()))
    mixes = {name: RewardMix({name: 1.0}, {name: config.reward.options(name)}) for name in weights}
    try:
        with srl.store.open(run) as log:
            (directory,) = srl.store.find_logs(run)
            file = rescore_file(directory, rewards)
            known = read_rescores(file)
            done = set(known["trajectory_id"].to_pylist())
            scored = _score_all(log, run, mixes, weights, rewards, known, done, file)
        with srl.store.open(run) as log:
            return Rescored(run.name, rewards, scored, len(done), _rows(log, rewards, weights))
    except duckdb.Error as error:
        raise UserError(f"the log of {run.name} could not be read: {srl.store.in_one_line(error)}") from error


def describe(name: str, weight: float, config: Config) -> str:
    """A reward with weight, options and digests: of the files that options name, of a user's own code."""
    plugin = manager.find("reward", name)
    options = config.reward.options(name)
    parts = [f"code {plugin.version}"] if manager.is_import_path(name) else []
    parts += [f"{key}={json.dumps(value)}" for key, value in sorted(options.items())]
    for (key, *_), _ in option_paths("reward", name, options):
        if (path := Path(options[key])).exists():
            parts.append(f"{key} {digest_path(path)[:12]}")
    return f"{name}={weight:g}" + (f" ({', '.join(parts)})" if parts else "")


def _episodes(log: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """The trajectories by id, each with a number that is another once its episode was sampled again."""
    query = 'SELECT id, hash(step, answer, "end", attempt, tokens, seconds) FROM trajectories'
    return dict(log.execute(query).fetchall())


def _score_all(
    log: duckdb.DuckDBPyConnection,
    run: Path,
    mixes: Mapping[str, RewardMix],
    weights: Mapping[str, float],
    rewards: str,
    known: pa.Table,
    done: set[str],
    file: Path,
) -> int:
    """Write the scores of all trajectories that are not `done`, beside those `known`; how many they are.

    Raises UserError, and writes nothing, if a resumed run has replaced an episode meanwhile: its id would
    keep the score of another answer.
    """
    episodes, scored = _episodes(log), 0
    missing = episodes.keys() - done
    if not episodes:
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
        write(known)
        for batch in batches(log):
            trajectories = [record.trajectory for record, _ in batch.pairs]
            new = [trajectory for trajectory in trajectories if trajectory.id in missing]
            scores = _scores(mixes, weights, new, runner)
            rows = [
                (run_id, trajectory.id, trajectory.step, trajectory.phase, rewards, measure, value, now)
                for trajectory, score in zip(new, scores, strict=True)
                for measure, value in {REWARD: score.value, **score.parts}.items()
            ]
            columns = [dict(zip(RESCORE_SCHEMA.names, row, strict=True)) for row in rows]
            write(pa.Table.from_pylist(columns, RESCORE_SCHEMA))
            scored += len(new)
            count(scored)
        with srl.store.open(run) as later:
            if episodes.items() - _episodes(later).items():
                raise UserError(
                    "episodes were replaced meanwhile; nothing was kept", hint="repeat the command"
                )
    return scored


def _scores(
    rewards: Mapping[str, RewardMix],
    weights: Mapping[str, float],
    trajectories: list[Trajectory],
    runner: asyncio.Runner,
) -> list[Score]:
    """The weighted sum of all rewards, and each as a part. Raises UserError that names the reward, for what
    it raises and for no score, whatever its weight."""
    columns = []
    for name, reward in rewards.items():
        with manager.named_errors(manager.find("reward", name)):
            columns.append(run_async(reward.score(trajectories), runner))
        for trajectory, score in zip(trajectories, columns[-1], strict=True):
            if score.error:
                raise UserError(f"episode {trajectory.id}: {score.error}; nothing was kept")
    return [
        Score(
            sum(weights[name] * score.value for name, score in zip(rewards, scores, strict=True)),
            {part: value for score in scores for part, value in score.parts.items()},
        )
        for scores in zip(*columns, strict=True)
    ]


def _rows(log: duckdb.DuckDBPyConnection, rewards: str, weights: Mapping[str, float]) -> list[Row]:
    """The first and the last step of each phase, and each data source where there are several."""
    measures = [*weights, *([REWARD] if len(weights) > 1 or set(weights.values()) != {1.0} else [])]
    groups: dict[tuple[str, int, str], dict[str, list[tuple[int, float, float, Hashable]]]] = {}
    for phase, step, source, metadata, question, count, em, measure, value in log.execute(
        _QUESTIONS, {"rewards": rewards}
    ).fetchall():
        document = document_of(json.loads(metadata)) or (question,)
        for key in ((phase, step, source), (phase, step, "")):
            groups.setdefault(key, {}).setdefault(measure, []).append((count, em, value, document))
    rows = []
    for (phase, step, source), by_measure in sorted(groups.items()):
        counts, ems, _, documents = zip(*by_measure[measures[0]], strict=True)
        if source and len(counts) == len(groups[phase, step, ""][measures[0]]):
            continue  # the only source
        values = {measure: [value for _, _, value, _ in by_measure[measure]] for measure in measures}
        new = {measure: mean_of(values[measure], documents) for measure in measures}
        rows.append(Row(phase, step, source, sum(counts), mean_of(ems, documents), new))
    return rows


def mean_of(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Measured:
    """The mean over questions with its interval; values outside [0, 1] have none."""
    inside = 0 <= min(values) <= max(values) <= 1
    return Measured(fmean(values), interval(values, clusters) if inside else None)
