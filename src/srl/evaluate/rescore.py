"""`srl eval rescore`: other measures of the answers in a run's log, computed by rewards."""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import duckdb
import pyarrow as pa

import srl.store
from srl import process
from srl.config import Config, load_saved
from srl.config.paths import option_paths
from srl.errors import UserError
from srl.evaluate.intervals import Interval, interval
from srl.evaluate.retrieval_metrics import document_of
from srl.files import digest_path
from srl.plugins import manager
from srl.progress import counted
from srl.reward import RewardMix
from srl.store.rescores import drop_rescores, read_rescores, rescore_file, writing_rescores
from srl.store.schema import RESCORE_SCHEMA
from srl.store.stream import read_trajectories
from srl.trajectory import Score, Trajectory

REWARD = "reward"
"""The measure that is the weighted sum."""
_BATCH = 1000
_EPISODES = """
SELECT phase, step, data_source, question_id, metadata, coalesce(em, 0) AS em, value
FROM (SELECT id AS trajectory_id, * FROM trajectories) AS episodes
JOIN rescores USING (run_id, trajectory_id, step, phase)
WHERE rewards = ? AND measure = ?
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """The mean of a measure, and its 95% interval where it is known."""

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
        if not name or not math.isfinite(weight):
            raise UserError(f"--reward {text}: expected NAME or NAME=WEIGHT, as in --reward f1=0.5")
        if name in weights:
            raise UserError(f"--reward {text}: {name} is given twice")
        weights[name] = weight
    return weights


def rescore(run: Path, weights: Mapping[str, float]) -> Rescored:
    """Score the trajectories in the log of `run` with these rewards, and keep the scores in its `rescores`.

    Options of the rewards are those of the run's configuration. Trajectories that the same rewards have
    scored are left out. All scores appear, or none. An episode that a writer replaced meanwhile (a roll-back,
    a resumed run) is scored again. Raises UserError.
    """
    config = load_saved(run)
    rewards = describe(weights, config)
    mixes = {name: RewardMix({name: 1.0}, {name: config.reward.options(name)}) for name in weights}
    replaced: set[str] = set()

    def is_replaced(step: int, phase: str, name: str) -> bool:
        return name in replaced

    try:
        srl.store.open(run).close()  # an error says that there is no log
        (directory,) = srl.store.find_logs(run)
        file = rescore_file(directory, rewards)
        before, scored = len(_ids(read_rescores(file))), 0
        while True:
            with srl.store.open(run) as log:
                episodes = _episodes(log)
                scored += _score_all(log, mixes, weights, rewards, read_rescores(file), file)
            with srl.store.open(run) as log:
                now = _episodes(log)
                # Also one that is gone: sampled again later, it has the same id and would keep the old score.
                replaced = {name for name, one in episodes.items() if now.get(name) != one}
                if not replaced:
                    return Rescored(run.name, rewards, scored, before, _rows(log, rewards, weights))
            drop_rescores(directory, is_replaced, [file])
    except duckdb.Error as error:
        raise UserError(f"the log of {run.name} could not be read: {srl.store.in_one_line(error)}") from error


def describe(weights: Mapping[str, float], config: Config) -> str:
    """The rewards with weights, options and digests: of the files that options name, of a user's own code."""
    return " + ".join(_described(name, weight, config) for name, weight in sorted(weights.items()))


def _described(name: str, weight: float, config: Config) -> str:
    known = manager.find("reward", name)
    options = config.reward.options(name)
    version = [f"code {known.version}"] if manager.is_import_path(name) else []
    more = [*version, *(f"{key}={json.dumps(value)}" for key, value in sorted(options.items()))]
    for (key, *_), _ in option_paths("reward", name, options):
        if (path := Path(options[key])).exists():
            more.append(f"{key} {digest_path(path)[:12]}")
    return f"{name}={weight:g}" + (f" ({', '.join(more)})" if more else "")


