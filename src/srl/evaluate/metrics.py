"""Metrics over episodes, and their names, which are defined only here.

They are computed from `EpisodeResult`s, so those of a log are those of its trajectories; where a function
takes `episodes`, either will do. An episode that failed because of infrastructure counts 0 in exact match and
F1; `em_completed` leaves it out. The metrics of behaviour (`env/…`) are of completed episodes only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import comb
from statistics import fmean

from srl.evaluate.episode_results import EpisodeResult, results_of
from srl.evaluate.intervals import Interval, interval
from srl.trajectory import Score, Trajectory

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
    values = [score.value for score in scores or () if not score.error]
    if values:
        metrics[f"{prefix}/score"] = fmean(values)
    metrics[f"{prefix}/response_length/mean"] = fmean(result.tokens for result in results)
    metrics[f"{prefix}/total_length/mean"] = fmean(result.total_tokens for result in results)
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
    results = _results(episodes)
    completed = [result for result in results if result.valid]
    metrics: dict[str, float | None] = {
        "em": fmean(result.em for result in results),
        "em_completed": _mean(result.em for result in completed),
    }
    by_source = _em_by(lambda result: result.data_source, results)
    if len(by_source) > 1:
        metrics["em_macro"] = fmean(map(fmean, by_source.values()))
    metrics |= {f"em/{source}": fmean(ems) for source, ems in by_source.items()}
    by_hops = _em_by(
        lambda result: str(result.hops), [result for result in results if result.hops is not None]
    )
    metrics |= {f"em/hops={hops}": fmean(ems) for hops, ems in by_hops.items()}
    metrics["f1"] = fmean(result.f1 for result in results)
    metrics["cover_em"] = fmean(result.cover_em for result in results)
    metrics["failed_share"] = fmean(not result.valid for result in results)
    samples = _em_by(lambda result: result.question_id, results).values()
    n = min(map(len, samples))
    if n > 1:
        metrics[f"mean@{n}"] = fmean(map(fmean, samples))
        for k in sorted({2**power for power in range(1, n.bit_length())} | {n}):
            metrics[f"pass@{k}"] = fmean(pass_at_k(len(ems), int(sum(ems)), k) for ems in samples)
    recalls = (result.evidence_recall for result in completed)
    metrics["evidence_recall"] = _mean(recall for recall in recalls if recall is not None)
    metrics["em_evidence_shown"] = _mean(result.em for result in completed if result.evidence_recall == 1)
    if any(result.searches for result in completed):
        metrics["answer_shown"] = fmean(result.answer_shown for result in completed)
    metrics["em_answer_shown"] = _mean(result.em for result in completed if result.answer_shown)
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items() if value is not None}


def env_metrics(
    episodes: Episodes, scores: Sequence[Score] | None = None, prefix: str = "env"
) -> dict[str, float]:
    """Metrics of how episodes went, with Search-R1's names where it has one.

    `excluded_share` (also for each number of searches, `excluded_share/searches=<s>`) and
    `failed_search_share` are over all episodes; everything else is over completed ones, and left out where
    there are none. `number_of_valid_search/retriever=<name>`: those that asked a retriever by its name.
    Where the policy calls tools natively: `malformed_calls` of an episode, and all calls, `calls_per_turn`.
    `equal_groups_share`: groups whose scores are all the same, of those with two or more;
    `equal_groups_share/right` and `/wrong`: those of them whose answers all match, or none.
    """
    results = _results(episodes)
    metrics: dict[str, float] = {"excluded_share": fmean(not result.valid for result in results)}
    by_searches = Counter(result.searches for result in results)
    excluded = Counter(result.searches for result in results if not result.valid)
    for number in sorted(by_searches):
        metrics[f"excluded_share/searches={number}"] = excluded[number] / by_searches[number]
    searches = sum(result.searches for result in results)
    faults = sum(result.failed_searches for result in results)
    metrics["failed_search_share"] = faults / searches if searches else 0.0
    if completed := [result for result in results if result.valid]:
        turns = [result.turns for result in completed]
        metrics |= {
            "finish_ratio": fmean(result.end == "answered" for result in completed),
            "truncated_share": fmean(result.end == "truncated" for result in completed),
            "number_of_actions/mean": fmean(turns),
            "number_of_actions/max": max(turns),
            "number_of_actions/min": min(turns),
            "number_of_valid_action": fmean(result.valid_actions for result in completed),
            "ratio_of_valid_action": fmean(
                result.valid_actions / max(result.turns, 1) for result in completed
            ),
            "number_of_valid_search": fmean(result.valid_searches for result in completed),
        }
        by_retriever: Counter[str] = Counter()
        for result in completed:
            by_retriever.update(dict(result.named_searches))
        for name in sorted(by_retriever):
            metrics[f"number_of_valid_search/retriever={name}"] = by_retriever[name] / len(completed)
        if any(result.protocol != "tags" for result in completed):
            metrics["malformed_calls"] = fmean(result.malformed for result in completed)
            metrics["calls_per_turn"] = sum(result.searches for result in completed) / sum(turns)
    if scores is not None:
        metrics |= _equal_groups(results, scores)
    return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}


def _equal_groups(results: Sequence[EpisodeResult], scores: Sequence[Score]) -> dict[str, float]:
    """The shares of the groups that teach nothing, since all their scores are the same."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for result, score in zip(results, scores, strict=True):
        if result.valid:
            groups[result.question_id].append((score.value, result.em))
    pairs = [list(zip(*group, strict=True)) for group in groups.values() if len(group) > 1]
    if not pairs:
        return {}
    equal = [ems for values, ems in pairs if min(values) == max(values)]
    return {
        "equal_groups_share": len(equal) / len(pairs),
        "equal_groups_share/right": sum(min(ems) == 1 for ems in equal) / len(pairs),
        "equal_groups_share/wrong": sum(max(ems) == 0 for ems in equal) / len(pairs),
    }


