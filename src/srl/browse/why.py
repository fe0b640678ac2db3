"""Why a run got worse: since when its exact match fell, and what changed on the way from question to answer.

An episode is right by a chain: it is answered, it searched, a passage that was shown holds a golden answer,
and the answer is read from it. So the exact match of some steps is

    EM = answered · (searched · (shown · read + (1 - shown) · guessed) + (1 - searched) · recalled)

The share of a link in a fall is its Shapley value: what it wins back at its earlier rate, averaged over the
orders in which the links get theirs back, so that the shares of all links add up to the fall. Faults and a
policy that blew up come before the links, since they break every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb, sqrt
from statistics import fmean, median
from typing import Any

import duckdb

from srl.errors import UserError
from srl.store import rows
from srl.store.verdict import FAULT_SQL

FEWEST, FEW, LONGEST = 8, 10, 20
"""Training steps below which nothing is said, episodes below which a rate is not known, and the most steps
that are compared before a fall and since."""
LEAST, SHARE, NOISES, RISE = 0.05, 0.15, 4.0, 0.02
"""A fall is at least 0.05, 15% of the highest level, and four standard errors of a level; a rise 0.02."""

CAUSES = {
    "failed search": ("Searches fail, so episodes are lost to the infrastructure.", ""),
    "failed engine": ("The engine fails, so episodes are left out of the loss.", ""),
    "failed reward": ("A reward gives no score, so episodes are left out of the loss.", ""),
    "reward hacking": ("Reward is earned by something else than right answers.", "em = 0 AND reward > 0"),
    "sampler and trainer apart": ("They give the same tokens different log-probs.", "em = 0"),
    "KL blow-up": ("The policy left its reference: the update blew up.", "em = 0"),
    "entropy explosion": ("The policy became random.", "em = 0"),
    "entropy collapse": ("The policy no longer tries anything else.", "em = 0"),
    "too long": ("Episodes grow until they are cut off before an answer.", "answer IS NULL AND valid"),
    "format errors": ("Turns without a valid action are frequent.", "em = 0"),
    "no answer": ("More episodes end without an answer.", "answer IS NULL AND valid"),
    "stopped searching": ("The policy no longer searches.", "searches = 0 AND em = 0"),
    "evidence cut": (
        "The evidence is found but does not fit into the observation.",
        "searches > 0 AND em = 0",
    ),
    "repeated queries": ("The policy asks the same queries again.", "searches > 0 AND em = 0"),
    "evidence": ("Searches bring no evidence: the retriever or the queries.", "searches > 0 AND em = 0"),
    "reader": ("Answers are wrong although the evidence was shown.", "gold_in_passages AND em = 0"),
    "answers without evidence": ("They are right less often.", "NOT gold_in_passages AND em = 0"),
    "answers from memory": ("Answers without a search are right less often.", "searches = 0 AND em = 0"),
    "no gradient": ("The samples of most groups score the same: few questions teach anything.", "em = 0"),
}
"""Every cause, in a sentence, and the condition on the episodes that show it."""

HEADINGS = {"name": "share or mean", "before": "before", "since": "since", "share": "share of the fall"}
EXAMPLES = {
    "shows": "shows", "id": "id", "step": "step", "em": "em", "reward": "reward", "searches": "searches",
    "verdict": "verdict", "answer": "answer", "golden_answers": "gold", "question": "question",
}  # fmt: skip
"""The columns of the two tables, each with its heading."""

Rates = Mapping[str, float | None]
"""What the episodes of some steps did, by the names of `_RATES` and `_METRICS`; None where not known."""


@dataclass(frozen=True, slots=True)
class Why:
    """What happened to a run: its outcome in a sentence, and the names of the causes, the likeliest first.

    `changes` is a row for each rate, `examples` one for each trajectory: up to three wrong ones of the last
    steps that show the first cause, and up to two right ones from before, of the same questions if possible.
    """

    run_id: str
    outcome: str
    since: int | None
    causes: tuple[str, ...]
    changes: tuple[dict[str, Any], ...]
    examples: tuple[dict[str, Any], ...]


def why(connection: duckdb.DuckDBPyConnection, run_id: str) -> Why:
    """Why the run got worse. Raises UserError below 8 training steps of questions with golden answers."""
    training = dict(connection.execute(_TRAINING, [run_id]).fetchall())
    validation = dict(connection.execute(_VALIDATION, [run_id]).fetchall())
    if len(training) < FEWEST:
        what = f"{run_id} has {len(training)} training steps on questions with golden answers"
        raise UserError(what, hint=f"a cause needs {FEWEST}")
    name, fell = "training", fall(training)
    if fell is None:
        name, fell = "validation", fall(validation)
    steps = list(training)
    since, high, low = fell or (steps[len(steps) // 2], 0.0, 0.0)
    split = sum(step < since for step in steps)
    spans = steps[:split][-LONGEST:], steps[split:][-LONGEST:], steps[-max(3, len(steps) // 10) :]
    was, now, end = (_rates(connection, run_id, span) for span in spans)
    outcome = f"EM {_first_rate(was['EM']):.3f} before step {since}, {_first_rate(now['EM']):.3f} since"
    if fell:
        outcome = f"{name} EM fell from {high:.3f} to {low:.3f}, since step {since}"
    shares = link_shares(was, now) if fell else {}
    causes = tuple(dict.fromkeys(_causes(was, now, end, shares, fell is not None)))
    names = [name for name in (*_RATES, *_METRICS) if (was[name], now[name]) != (None, None)]
    changes = [dict(zip(HEADINGS, (n, was[n], now[n], shares.get(n)), strict=True)) for n in names]
    examples = _examples(connection, run_id, causes[0], since) if causes else []
    return Why(run_id, outcome, since if fell else None, causes, tuple(changes), tuple(examples))


_TRAINING = """
SELECT step, coalesce(avg((em >= 1 AND answer IS NOT NULL)::INTEGER) FILTER (valid), 0)
FROM trajectories WHERE run_id = ? AND phase = 'train' AND em IS NOT NULL GROUP BY step ORDER BY step
"""
_VALIDATION = "SELECT step, value FROM metrics WHERE run_id = ? AND name = 'val/em' ORDER BY step"


def fall(series: Mapping[int, float]) -> tuple[int, float, float] | None:
    """The first step after the fall from the highest level of a series over steps, that level and the last.

    None if there is no fall. A level is the mean of a tenth of the steps, at least 3. The step is where two
    levels, before it and from it on, leave the smallest squared error of what follows the highest level.
    """
    steps, values = list(series), list(series.values())
    window = max(3, len(values) // 10)
    if len(values) < FEWEST:
        return None
    levels = [fmean(values[at : at + window]) for at in range(len(values) - window + 1)]
    start = max(range(len(levels)), key=levels.__getitem__)
    high, low = levels[start], levels[-1]
    if high - low < max(LEAST, SHARE * high, NOISES * _noise(values) / sqrt(window)):
        return None

    def error(at: int) -> float:
        sides = values[start:at], values[at:]
        return sum((value - level) ** 2 for side in sides for level in [fmean(side)] for value in side)

    return steps[min(range(start + 1, len(values)), key=error)], high, low


def _noise(values: Sequence[float]) -> float:
    """The standard deviation of a step around its level, from the median change between neighbours.

    Source: the difference-based estimator of Rice (1984), with the median for its mean.
    """
    return median(abs(later - earlier) for earlier, later in pairwise(values)) / 0.6745 / sqrt(2)


_RATES = {
    "answered": ("said", "valid"),
    "searched": ("searches > 0", "said"),
    "shown": ("shows", "said AND searches > 0"),
    "read": ("em >= 1", "said AND searches > 0 AND shows"),
    "guessed": ("em >= 1", "said AND searches > 0 AND NOT shows"),
    "recalled": ("em >= 1", "said AND searches = 0"),
    "EM": ("em >= 1 AND said", "valid"),
    "reward": ("reward", "valid"),
    "returned": ("coalesce(returned, false)", "said AND searches > 0"),
    "repeated": ("repeats / searches", "valid AND searches > 0"),
    "valid actions": ("valid_actions / turns", "valid AND turns > 0"),
    "truncated": ("\"end\" = 'truncated'", "valid"),
    "tokens": ("tokens", "valid"),
    "failed search": ("NOT valid AND fault = 'failed search'", "true"),
    "failed engine": ("NOT valid AND fault = 'failed engine'", "true"),
    "failed reward": ("NOT valid AND fault = 'failed reward'", "true"),
}
"""Means over episodes with golden answers: of what, and over which of them. The first six are the links.

