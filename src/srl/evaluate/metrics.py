"""Metrics over episodes, and their names, which are defined only here.

They are computed from `EpisodeResult`s, so those of a log are those of its trajectories; where a function
takes `episodes`, either will do. An episode that failed because of infrastructure counts 0 in exact match and
F1; `em_completed` leaves it out. The metrics of behaviour (`env/…`) are of completed episodes only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from math import comb
from statistics import fmean
from typing import TypeVar

from srl.evaluate.episode_results import EpisodeResult, results_of
from srl.evaluate.intervals import Interval, interval
from srl.trajectory import Score, Trajectory

T = TypeVar("T")
Episodes = Sequence[EpisodeResult] | Sequence[Trajectory]


def summarise(
    episodes: Episodes, scores: Sequence[Score] | None = None, prefix: str = "val"
) -> dict[str, float]:
    """`answer_metrics`, the mean reward as `<prefix>/score` where there are scores, `env/…`, and costs.

    The costs of an episode: `response_length/mean` (tokens that the policy wrote) and `total_length/mean`
    (all). Raises ValueError for no episodes, or scores of another number.
    """
    if scores is not None and len(scores) != len(episodes):
        raise ValueError(f"{len(scores)} scores for {len(episodes)} trajectories")
    results = results_of(episodes)
    metrics = answer_metrics(results, prefix)
    given = [score.value for score in scores or () if not score.error]
    if given:
        metrics[f"{prefix}/score"] = fmean(given)
    metrics[f"{prefix}/response_length/mean"] = fmean(item.tokens for item in results)
    metrics[f"{prefix}/total_length/mean"] = fmean(item.total_tokens for item in results)
    return metrics | env_metrics(results, scores, f"{prefix}/env")


def answer_metrics(episodes: Episodes, prefix: str = "val") -> dict[str, float]:
    """Metrics of the answers and of the evidence, over all episodes: `em`, `f1`, `cover_em`, `failed_share`.

    Also, where there is something to measure:

        em/<source>, em_macro   of each data source, and their mean if there are several
        em/hops=<h>             of the questions that need so many hops
        em_completed            without the episodes that failed
        mean@<n>, pass@<k>      of n > 1 samples a question: the mean over questions of the share of right
                                samples, and of the probability that one of k = 2, 4, … n is right
        evidence_recall         the share of gold passages that were shown
        em_evidence_shown       exact match where all of them were
        answer_shown            the share of completed episodes that were shown a golden answer, where any
                                searched
        em_answer_shown         exact match where one was
    """
    results = _some(episodes)
    metrics = {
        "em": fmean(item.em for item in results),
        **_em_completed(results),
        **_em_by_source(results),
        **_em_by_hops(results),
        "f1": fmean(item.f1 for item in results),
        "cover_em": fmean(item.cover_em for item in results),
        "failed_share": fmean(not item.valid for item in results),
        **_of_samples(results),
        **_evidence([item for item in results if item.valid]),
    }
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def env_metrics(
    episodes: Episodes, scores: Sequence[Score] | None = None, prefix: str = "env"
) -> dict[str, float]:
    """Metrics of how episodes went, with Search-R1's names where it has one.

    `excluded_share` (also for each number of searches, `excluded_share/searches=<s>`) and
    `failed_search_share` are over all episodes; everything else is over completed ones, and left out where
    there are none. `number_of_valid_search/retriever=<name>`: those that asked a retriever by its name.
    `equal_groups_share`: groups whose scores are all the same, of those with two or more;
    `equal_groups_share/right` and `/wrong`: those of them whose answers all match, or none.
    """
    results = _some(episodes)
    metrics = _excluded(results)
    completed = [item for item in results if item.valid]
    if completed:
        metrics |= _behaviour(completed)
    if scores is not None:
        metrics |= _equal_groups(results, scores)
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def step_metrics(episodes: Episodes, scores: Sequence[Score] | None = None) -> dict[str, float]:
    """Metrics of a training step: `train/…` of the answers, `env/…`, and episode lengths in policy tokens.

    `env/repetition` is the mean of `repetition`, where `episodes` are trajectories.
    """
    results = results_of(episodes)
    lengths = [item.tokens for item in results]
    repeated = [repetition(item) for item in episodes if isinstance(item, Trajectory)]
    return {
        **answer_metrics(results, "train"),
        **env_metrics(results, scores),
        **({"env/repetition": fmean(repeated)} if repeated else {}),
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "num_turns/mean": fmean(item.turns for item in results),
    }


def repetition(trajectory: Trajectory, n: int = 4) -> float:
    """The share of the policy's n-grams of tokens that the same turn has before; 0 without n-grams."""
    repeated = total = 0
    for segment in trajectory.segments:
        if segment.is_policy:
            grams = list(zip(*(segment.token_ids[start:] for start in range(n)), strict=False))
            total += len(grams)
            repeated += len(grams) - len(set(grams))
    return repeated / total if total else 0.0


def em_interval(episodes: Episodes, confidence: float = 0.95) -> Interval | None:
    """The interval of `em`; None where the questions come from too few documents (`interval`).

    Samples of one question are correlated, so they count as one value, their mean.
    """
    results = results_of(episodes)
    samples = _values_by(lambda item: item.question_id, lambda item: item.em, results)
    clusters = {item.question_id: item.cluster for item in results}
    return interval([fmean(values) for values in samples.values()], list(clusters.values()), confidence)


