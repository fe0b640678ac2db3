"""The verdict on an answer: correct, or which part is at fault (retriever, reader, no search, …)."""

from __future__ import annotations

from srl.trajectory import REWARD_FAULT

VERDICTS = {
    "correct": "correct",
    "reader": "reader: a golden answer was in the passages shown",
    "retriever": "retriever: a golden answer was in no passage shown",
    "no search": "no search: answered without searching",
    "unanswered": "unanswered",
    "failed search": "failed search: infrastructure, not the policy; left out of the loss",
    "failed engine": "failed engine: infrastructure, not the policy; left out of the loss",
    "failed reward": "failed reward: infrastructure, not the policy; left out of the loss",
}
"""Each verdict, and how it is shown beside a trajectory."""

FAULT_SQL = f"""CASE WHEN starts_with(error, '{REWARD_FAULT}') THEN 'failed reward'
        WHEN error <> '' THEN 'failed engine' ELSE 'failed search' END"""
"""What made an episode fail that did, as its verdict says unless its answer was right."""

VERDICT_SQL = f"""
SELECT *, CASE
    WHEN em IS NULL THEN NULL
    WHEN em >= 1 THEN 'correct'
    WHEN "end" = 'failed' THEN {FAULT_SQL}
    WHEN answer IS NULL THEN 'unanswered'
    WHEN searches = 0 THEN 'no search'
    WHEN gold_in_passages THEN 'reader'
    ELSE 'retriever' END AS verdict
FROM raw.trajectories
"""
"""Adds the column `verdict` to the table `trajectories`; NULL where the question has no golden answers."""
