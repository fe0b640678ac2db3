"""What the queries of an episode would have brought from another index, beside what they brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from srl.answers import contains_answer
from srl.errors import UserError
from srl.index import Index
from srl.index.retriever import Fault
from srl.trajectory import Hit, Search, Trajectory


@dataclass(frozen=True, slots=True)
class Replay:
    """One search again: `pairs` are the logged hit and the other index's at each rank, None beyond the last.

    `gold` and `gold_now` count the hits with a golden answer, then and now; `common` the passages in both.
    """

    search: Search
    pairs: tuple[tuple[Hit | None, Hit | None], ...]
    gold: int
    gold_now: int
    common: int

    @property
    def hits_now(self) -> int:
        """How many hits the other index has."""
        return sum(now is not None for _, now in self.pairs)


def replay(trajectory: Trajectory, index: Index, k: int | None = None) -> list[Replay]:
    """Each search of `trajectory`, sent to `index`, for `k` hits (None: as many as it brought at most).

    Raises UserError for an episode without a search, and for a query that `index` does not answer.
    """
    searches = [search for search in trajectory.searches if search.query.strip()]
    if not searches:
        raise UserError(f"trajectory {trajectory.id} has no search to replay")
    wanted = k or max(len(search.hits) for search in searches) or 3
    outcomes = index.outcomes([search.query for search in searches], wanted)
    golds = trajectory.question.golden_answers
    return [_beside(*pair, golds) for pair in zip(searches, outcomes, strict=True)]


def _beside(search: Search, found: list[Hit] | Fault, golds: Sequence[str]) -> Replay:
    if isinstance(found, Fault):
        raise UserError(f"no answer to {search.query!r}: {found}")
    longest = max(len(search.hits), len(found))
    pairs = tuple((_at(search.hits, rank), _at(found, rank)) for rank in range(longest))
    was, now = ({hit.passage.contents for hit in hits} for hits in (search.hits, found))
    return Replay(search, pairs, _gold(search.hits, golds), _gold(found, golds), len(was & now))


def _at(hits: Sequence[Hit], rank: int) -> Hit | None:
    return hits[rank] if rank < len(hits) else None


def _gold(hits: Sequence[Hit], golds: Sequence[str]) -> int:
    return sum(contains_answer(hit.passage.contents, golds) for hit in hits)


def as_rows(found: Sequence[Replay], golds: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each rank of each search: the logged hit (`was_…`) and the other index's."""
    return [
        {
            "search": number, "turn": one.search.turn, "query": one.search.query, "rank": rank,
            **_columns("was_", was, golds), "was_shown": None if was is None else one.search.shown_as(rank),
            **_columns("", now, golds),
        }
        for number, one in enumerate(found, start=1)
        for rank, (was, now) in enumerate(one.pairs, start=1)
    ]  # fmt: skip


def _columns(prefix: str, hit: Hit | None, golds: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(("id", "title", "score", "gold"))
    if hit is not None:
        passage = hit.passage
        values = {
            "id": passage.id, "title": passage.title, "score": hit.score,
            "gold": contains_answer(passage.contents, golds),
        }  # fmt: skip
    return {f"{prefix}{name}": value for name, value in values.items()}
