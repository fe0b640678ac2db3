"""A filter over a log: right episodes as demonstrations, each once, a few for each question.

Rejection sampling takes the ids that were sampled and their masks as they are; nothing is encoded again.
`srl data demonstrations --from-log` writes the text of the turns, for any model, and `srl data prepare
--from-log` keeps the questions of the episodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb

from srl.browse.sql import expression, sql
from srl.data.demonstration_file import Demonstrations, save_demonstrations, turns_of
from srl.errors import UserError
from srl.safe import quoted
from srl.store import LogWriter, RunInfo, read_records, read_with_rows, reading
from srl.store.reader import find_logs
from srl.train.run_directory import LOG
from srl.trajectory import Trajectory

PER_QUESTION = 4
"""Most sampled episodes of a question that are kept."""
_TRAINED = "phase = 'train' AND valid"
"""Validation and test questions are never trained on, and an episode cut short would teach to stop there."""
_WHOLE = """
    valid AND "end" = 'answered' AND valid_actions = turns AND phase NOT IN ('val', 'test')
    AND id NOT IN (SELECT trajectory_id FROM searches WHERE repeated)
"""
"""An episode to learn from: each turn is a search or the answer, and no query is repeated. What a run was
validated and tested with is never trained on."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The episodes that are kept, in the order of their steps and questions, and how many fell away where.

    `sampled` are the training episodes of the log, `passed` those that satisfy the condition, and `distinct`
    those of them with other tokens than every other of their question.
    """

    episodes: list[Trajectory]
    sampled: int
    passed: int
    distinct: int

    @property
    def questions(self) -> int:
        return len({episode.question.id for episode in self.episodes})

    @property
    def policy_tokens(self) -> int:
        return sum(episode.policy_tokens for episode in self.episodes)

    def metrics(self) -> dict[str, float]:
        """The counts, as a step's metrics."""
        return {
            "sft/sampled": self.sampled, "sft/passed": self.passed, "sft/distinct": self.distinct,
            "sft/episodes": len(self.episodes), "sft/questions": self.questions,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The counts in words, also by data source."""
        yield (
            f"{len(self.episodes):,} episodes of {self.questions:,} questions, {self.policy_tokens:,} tokens "
            f"of the policy (of {self.sampled:,} sampled {self.passed:,} pass the filter, "
            f"{self.distinct:,} of them distinct)"
        )
        sources = Counter(episode.question.data_source for episode in self.episodes)
        yield "by data source: " + ", ".join(f"{name} {count:,}" for name, count in sorted(sources.items()))


def select_episodes(
    log: Path, condition: str, seed: int, step: int | None = None, *, per_question: int = PER_QUESTION
) -> Selection:
    """The training episodes of the log at `log` (of one step) that satisfy `condition`.

    `condition` is SQL over the columns of `trajectories`. Of episodes of one question with the same tokens of
    the policy one is kept, and of more than `per_question` distinct ones a random choice. Raises UserError
    for a path without exactly one log, for a condition that DuckDB does not take, and where nothing is left.
    """
    if len(logs := find_logs(log)) != 1:
        problem = f"{len(logs)} logs" if logs else "no log"
        raise UserError(f"{log} has {problem}: expected the directory of one run, or its log")

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[int, list[Trajectory]]:
        step_condition = "true" if step is None else f"step = {step:d}"
        sampled = passing(connection, f"{_TRAINED} AND {step_condition}")
        ids = sorted(sampled & passing(connection, condition))
        records = read_records(connection, "list_contains(?, id)", [ids]) if ids else []
        return len(sampled), [record.trajectory for record in records]

    sampled, passed = reading([log], read)
    if not passed:
        what = f"none of {sampled:,} training episodes of {log} satisfies the filter '{quoted(condition)}'"
        raise UserError(what, key="sft.filter", hint="loosen it, or sample more")
    passed.sort(key=lambda episode: (episode.step, episode.question.id, episode.sample))
    distinct = _distinct(
        passed, lambda episode: tuple(each.token_ids for each in episode.segments if each.is_policy)
    )
    return Selection(_at_most(distinct, per_question, seed), sampled, len(passed), len(distinct))


def check_filter(condition: str) -> None:
    """Raises UserError where DuckDB does not take `condition`, whatever the episodes."""
    with TemporaryDirectory() as folder:
        with LogWriter(Path(folder) / LOG, RunInfo("none")) as log:
            log.write(0, "train", [], {})
        reading([Path(folder)], lambda connection: passing(connection, condition))


def _distinct(episodes: Sequence[Trajectory], key: Callable[[Trajectory], Hashable]) -> list[Trajectory]:
    """The first of the episodes of a question with the same key."""
    first: dict[Hashable, Trajectory] = {}
    for episode in episodes:
        first.setdefault((episode.question.id, key(episode)), episode)
    return list(first.values())


def _at_most(episodes: list[Trajectory], per_question: int, seed: int) -> list[Trajectory]:
    """At most so many episodes of each question, chosen at random, in their order."""
    rng, counts, places = random.Random(f"episodes {seed}"), Counter[str](), set[int]()
    for place in rng.sample(range(len(episodes)), len(episodes)):
        question = episodes[place].question.id
        if counts[question] < per_question:
            counts[question] += 1
            places.add(place)
    return [episode for place, episode in enumerate(episodes) if place in places]


def write_logged_demonstrations(
    log: Path, out: Path, condition: str = "em = 1", per_question: int = 1
) -> Demonstrations:
    """Write the text of the episodes of a log that satisfy `condition`, SQL over `trajectories`.

    Of a question there are at most `per_question`, no two with the same queries. Raises UserError, and
    CheckFailed where there is none to write.
    """

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[Counter[tuple[str, str]], list[Trajectory]]:
        ids = sorted(passing(connection, _WHOLE) & passing(connection, condition))
        records = read_with_rows(connection, "list_contains(?, id)", [ids], "texts") if ids else []
        query = "SELECT data_source, count(*) FROM trajectories GROUP BY 1"
        sources = {(source, _LEFT_OUT): count for source, count in sql(connection, query).rows}
        return Counter(sources), [record.trajectory for record, _ in records]

    left_out, passed = reading([log], read)
    passed.sort(key=lambda episode: (episode.question.id, episode.step, episode.sample))
    distinct = _distinct(
        passed, lambda episode: tuple(" ".join(each.query.casefold().split()) for each in episode.searches)
    )
    episodes = _at_most(distinct, per_question, seed=0)
    left_out.subtract((episode.question.data_source, _LEFT_OUT) for episode in episodes)
    questions = [
        replace(episode.question, metadata={**episode.question.metadata, "turns": turns_of(episode)})
        for episode in episodes
    ]
    return save_demonstrations(out, questions, +left_out)


_LEFT_OUT = "episodes that are not whole, fail the filter or are like another"


def questions_where(log: Path, condition: str) -> set[str]:
    """The ids of the questions whose episodes in a log satisfy `condition`.

    It is SQL over the groups of `trajectories` with one question, such as `avg(em) BETWEEN .2 AND .8`.
    Raises UserError, also where there is none.
    """
    having = expression(condition, "where")
    query = f"SELECT question_id FROM trajectories WHERE valid GROUP BY question_id HAVING {having}"
    ids = reading([log], lambda connection: {row[0] for row in sql(connection, query).rows})
    if not ids:
        raise UserError(f"no question of {log} satisfies '{condition}'", key="where")
    return ids


def passing(connection: duckdb.DuckDBPyConnection, condition: str) -> set[str]:
    """The ids of the episodes that satisfy `condition`, by a query that can only read. Raises UserError."""
    try:
        query = f"SELECT id FROM trajectories WHERE {expression(condition, 'where')}"
        return {row[0] for row in sql(connection, query).rows}
    except UserError as error:
        what = f"the filter '{quoted(condition)}' is not a condition on trajectories"
        raise UserError(f"{what}: {error}") from error