def _episodes(log: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """The trajectories by id, each with a number that is another once its episode was sampled again."""
    query = 'SELECT id, hash(step, answer, "end", attempt, tokens, seconds) FROM trajectories'
    return dict(log.execute(query).fetchall())


def _ids(table: pa.Table) -> set[str]:
    return set(table["trajectory_id"].to_pylist())


def _score_all(
    log: duckdb.DuckDBPyConnection,
    mixes: Mapping[str, RewardMix],
    weights: Mapping[str, float],
    rewards: str,
    known: pa.Table,
    file: Path,
) -> int:
    """Write the scores of all trajectories that `known` lacks; how many they are."""
    logged = log.execute("SELECT run_id, id FROM trajectories").fetchall()
    if not logged:
        raise UserError("the log has no episodes yet")
    missing, scored = {trajectory for _, trajectory in logged} - _ids(known), 0
    if not missing:
        return 0
    now = datetime.now(UTC).replace(tzinfo=None)
    with (
        asyncio.Runner() as runner,
        writing_rescores(file) as write,
        counted("rescoring", len(missing)) as count,
    ):
        write(known)
        for batch in read_trajectories(log, _BATCH):
            new = [item for item in batch if item.id in missing]
            write(_table(logged[0][0], new, _scores(mixes, weights, new, runner), rewards, now))
            scored += len(new)
            count(scored)
    return scored


def _scores(
    rewards: Mapping[str, RewardMix], weights: Mapping[str, float], trajectories: list[Trajectory],
    runner: asyncio.Runner,
) -> list[Score]:  # fmt: skip
    """The weighted sum of all rewards, and each as a part. Raises UserError that names the reward, for what
    it raises and for no score, whatever its weight."""
    columns = []
    for name, reward in rewards.items():
        with manager.named_errors(manager.find("reward", name)):
            columns.append(process.run_async(reward.score(trajectories), runner))
        for trajectory, score in zip(trajectories, columns[-1], strict=True):
            if score.error:
                raise UserError(
                    f"episode {trajectory.id}: {score.error}; nothing was kept, repair it and repeat"
                )
    return [
        Score(
            sum(weights[name] * score.value for name, score in zip(rewards, scores, strict=True)),
            {k: v for score in scores for k, v in score.parts.items()},
        )
        for scores in zip(*columns, strict=True)
    ]


def _table(
    run_id: str, trajectories: Sequence[Trajectory], scores: Sequence[Score], rewards: str, now: datetime
) -> pa.Table:
    """One row per measure of each trajectory."""
    rows = [
        (trajectory.id, trajectory.step, trajectory.phase, measure, value)
        for trajectory, score in zip(trajectories, scores, strict=True)
        for measure, value in {REWARD: score.value, **score.parts}.items()
    ]
    ids, steps, phases, measures, values = zip(*rows, strict=True) if rows else [()] * 5
    columns = [[run_id] * len(rows), ids, steps, phases, [rewards] * len(rows), measures, values]
    return pa.Table.from_arrays(
        [
            pa.array(column, field.type)
            for column, field in zip([*columns, [now] * len(rows)], RESCORE_SCHEMA, strict=True)
        ],
        schema=RESCORE_SCHEMA,
    )


def _rows(log: duckdb.DuckDBPyConnection, rewards: str, weights: Mapping[str, float]) -> list[Row]:
    """The first and the last step of each phase, each data source where there are several."""
    measures = [*weights, *([REWARD] if len(weights) > 1 or set(weights.values()) != {1.0} else [])]
    episodes = {measure: log.execute(_EPISODES, [rewards, measure]).fetchall() for measure in measures}
    wanted = _wanted(episodes[measures[0]])
    grouped = {measure: _grouped(found, wanted) for measure, found in episodes.items()}
    return [
        Row(*key, len(found), _of(found, "em"), {name: _of(grouped[name][key], "value") for name in measures})
        for key, found in sorted(grouped[measures[0]].items())
    ]


def _wanted(episodes: Sequence[tuple[Any, ...]]) -> set[tuple[str, int]]:
    steps = defaultdict(set)
    for phase, step, *_ in episodes:
        steps[phase].add(step)
    return {(phase, step) for phase, found in steps.items() for step in (min(found), max(found))}


def _grouped(
    episodes: Sequence[tuple[Any, ...]], wanted: set[tuple[str, int]]
) -> dict[tuple[str, int, str], list[tuple[Any, ...]]]:
    """Episodes by phase, step and data source; "" holds all sources, and is alone where there is one."""
    found = defaultdict(list)
    for episode in episodes:
        phase, step, source = episode[:3]
        if (phase, step) in wanted:
            found[phase, step, source].append(episode)
            found[phase, step, ""].append(episode)
    sizes = {key: len(rows) for key, rows in found.items()}
    return {key: rows for key, rows in found.items() if not key[2] or sizes[key] < sizes[*key[:2], ""]}


def _of(episodes: Sequence[tuple[Any, ...]], name: str) -> Measured:
    """The mean over questions, of their samples' means; questions of one document count as a cluster."""
    groups, documents = defaultdict(list), {}
    for *_, question, metadata, em, value in episodes:
        groups[question].append(float(em if name == "em" else value))
        if question not in documents:
            documents[question] = document_of(json.loads(metadata)) or (question,)
    return measured(list(groups.values()), list(documents.values()))


def measured(groups: Sequence[Sequence[float]], clusters: Sequence[Hashable] | None = None) -> Measured:
    """The mean over groups with its interval; values outside [0, 1] have none."""
    means = [fmean(group) for group in groups]
    inside = 0 <= min(means) <= max(means) <= 1
    return Measured(fmean(means), interval(means, clusters) if inside else None)
