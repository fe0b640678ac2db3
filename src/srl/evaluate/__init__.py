"""Metrics of policies (exact match, F1, pass@k) and of retrievers (recall@k, nDCG), with intervals."""

from srl.evaluate.episode_results import EpisodeResult, read_results, results_of
from srl.evaluate.intervals import Interval, interval, wilson_interval
from srl.evaluate.metrics import (
    answer_metrics,
    em_interval,
    env_metrics,
    mean_seconds,
    pass_at_k,
    step_metrics,
    summarise,
)
from srl.evaluate.retrieval_metrics import recall_at_k, supporting_ids

__all__ = [
    "EpisodeResult",
    "Interval",
    "answer_metrics",
    "em_interval",
    "env_metrics",
    "interval",
    "mean_seconds",
    "pass_at_k",
    "read_results",
    "recall_at_k",
    "results_of",
    "step_metrics",
    "summarise",
    "supporting_ids",
    "wilson_interval",
]
