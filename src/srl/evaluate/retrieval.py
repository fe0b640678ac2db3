"""Whether searches found the passages that a question was made from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean

from srl.trajectory import Question, Trajectory


def supporting_ids(question: Question) -> frozenset[str]:
    """The ids of the passages that hold the answer (metadata `supporting_ids`), as strings."""
    return frozenset(str(passage) for passage in question.metadata.get("supporting_ids") or ())


def recall_at_k(ranked: Sequence[str], relevant: Collection[str], k: int | None = None) -> float:
    """The share of the `relevant` ids among the first `k` of `ranked` (None: all of them)."""
    return len(set(ranked[:k]) & set(relevant)) / len(set(relevant))


def retrieval_recall(trajectories: Sequence[Trajectory], k: int | None = None) -> float | None:
    """The mean share of a question's supporting passages that any search had among its first `k`.

    Over completed episodes of questions that name such passages; None when there are none.
    """
    known = [
        (trajectory, supporting_ids(trajectory.question)) for trajectory in trajectories if trajectory.valid
    ]
    shares = [recall_at_k(_found(trajectory, k), relevant) for trajectory, relevant in known if relevant]
    return fmean(shares) if shares else None


def _found(trajectory: Trajectory, k: int | None) -> list[str]:
    return [hit.passage.id for search in trajectory.searches for hit in search.hits[:k]]