`shown`: a passage that was shown has a golden answer; `returned`: one that a search returned has. `repeated`
is the share of queries that the episode had asked before.
"""
LINKS = tuple(_RATES)[:6]

_METRICS = {
    "entropy": ("actor/entropy",), "KL": ("actor/ref_kl", "critic/kl", "actor/kl_loss"),
    "sampler - trainer": ("rollout/logprob_diff/mean",), "without gradient": ("actor/no_gradient_share",),
    "gradient norm": ("actor/grad_norm", "critic/grad_norm"),
}  # fmt: skip
"""Numbers of the update: the median of the first of these metrics that there is."""

_EPISODES = f"""
SELECT {{means}} FROM (
    SELECT *, valid AND answer IS NOT NULL AS said, coalesce(gold_in_passages, false) AS shows,
        {FAULT_SQL} AS fault
    FROM trajectories LEFT JOIN (
        SELECT trajectory_id AS id, bool_or(gold_rank IS NOT NULL) AS returned,
            count(*) FILTER (repeated) AS repeats
        FROM searches WHERE run_id = $run AND phase = 'train' AND step BETWEEN $first AND $last GROUP BY ALL
    ) USING (id)
    WHERE run_id = $run AND phase = 'train' AND step BETWEEN $first AND $last AND em IS NOT NULL
)
"""
_NUMBERS = """
SELECT name, median(value) FROM metrics
WHERE run_id = $run AND phase = 'train' AND step BETWEEN $first AND $last AND isfinite(value) GROUP BY name
"""


def _rates(connection: duckdb.DuckDBPyConnection, run_id: str, steps: Sequence[int]) -> Rates:
    means = ", ".join(
        f"CASE WHEN count(*) FILTER ({over}) >= {FEW} THEN avg(({what})::DOUBLE) FILTER ({over}) END "
        f'AS "{name}"'
        for name, (what, over) in _RATES.items()
    )
    first, last = (steps[0], steps[-1]) if steps else (1, 0)
    place = {"run": run_id, "first": first, "last": last}
    [rates] = rows(connection, _EPISODES.format(means=means), place)
    numbers = dict(connection.execute(_NUMBERS, place).fetchall())
    for name, metrics in _METRICS.items():
        rates[name] = next((numbers[metric] for metric in metrics if metric in numbers), None)
    return rates


def link_shares(was: Rates, now: Rates) -> dict[str, float]:
    """The share of each link in the fall of the chain's EM, the largest first; empty if it did not."""
    before = {name: _first_rate(was[name], now[name]) for name in LINKS}
    since = {name: _first_rate(now[name], was[name]) for name in LINKS}
    lost, shares = chain_em(before) - chain_em(since), dict.fromkeys(LINKS, 0.0)
    if lost <= 0:
        return {}
    for name in LINKS:
        other_links = [other for other in LINKS if other != name]
        for size in range(len(LINKS)):
            for restored in combinations(other_links, size):
                at = since | {other: before[other] for other in restored}
                won = chain_em(at | {name: before[name]}) - chain_em(at)
                shares[name] += won / lost / comb(len(other_links), size) / len(LINKS)
    return dict(sorted(shares.items(), key=lambda pair: -pair[1]))