def mean_seconds(episodes: Episodes) -> float | None:
    """How long an episode took on average, beside those that ran at the same time; None if not known."""
    known = [item.seconds for item in episodes if item.seconds is not None]
    return fmean(known) if known else None


def _some(episodes: Episodes) -> list[EpisodeResult]:
    if not episodes:
        raise ValueError("there are no trajectories to measure")
    return results_of(episodes)


def _em_completed(results: Sequence[EpisodeResult]) -> dict[str, float]:
    completed = [item.em for item in results if item.valid]
    return {"em_completed": fmean(completed)} if completed else {}


def _em_by_source(results: Sequence[EpisodeResult]) -> dict[str, float]:
    means = _means_by(lambda item: item.data_source, results)
    macro = {"em_macro": fmean(means.values())} if len(means) > 1 else {}
    return macro | {f"em/{source}": mean for source, mean in means.items()}


def _em_by_hops(results: Sequence[EpisodeResult]) -> dict[str, float]:
    means = _means_by(lambda item: str(item.hops), [item for item in results if item.hops is not None])
    return {f"em/hops={hops}": mean for hops, mean in means.items()}


def _means_by(key: Callable[[EpisodeResult], str], results: Sequence[EpisodeResult]) -> dict[str, float]:
    """The mean exact match for each key, sorted."""
    groups = _values_by(key, lambda item: item.em, results)
    return {name: fmean(groups[name]) for name in sorted(groups)}


def _values_by(
    key: Callable[[T], str], value: Callable[[T], float], items: Sequence[T]
) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(value(item))
    return groups


def _of_samples(results: Sequence[EpisodeResult]) -> dict[str, float]:
    samples = _values_by(lambda item: item.question_id, lambda item: item.em, results).values()
    most = min(map(len, samples))
    powers = (2**power for power in range(1, most.bit_length()))
    mean = {f"mean@{most}": fmean(map(fmean, samples))} if most > 1 else {}
    return mean | {
        f"pass@{k}": fmean(pass_at_k(len(values), int(sum(values)), k) for values in samples)
        for k in sorted({*powers, most} - {1})
    }


def _evidence(completed: Sequence[EpisodeResult]) -> dict[str, float]:
    recalls = [item.evidence_recall for item in completed if item.evidence_recall is not None]
    searched = any(item.searches for item in completed)
    values = {
        "evidence_recall": recalls,
        "em_evidence_shown": [item.em for item in completed if item.evidence_recall == 1],
        "answer_shown": [float(item.answer_shown) for item in completed if searched],
        "em_answer_shown": [item.em for item in completed if item.answer_shown],
    }
    return {name: fmean(found) for name, found in values.items() if found}


def _excluded(results: Sequence[EpisodeResult]) -> dict[str, float]:
    searches = sum(item.searches for item in results)
    metrics = {"excluded_share": fmean(not item.valid for item in results)}
    by_searches = Counter(item.searches for item in results)
    failed = Counter(item.searches for item in results if not item.valid)
    for number in sorted(by_searches):
        metrics[f"excluded_share/searches={number}"] = failed[number] / by_searches[number]
    faults = sum(item.failed_searches for item in results)
    metrics["failed_search_share"] = faults / searches if searches else 0.0
    return metrics


def _behaviour(completed: Sequence[EpisodeResult]) -> dict[str, float]:
    turns = [item.turns for item in completed]
    return {
        "finish_ratio": fmean(item.end == "answered" for item in completed),
        "truncated_share": fmean(item.end == "truncated" for item in completed),
        "number_of_actions/mean": fmean(turns),
        "number_of_actions/max": max(turns),
        "number_of_actions/min": min(turns),
        "number_of_valid_action": fmean(item.valid_actions for item in completed),
        "ratio_of_valid_action": fmean(item.valid_actions / max(item.turns, 1) for item in completed),
        "number_of_valid_search": fmean(item.valid_searches for item in completed),
        **_by_retriever(completed),
    }


def _by_retriever(completed: Sequence[EpisodeResult]) -> dict[str, float]:
    """Searches of an episode by each retriever that was asked by its name and answered."""
    asked: Counter[str] = Counter()
    for item in completed:
        asked.update(dict(item.named_searches))
    return {
        f"number_of_valid_search/retriever={name}": asked[name] / len(completed) for name in sorted(asked)
    }


def _equal_groups(results: Sequence[EpisodeResult], scores: Sequence[Score]) -> dict[str, float]:
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for result, score in zip(results, scores, strict=True):
        if result.valid:
            groups[result.question_id].append((score.value, result.em))
    several = [list(zip(*group, strict=True)) for group in groups.values() if len(group) > 1]
    if not several:
        return {}
    ems = [em if min(values) == max(values) else (0.5,) for values, em in several]
    return {
        "equal_groups_share": fmean(min(values) == max(values) for values, _ in several),
        "equal_groups_share/right": fmean(min(em) == 1 for em in ems),
        "equal_groups_share/wrong": fmean(max(em) == 0 for em in ems),
    }


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that at least one of `k` samples drawn from these is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. (2021), arXiv 2107.03374, equation 1. Raises ValueError unless 1 ≤ k ≤ samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k must be between 1 and the samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
