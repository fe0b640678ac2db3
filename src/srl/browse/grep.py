"""Finding text in a log: what the policy wrote, what it read, queries, questions and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb

from srl.browse.trajectories import Filter
from srl.errors import UserError, nearest
from srl.store import in_one_line, rows

_SEGMENTS = "SELECT run_id, trajectory_id AS id, turn, text AS body FROM segments WHERE kind = '{kind}'"
_SOURCES = {
    "policy": _SEGMENTS.format(kind="policy"),
    "observation": _SEGMENTS.format(kind="observation"),
    "feedback": _SEGMENTS.format(kind="feedback"),
    "prompt": _SEGMENTS.format(kind="prompt"),
    "query": "SELECT run_id, trajectory_id AS id, turn, query AS body FROM searches",
    "question": "SELECT run_id, id, 0 AS turn, question AS body FROM trajectories",
    "answer": "SELECT run_id, id, turns - 1 AS turn, answer AS body FROM trajectories",
}
PLACES = tuple(_SOURCES)
"""Where text can be searched for."""
USUAL = ("policy", "observation", "query")

MEMORY, FEW = "768MB", 1000
"""What DuckDB may take for at most so many rows; it would keep most of a large log's text, to no use."""

_AROUND = 60
"""Characters of an excerpt before and after the match."""


def grep(
    connection: duckdb.DuckDBPyConnection,
    text: str,
    chosen: Filter,
    *,
    places: Sequence[str] = USUAL,
    regex: bool = False,
    case: bool = False,
    limit: int | None = 20,
) -> list[dict[str, Any]]:
    """Where `text` occurs in the trajectories `chosen`, the latest step first: a row a segment or query.

    Each has `run_id`, `id`, `step`, `phase`, `place`, `turn` and an `excerpt`. A `regex` is one of RE2, in
    linear time. Raises UserError for an empty text, an unknown place and a wrong expression.
    """
    if not text:
        raise UserError("nothing to look for; type: srl inspect grep TEXT")
    for place in places:
        if place not in PLACES:
            raise UserError(f"--in {place}: expected one of {', '.join(PLACES)}{nearest(place, PLACES)}")
    condition, hit = _condition(regex, case)
    where, parameters = chosen.where()
    for number in range(len(parameters)):
        where = where.replace("?", f"$p{number}", 1)
    union = " UNION ALL ".join(f"SELECT '{place}' AS place, * FROM ({_SOURCES[place]})" for place in places)
    query = f"""
        SELECT run_id, id, step, phase, em, place, turn, body, {hit} AS hit FROM ({union}) AS found
        JOIN (SELECT run_id, id, step, phase, em, position FROM trajectories WHERE {where})
            USING (run_id, id)
        WHERE {condition} ORDER BY step DESC, run_id, phase, position, turn, place
        {"" if limit is None else f"LIMIT {int(limit)}"}
    """
    given = {f"p{number}": value for number, value in enumerate(parameters)} | {"text": text}
    try:
        found = rows(connection, query, given)
    except duckdb.InvalidInputException as error:
        if not regex:
            raise
        raise UserError(f"--regex {text}: not a regular expression of RE2 ({in_one_line(error)})") from error
    return [_with_excerpt(row) for row in found]


def _condition(regex: bool, case: bool) -> tuple[str, str]:
    """The SQL condition on `body`, and the SQL of the text that matched; both take $text."""
    if regex:
        options = "s" if case else "is"
        return f"regexp_matches(body, $text, '{options}')", f"regexp_extract(body, $text, 0, '{options}')"
    return "contains(body, $text)" if case else "contains(lower(body), lower($text))", "$text"


def _with_excerpt(row: dict[str, Any]) -> dict[str, Any]:
    """The row with an `excerpt` around the first match in place of the whole text."""
    body, hit = row.pop("body"), row.pop("hit")
    start = max(body.find(hit), 0) or max(body.lower().find(hit.lower()), 0)
    first, last = max(start - _AROUND, 0), min(start + len(hit) + _AROUND, len(body))
    excerpt = " ".join(body[first:last].split())
    return row | {"excerpt": ("…" if first else "") + excerpt + ("…" if last < len(body) else "")}
