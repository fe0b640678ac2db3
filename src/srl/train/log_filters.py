"""Filters over a log: right episodes as demonstrations, and the questions that its episodes are about."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb

from srl.browse.sql import sql
from srl.data.demonstration_file import write_demonstrations
from srl.errors import CheckFailed, UserError
from srl.protocol import STOP_STRINGS
from srl.safe import quoted
from srl.store import read_with_rows, reading
from srl.trajectory import Question, Trajectory

_WHOLE = """
    valid AND "end" = 'answered' AND valid_actions = turns AND phase NOT IN ('val', 'test')
    AND id NOT IN (SELECT trajectory_id FROM searches WHERE repeated)
"""
"""An episode to learn from: each turn is a search or the answer, and no query is repeated. What a run was
validated and tested with is never trained on."""


@dataclass(frozen=True, slots=True)
class LoggedDemonstrations:
    """What was written to `file`; of the `episodes` of the log `passed` satisfy the condition."""

    file: Path
    episodes: int
    passed: int
    questions: int
    demonstrations: int


def write_logged_demonstrations(
    log: Path, out: Path, condition: str = "em = 1", per_question: int = 1
) -> LoggedDemonstrations:
    """Write the episodes of a log that satisfy `condition`, SQL over the columns of `trajectories`.

    Of a question there are at most `per_question`, no two with the same queries. Raises UserError, and
    CheckFailed where there is none to write.
    """

    def read(connection: duckdb.DuckDBPyConnection) -> tuple[int, list[Trajectory]]:
        episodes = sql(connection, "SELECT count(*) FROM trajectories").rows[0][0]
        ids = sorted(passing(connection, _WHOLE) & passing(connection, condition))
        records = read_with_rows(connection, "list_contains(?, id)", [ids], "texts") if ids else []
        return episodes, [record.trajectory for record, _ in records]

    episodes, passed = reading([log], read)
    written: list[Question] = []
    kept, queries = Counter[str](), defaultdict[str, set[tuple[str, ...]]](set)
    for episode in sorted(passed, key=lambda each: (each.question.id, each.step, each.sample)):
        question, asked = episode.question, _normal(search.query for search in episode.searches)
        if kept[question.id] < per_question and asked not in queries[question.id]:
            kept[question.id] += 1
            queries[question.id].add(asked)
            written.append(replace(question, metadata={**question.metadata, "turns": turns_of(episode)}))
    if not written:
        raise CheckFailed(f"none of {episodes:,} episodes in {log} is whole and satisfies '{condition}'")
    write_demonstrations(out, written)
    return LoggedDemonstrations(out, episodes, len(passed), len(kept), len(written))


def questions_where(log: Path, condition: str) -> set[str]:
    """The ids of the questions whose episodes in a log satisfy `condition`.

    It is SQL over the groups of `trajectories` with one question, such as `avg(em) BETWEEN .2 AND .8`.
    Raises UserError, also where there is none.
    """
    query = f"SELECT question_id FROM trajectories WHERE valid GROUP BY question_id HAVING (\n{condition}\n)"
    ids = reading([log], lambda connection: {row[0] for row in sql(connection, query).rows})
    if not ids:
        raise UserError(f"no question of {log} satisfies '{condition}'", key="where")
    return ids


def passing(connection: duckdb.DuckDBPyConnection, condition: str) -> set[str]:
    """The ids of the episodes that satisfy `condition`, by a query that can only read. Raises UserError."""
    query = f"SELECT id FROM trajectories WHERE (\n{condition}\n)"
    try:
        return {row[0] for row in sql(connection, query).rows}
    except UserError as error:
        what = f"the filter '{quoted(condition)}' is not a condition on trajectories"
        raise UserError(f"{what}: {error}") from error


def _normal(queries: Iterable[str]) -> tuple[str, ...]:
    """Queries as they are compared: without case and additional spaces."""
    return tuple(" ".join(text.casefold().split()) for text in queries)


def turns_of(trajectory: Trajectory) -> list[str]:
    """The text of each turn through its closing tag, without what the last token wrote after it."""
    texts = (segment.text for segment in trajectory.segments if segment.is_policy)
    return [text[: _end(text)] for text in texts]


def _end(text: str) -> int:
    return min((text.index(stop) + len(stop) for stop in STOP_STRINGS if stop in text), default=len(text))