def step_metrics(episodes: Episodes, scores: Sequence[Score] | None = None) -> dict[str, float]:
    """Metrics of a training step: `train/…` of the answers, `env/…`, and episode lengths in policy tokens.

    `env/repetition` is the mean of `repetition`, where `episodes` are trajectories.
    """
    results = results_of(episodes)
    lengths = [result.tokens for result in results]
    metrics = answer_metrics(results, "train") | env_metrics(results, scores)
    repeated = [repetition(episode) for episode in episodes if isinstance(episode, Trajectory)]
    if repeated:
        metrics["env/repetition"] = fmean(repeated)
    return metrics | {
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "num_turns/mean": fmean(result.turns for result in results),
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
    clusters = {result.question_id: result.cluster for result in results}
    samples = _em_by(lambda result: result.question_id, results)
    return interval([fmean(samples[name]) for name in clusters], list(clusters.values()), confidence)


def mean_seconds(episodes: Episodes) -> float | None:
    """How long an episode took on average, beside those that ran at the same time; None if not known."""
    return _mean(result.seconds for result in episodes if result.seconds is not None)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The probability that at least one of `k` samples drawn from these is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. (2021), arXiv 2107.03374, equation 1. Raises ValueError unless 1 ≤ k ≤ samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k must be between 1 and the samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def _results(episodes: Episodes) -> list[EpisodeResult]:
    if not episodes:
        raise ValueError("there are no trajectories to measure")
    return results_of(episodes)


def _em_by(key: Callable[[EpisodeResult], str], results: Sequence[EpisodeResult]) -> dict[str, list[float]]:
    """Exact match of the episodes by key, sorted."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result.em)
    return {name: groups[name] for name in sorted(groups)}


def _mean(values: Iterable[float]) -> float | None:
    """None for no values."""
    values = list(values)
    return fmean(values) if values else None