def chain_em(rates: Mapping[str, float]) -> float:
    """The exact match by the chain."""
    answered, searched, shown, read, guessed, recalled = (rates[name] for name in LINKS)
    return answered * (searched * (shown * read + (1 - shown) * guessed) + (1 - searched) * recalled)


def _first_rate(*rates: float | None) -> float:
    """The first rate that is known, else 0."""
    return next((rate for rate in rates if rate is not None), 0.0)


def _causes(was: Rates, now: Rates, end: Rates, shares: Mapping[str, float], fell: bool) -> list[str]:
    """The names of the causes that hold, the likeliest first.

    `was` and `now` are the rates before the fall and since, or of the halves of a run that did not fall, and
    `end` those of the last steps. `shares` are those of the links in the fall.
    """
    faults = {name: _first_rate(end[name]) for name in CAUSES if name.startswith("failed")}
    causes = [max(faults, key=faults.__getitem__)] if sum(faults.values()) >= 0.1 else []
    grown = {name: _first_rate(now[name]) - _first_rate(was[name]) for name in was}
    if not fell and grown["EM"] <= RISE:
        causes += ["no gradient"] if _first_rate(now["without gradient"]) >= 0.6 else []
        causes += ["format errors"] if _first_rate(now["valid actions"], 1.0) <= 0.5 else []
        causes += ["evidence"] if _first_rate(now["shown"], 1.0) < 0.05 else []
    if not fell:
        return causes
    causes += ["reward hacking"] if grown["reward"] >= 0.05 and grown["EM"] <= -0.03 else []
    for name, number, times, least in (
        ("sampler and trainer apart", "sampler - trainer", 10, 0.02),
        ("KL blow-up", "KL", 10, 0.1),
        ("entropy explosion", "entropy", 3, 0.5),
    ):
        grows = was[number] is not None and _first_rate(now[number]) >= max(
            times * _first_rate(was[number]), least
        )
        causes += [name] if grows else []
    collapsed = was["entropy"] and _first_rate(now["entropy"], was["entropy"]) <= 0.2 * was["entropy"]
    causes += ["entropy collapse"] if collapsed else []
    names = {
        "answered": "too long" if grown["truncated"] >= -grown["answered"] / 2
        else "format errors" if grown["valid actions"] <= -0.05 else "no answer",
        "searched": "stopped searching",
        "shown": "evidence cut" if grown["returned"] >= grown["shown"] / 2
        else "repeated queries" if grown["repeated"] >= 0.25 else "evidence",
        "read": "reader", "guessed": "answers without evidence", "recalled": "answers from memory",
    }  # fmt: skip
    return causes + [names[link] for link, share in shares.items() if share >= 0.3]


def _examples(
    connection: duckdb.DuckDBPyConnection, run_id: str, cause: str, since: int
) -> list[dict[str, Any]]:
    """Trajectories that show the cause, each with `shows`: `since` or `before`."""
    where = CAUSES[cause][1] or f"NOT valid AND {FAULT_SQL} = '{cause}'"
    columns = "id, step, phase, question_id, question, golden_answers, em, reward, searches, verdict, answer"
    base = f"SELECT {columns} FROM trajectories WHERE run_id = ? AND phase = 'train'"
    last = rows(connection, f"{base} AND ({where}) ORDER BY step DESC, position LIMIT 3", [run_id])
    order = "list_contains(?, question_id) DESC, step DESC, position"
    query = f"{base} AND em >= 1 AND step < ? ORDER BY {order} LIMIT 2"
    right = rows(connection, query, [run_id, since, [row["question_id"] for row in last]])
    return [{"shows": "since"} | row for row in last] + [{"shows": "before"} | row for row in right]
