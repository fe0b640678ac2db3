"""Metrics over trajectories, and their names, which are defined only here.

An episode that failed because of infrastructure counts 0 in exact match and F1; `em_completed` leaves it
out. The metrics of behaviour (`env/…`) are of completed episodes only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import comb
from statistics import fmean

from srl.answers import exact_match, f1
from srl.evaluate.intervals import Interval, clustered_interval
from srl.evaluate.retrieval_metrics import retrieval_recall
from srl.trajectory import Score, Trajectory


def summarise(
    trajectories: Sequence[Trajectory], scores: Sequence[Score] | None = None, prefix: str = "val"
) -> dict[str, float]:
    """`answer_metrics`, the mean reward as `<prefix>/score` where there are scores, and `<prefix>/env/…`.

    Raises ValueError for no trajectories, or scores of another number.
    """
    if scores is not None and len(scores) != len(trajectories):
        raise ValueError(f"{len(scores)} scores for {len(trajectories)} trajectories")
    metrics = answer_metrics(trajectories, prefix)
    if scores is not None:
        metrics[f"{prefix}/score"] = fmean(score.value for score in scores)
    return metrics | env_metrics(trajectories, scores, f"{prefix}/env")


def answer_metrics(trajectories: Sequence[Trajectory], prefix: str = "val") -> dict[str, float]:
    """Metrics of the answers: `em` (over all episodes), `em/<source>`, `em/hops=<h>`, `f1`, `failed_share`.

    Also `em_completed` if any episode completed, `em_macro` (the mean over sources) if there are several
    sources, `pass@<k>` for k = 2, 4, … n if each question has n > 1 samples, and `retrieval_recall` if
    questions name their supporting passages.
    """
    if not trajectories:
        raise ValueError("there are no trajectories to measure")
    correct = [_exact(trajectory) for trajectory in trajectories]
    metrics = {
        "em": fmean(correct),
        **_em_completed(trajectories),
        **_em_by_source(trajectories, correct),
        **_em_by_hops(trajectories, correct),
        "f1": fmean(_f1(trajectory) for trajectory in trajectories),
        "failed_share": fmean(not trajectory.valid for trajectory in trajectories),
        **_pass_at(trajectories, correct),
    }
    recall = retrieval_recall(trajectories)
    if recall is not None:
        metrics["retrieval_recall"] = recall
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def env_metrics(
    trajectories: Sequence[Trajectory], scores: Sequence[Score] | None = None, prefix: str = "env"
) -> dict[str, float]:
    """Metrics of how episodes went, with Search-R1's names where it has one.

    `excluded_share` (also for each number of searches, `excluded_share/searches=<s>`) and
    `failed_search_share` are over all episodes; everything else is over completed ones, and left out where
    there are none. `number_of_valid_search/retriever=<name>`: those that asked a retriever by its name.
    `equal_groups_share`: groups whose scores are all the same, of those with two or more.
    """
    if not trajectories:
        raise ValueError("there are no trajectories to measure")
    metrics = _excluded(trajectories)
    completed = [trajectory for trajectory in trajectories if trajectory.valid]
    if completed:
        metrics |= _behaviour(completed)
    if scores is not None:
        metrics |= _equal_groups(trajectories, scores)
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def step_metrics(
    trajectories: Sequence[Trajectory], scores: Sequence[Score] | None = None
) -> dict[str, float]:
    """Metrics of a training step: `train/…` of the answers, `env/…`, and episode lengths in policy tokens."""
    lengths = [item.policy_tokens for item in trajectories]
    return {
        **answer_metrics(trajectories, "train"),
        **env_metrics(trajectories, scores),
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "num_turns/mean": fmean(item.turns for item in trajectories),
    }


def em_interval(trajectories: Sequence[Trajectory], confidence: float = 0.95) -> Interval:
    """The interval of `em`. Samples of one question are correlated, so they count as one cluster."""
    correct = [_exact(trajectory) for trajectory in trajectories]
    return clustered_interval(list(_groups(trajectories, correct).values()), confidence)


def _exact(trajectory: Trajectory) -> float:
    return exact_match(trajectory.answer, trajectory.question.golden_answers) if trajectory.valid else 0.0


def _f1(trajectory: Trajectory) -> float:
    return f1(trajectory.answer, trajectory.question.golden_answers) if trajectory.valid else 0.0


def _em_completed(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    completed = [_exact(trajectory) for trajectory in trajectories if trajectory.valid]
    return {"em_completed": fmean(completed)} if completed else {}


def _em_by_source(trajectories: Sequence[Trajectory], correct: Sequence[float]) -> dict[str, float]:
    means = _means_by(lambda trajectory: trajectory.question.data_source, trajectories, correct)
    macro = {"em_macro": fmean(means.values())} if len(means) > 1 else {}
    return macro | {f"em/{source}": mean for source, mean in means.items()}


def _em_by_hops(trajectories: Sequence[Trajectory], correct: Sequence[float]) -> dict[str, float]:
    means = _means_by(lambda trajectory: str(trajectory.question.metadata.get("hops")), trajectories, correct)
    return {f"em/hops={hops}": mean for hops, mean in means.items() if hops != "None"}


def _means_by(
    key: Callable[[Trajectory], str], trajectories: Sequence[Trajectory], values: Sequence[float]
) -> dict[str, float]:
    """The mean value for each key, sorted."""
    groups = _groups_by(key, trajectories, values)
    return {name: fmean(groups[name]) for name in sorted(groups)}


def _groups_by(
    key: Callable[[Trajectory], str], trajectories: Sequence[Trajectory], values: Sequence[float]
) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for trajectory, value in zip(trajectories, values, strict=True):
        groups[key(trajectory)].append(value)
    return groups


def _groups(trajectories: Sequence[Trajectory], values: Sequence[float]) -> dict[str, list[float]]:
    """The values of the samples of each question."""
    return _groups_by(lambda trajectory: trajectory.question.id, trajectories, values)


def _pass_at(trajectories: Sequence[Trajectory], correct: Sequence[float]) -> dict[str, float]:
    counts = [(len(values), int(sum(values))) for values in _groups(trajectories, correct).values()]
    most = min(samples for samples, _ in counts)
    powers = (2**power for power in range(1, most.bit_length()))
    return {
        f"pass@{k}": fmean(pass_at_k(samples, right, k) for samples, right in counts)
        for k in sorted({*powers, most} - {1})
    }


def _excluded(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    searches = [search for trajectory in trajectories for search in trajectory.searches]
    metrics = {"excluded_share": fmean(not trajectory.valid for trajectory in trajectories)}
    by_searches = Counter(len(trajectory.searches) for trajectory in trajectories)
    failed = Counter(len(trajectory.searches) for trajectory in trajectories if not trajectory.valid)
    for number in sorted(by_searches):
        metrics[f"excluded_share/searches={number}"] = failed[number] / by_searches[number]
    metrics["failed_search_share"] = fmean(search.is_fault for search in searches) if searches else 0.0
    return metrics


def _behaviour(completed: Sequence[Trajectory]) -> dict[str, float]:
    turns = [trajectory.turns for trajectory in completed]
    return {
        "finish_ratio": fmean(trajectory.end == "answered" for trajectory in completed),
        "truncated_share": fmean(trajectory.end == "truncated" for trajectory in completed),
        "number_of_actions/mean": fmean(turns),
        "number_of_actions/max": max(turns),
        "number_of_actions/min": min(turns),
        "number_of_valid_action": fmean(trajectory.valid_actions for trajectory in completed),
        "ratio_of_valid_action": fmean(
            trajectory.valid_actions / max(trajectory.turns, 1) for trajectory in completed
        ),
        "number_of_valid_search": fmean(trajectory.valid_searches for trajectory in completed),
        **_by_retriever(completed),
    }


def _by_retriever(completed: Sequence[Trajectory]) -> dict[str, float]:
    """Searches of an episode by each retriever that was asked by its name and answered."""
    searches = [search for trajectory in completed for search in trajectory.searches]
    asked = Counter(item.retriever for item in searches if item.retriever and item.status in ("ok", "empty"))
    return {
        f"number_of_valid_search/retriever={name}": asked[name] / len(completed) for name in sorted(asked)
    }


def _equal_groups(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> dict[str, float]:
    valid = [
        (trajectory, score.value)
        for trajectory, score in zip(trajectories, scores, strict=True)
        if trajectory.valid
    ]
    groups = _groups([trajectory for trajectory, _ in valid], [value for _, value in valid]).values()
    spreads = [max(values) - min(values) for values in groups if len(values) > 1]
    return {"equal_groups_share": fmean(spread == 0 for spread in spreads)} if spreads else {}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that at least one of `k` samples drawn from these is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. (2021), arXiv 2107.03374, equation 1. Raises ValueError unless 1 ≤ k ≤ samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k must be between 1 and the samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
