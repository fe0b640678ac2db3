"""Why a run got worse: whether its outcome fell, since when, and which cause its log supports best.

An episode is right by a chain: it is answered, it searched, a passage that was shown holds a golden answer,
and the answer is read from it. So the exact match of some steps is

    EM = a · (s · (e · r₁ + (1 - e) · r₀) + (1 - s) · r)

with a the share answered, s of these the share that searched, e of these the share that was shown a golden
answer, and r₁, r₀, r the exact match with it, without it and without a search. The share of a link in a fall
is its Shapley value: what it wins back at its earlier value, averaged over the orders in which the links get
theirs back. So the shares of several links that break together add up to the fall. Causes in training come
before those in the episodes: a policy that blew up breaks every link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import comb, isfinite
from statistics import fmean
from typing import Any

import duckdb

from srl.browse.falls import FEWEST, Fall, fall, level, level_window, rise
from srl.errors import UserError
from srl.store import rows
from srl.store.verdict import FAULT_SQL

FEW = 10
"""Episodes below which a rate is not known, and its earlier value stands for it."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over the episodes of some steps with golden answers, without those that failed."""

    episodes: int = 0
    failed: int = 0
    failed_engine: int = 0
    failed_reward: int = 0
    """Of the failed episodes those of which the engine or a reward failed; of the others a search did."""
    right: int = 0
    answered: int = 0
    searched: int = 0
    shown: int = 0
    right_shown: int = 0
    right_searched: int = 0
    truncated: int = 0
    turns: int = 0
    valid_actions: int = 0
    searches: int = 0
    tokens: int = 0
    reward: float = 0.0
    found: int = 0
    """Episodes with a golden answer in a passage that a search returned, shown or not.

    It and `repeated` are 0 in the steps that are not compared.
    """
    repeated: int = 0

    def __add__(self, other: Counts) -> Counts:
        names = self.__dataclass_fields__
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def rate(self, part: str, whole: str) -> float | None:
        """`part` of `whole`; None if there are too few."""
        return getattr(self, part) / getattr(self, whole) if getattr(self, whole) >= FEW else None

    @property
    def em(self) -> float:
        return self.right / max(self.episodes, 1)


@dataclass(frozen=True, slots=True)
class Chain:
    """The links of the chain; None for a rate of too few episodes."""

    answered: float | None
    searched: float | None
    shown: float | None
    read: float | None
    guessed: float | None
    recalled: float | None

    @classmethod
    def of(cls, counts: Counts) -> Chain:
        unshown = replace(counts, right=counts.right_searched - counts.right_shown,
                          episodes=counts.searched - counts.shown)  # fmt: skip
        without = replace(counts, right=counts.right - counts.right_searched,
                          episodes=counts.answered - counts.searched)  # fmt: skip
        return cls(
            counts.rate("answered", "episodes"), counts.rate("searched", "answered"),
            counts.rate("shown", "searched"), counts.rate("right_shown", "shown"),
            unshown.rate("right", "episodes"), without.rate("right", "episodes"),
        )  # fmt: skip

    def filled(self, other: Chain) -> Chain:
        """With the rates of `other` in place of unknown ones."""
        names = self.__dataclass_fields__
        mine = {name: getattr(self, name) for name in names}
        return Chain(**{name: getattr(other, name) if mine[name] is None else mine[name] for name in names})

    def em(self) -> float:
        """The exact match by the chain; a rate that is unknown on both sides is 0."""
        known = [value or 0.0 for value in (getattr(self, name) for name in self.__dataclass_fields__)]
        answered, searched, shown, read, guessed, recalled = known
        return answered * (searched * (shown * read + (1 - shown) * guessed) + (1 - searched) * recalled)


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause by `name`, in a sentence, with the numbers that support it; `where` selects its episodes."""

    name: str
    sentence: str
    evidence: tuple[str, ...]
    where: str = "em = 0"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What happened to a run: its outcome in a sentence, the likeliest cause if any, and other findings."""

    run_id: str
    outcome: str
    since: int | None
    cause: Finding | None
    others: tuple[Finding, ...] = ()
    series: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    examples: tuple[dict[str, Any], ...] = ()
    watches: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True)
class _Log:
    """What the rules look at: counts of every training step, and metrics by name and step."""

    run_id: str
    counts: dict[int, Counts]
    metrics: dict[str, dict[int, float]]
    validation: dict[int, float]

    def over(self, steps: Sequence[int]) -> Counts:
        return sum((self.counts[step] for step in steps), Counts())

    def metric(self, *names: str) -> dict[int, float]:
        """The first of these metrics that there is."""
        return next((self.metrics[name] for name in names if name in self.metrics), {})


_COUNTS = f"""
WITH judged AS (
    SELECT *, valid AND answer IS NOT NULL AS said, em >= 1 AS good,
        coalesce(gold_in_passages, false) AS shows, {FAULT_SQL} AS fault
    FROM trajectories WHERE run_id = $run AND phase = 'train' AND em IS NOT NULL
)
SELECT step, count(*) FILTER (valid) AS episodes, count(*) FILTER (NOT valid) AS failed,
    count(*) FILTER (NOT valid AND fault = 'failed engine') AS failed_engine,
    count(*) FILTER (NOT valid AND fault = 'failed reward') AS failed_reward,
    count(*) FILTER (said AND good) AS right, count(*) FILTER (said) AS answered,
    count(*) FILTER (said AND searches > 0) AS searched,
    count(*) FILTER (said AND searches > 0 AND shows) AS shown,
    count(*) FILTER (said AND searches > 0 AND shows AND good) AS right_shown,
    count(*) FILTER (said AND searches > 0 AND good) AS right_searched,
    count(*) FILTER (valid AND "end" = 'truncated') AS truncated,
    coalesce(sum(turns) FILTER (valid), 0) AS turns,
    coalesce(sum(valid_actions) FILTER (valid), 0) AS valid_actions,
    coalesce(sum(searches) FILTER (valid), 0) AS searches,
    coalesce(sum(tokens) FILTER (valid), 0) AS tokens,
    coalesce(sum(reward) FILTER (valid), 0.0) AS reward
FROM judged GROUP BY step ORDER BY step
"""

_OF_SEARCHES = """
SELECT step, count(*) FILTER (answer IS NOT NULL AND found) AS found, sum(repeated)::BIGINT AS repeated
FROM trajectories JOIN (
    SELECT trajectory_id AS id, bool_or(gold_rank IS NOT NULL) AS found,
        count(*) FILTER (repeated) AS repeated
    FROM searches WHERE run_id = $run AND phase = 'train' AND step IN ({steps}) GROUP BY trajectory_id
) USING (id)
WHERE run_id = $run AND phase = 'train' AND step IN ({steps}) AND em IS NOT NULL AND valid
GROUP BY step
"""


def diagnose(connection: duckdb.DuckDBPyConnection, run_id: str) -> Diagnosis:
    """The diagnosis of a run. Raises UserError below 8 training steps of questions with golden answers."""
    log = _read(connection, run_id)
    if len(log.counts) < FEWEST:
        raise UserError(
            f"{run_id} has {len(log.counts)} training steps on questions with golden answers; a cause needs "
            f"{FEWEST}"
        )
    fell, outcome = _outcome(log)
    if fell:
        _count_searches(connection, log, [*fell.before, *fell.after])
    found = [*_always(log), *(_of_fall(log, fell) if fell else _of_standstill(log))]
    if fell and not found:
        outcome += "; no rule explains it"
    shown = _examples(connection, run_id, found[0], fell) if found else []
    return Diagnosis(
        run_id, outcome, fell.since if fell else None, found[0] if found else None, tuple(found[1:]),
        _series(log), tuple(shown), tuple(_watches(connection, run_id)),
    )  # fmt: skip


def _read(connection: duckdb.DuckDBPyConnection, run_id: str) -> _Log:
    found = rows(connection, _COUNTS, {"run": run_id})
    counts = {row.pop("step"): row for row in found}
    query = "SELECT phase, step, metrics FROM raw.steps WHERE run_id = ? ORDER BY step"
    metrics: dict[str, dict[int, float]] = {}
    validation: dict[int, float] = {}
    for row in rows(connection, query, [run_id]):
        if row["phase"] == "train":
            for name, value in row["metrics"].items():
                metrics.setdefault(name, {})[row["step"]] = value
        elif row["phase"] == "val" and "val/em" in row["metrics"]:
            validation[row["step"]] = row["metrics"]["val/em"]
    return _Log(run_id, {step: Counts(**row) for step, row in counts.items()}, metrics, validation)


def _count_searches(connection: duckdb.DuckDBPyConnection, log: _Log, steps: Sequence[int]) -> None:
    """Count what the searches of these steps found and repeated: over all steps it would cost the most."""
    query = _OF_SEARCHES.format(steps=", ".join(map(str, steps)))
    for row in rows(connection, query, {"run": log.run_id}):
        log.counts[row["step"]] = replace(
            log.counts[row["step"]], found=row["found"], repeated=row["repeated"]
        )


def _outcome(log: _Log) -> tuple[Fall | None, str]:
    """The fall of the exact match, in training or else in validation, and a sentence about the outcome."""
    steps, values = list(log.counts), [counts.em for counts in log.counts.values()]
    if found := fall(steps, values):
        return found, f"training EM fell from {found.high:.3f} to {found.low:.3f}, since step {found.since}"
    if found := fall(list(log.validation), list(log.validation.values())):
        before = tuple(step for step in steps if step < found.since)[-20:]
        after = tuple(step for step in steps if step >= found.since)[-20:]
        if before and after:
            sentence = (
                f"validation EM fell from {found.high:.3f} to {found.low:.3f}, since step {found.since}"
            )
            return replace(found, before=before, after=after), sentence
    moved = "rose" if _rose(log) else "neither rose nor fell"
    window = level_window(values)
    levels = [f"{fmean(values[part]):.3f} in steps {steps[part][0]} to {steps[part][-1]}"
              for part in (slice(window), slice(-window, None))]  # fmt: skip
    return None, f"EM {moved}: {', '.join(levels)}"


def _rose(log: _Log) -> bool:
    """Whether the exact match rose, in training or in validation."""
    return rise([counts.em for counts in log.counts.values()]) or rise(list(log.validation.values()))


def _always(log: _Log) -> list[Finding]:
    """Faults that count whatever the outcome: episodes that fail, and numbers that are not finite."""
    found = []
    steps = list(log.counts)
    last = log.over(steps[-max(3, len(steps) // 10) :])
    share = last.failed / max(last.failed + last.episodes, 1)
    if share >= 0.1:
        first = next(step for step in steps if _failed(log.counts[step]) >= share / 2)
        found.append(_fault(last, f"{share:.1%} of the last episodes failed; since step {first}"))
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy", "critic/grad_norm"):
        broken = [step for step, value in log.metric(name).items() if not isfinite(value)]
        if broken:
            found.append(Finding(
                "numbers not finite", "The update has numbers that are not finite.",
                (f"{name} is not finite at {len(broken)} steps, first at step {broken[0]}",),
            ))  # fmt: skip
            break
    return found


_FAULTS = {
    "failed search": ("failed searches", "Searches fail, so episodes are lost to the infrastructure."),
    "failed engine": ("failed engine", "The engine fails, so episodes are left out of the loss."),
    "failed reward": ("failed reward", "A reward gives no score, so episodes are left out of the loss."),
}
"""The name and the sentence of the cause for each fault of an episode."""


def _fault(last: Counts, lost: str) -> Finding:
    """The fault of most of the episodes that were `lost`, and how many have each."""
    counts = {"failed engine": last.failed_engine, "failed reward": last.failed_reward}
    counts = {"failed search": last.failed - sum(counts.values())} | counts
    most = max(counts, key=counts.__getitem__)
    listed = ", ".join(f"{count} {fault}" for fault, count in counts.items() if count)
    return Finding(*_FAULTS[most], (lost, f"of these {listed}"), f"NOT valid AND {FAULT_SQL} = '{most}'")


def _failed(counts: Counts) -> float:
    return counts.failed / max(counts.failed + counts.episodes, 1)


def _of_fall(log: _Log, fell: Fall) -> list[Finding]:
    """The causes of a fall that the log supports, the likeliest first."""
    before, after = log.over(fell.before), log.over(fell.after)
    return [
        *_hacking(before, after),
        *_update(log, fell),
        *causes_in_episodes(before, after),
    ]


def _hacking(before: Counts, after: Counts) -> list[Finding]:
    """The reward rose while the exact match fell."""
    was, now = (counts.reward / max(counts.episodes, 1) for counts in (before, after))
    if now - was < 0.05 or before.em - after.em < 0.03:
        return []
    return [Finding(
        "reward hacking", "The policy earns reward by something else than right answers.",
        (f"mean reward rose from {was:.3f} to {now:.3f}, EM fell from {before.em:.3f} to {after.em:.3f}",),
        "em = 0 AND reward > 0",
    )]  # fmt: skip


_UPDATES = (
    ("sampler and trainer apart", ("rollout/logprob_diff/mean",), 10.0, 0.02,
     "Sampler and trainer give the same tokens different log-probs."),
    ("KL blow-up", ("actor/ref_kl", "critic/kl", "actor/kl_loss"), 10.0, 0.1,
     "The policy left its reference: the update blew up."),
    ("entropy explosion", ("actor/entropy",), 3.0, 0.5, "The policy became random."),
)  # fmt: skip
_COLLAPSE = 0.2
"""Entropy that falls below this share of its earlier value has collapsed."""


def _update(log: _Log, fell: Fall) -> list[Finding]:
    """Numbers of the update that exploded or collapsed where the outcome fell."""
    found = []
    for name, metrics, times, least, sentence in _UPDATES:
        series = log.metric(*metrics)
        was, now = level(series, fell.before), level(series, fell.after)
        if was is not None and now is not None and now >= max(times * was, least):
            label = next(metric for metric in metrics if metric in log.metrics)
            found.append(Finding(name, sentence, (_moved(label, was, now, fell), *_beside(log, fell))))
    was, now = (level(log.metric("actor/entropy"), steps) for steps in (fell.before, fell.after))
    if was and now is not None and now <= _COLLAPSE * was:
        sentence = "The policy's entropy collapsed: it no longer tries anything else."
        found.append(Finding("entropy collapse", sentence, (_moved("actor/entropy", was, now, fell),)))
    return found


def _moved(name: str, was: float, now: float, fell: Fall) -> str:
    return f"{name} went from {was:.3g} to {now:.3g} (medians before and since step {fell.since})"


def _beside(log: _Log, fell: Fall) -> list[str]:
    """What the norm of the gradient did."""
    series = log.metric("actor/grad_norm")
    was, now = level(series, fell.before), level(series, fell.after)
    return [] if was is None or now is None else [_moved("actor/grad_norm", was, now, fell)]


_LINKS = {
    "answered": ("no answer", "More episodes end without an answer.", "answer IS NULL AND valid"),
    "searched": ("stopped searching", "The policy stopped searching.", "searches = 0 AND em = 0"),
    "shown": ("evidence", "The searches bring the evidence less often: the retriever or the queries.",
              "searches > 0 AND NOT gold_in_passages AND em = 0"),
    "read": ("reader", "The policy gives wrong answers although the evidence was shown.",
             "gold_in_passages AND em = 0"),
    "guessed": ("answers without evidence", "Answers without evidence are right less often.",
                "searches > 0 AND NOT gold_in_passages AND em = 0"),
    "recalled": ("answers from memory", "Answers without a search are right less often.",
                 "searches = 0 AND em = 0"),
}  # fmt: skip
_SHARE = 0.3
"""A link counts from this share of the fall."""
_WORDS = {
    "answered": "answered", "searched": "searched (of those answered)",
    "shown": "shown a golden answer (of those that searched)", "read": "right where it was shown",
    "guessed": "right where it was not shown", "recalled": "right without a search",
}  # fmt: skip


def causes_in_episodes(before: Counts, after: Counts) -> list[Finding]:
    """The links of the chain that explain the fall, the one with the largest share first."""
    was, now = Chain.of(before), Chain.of(after)
    was, now = was.filled(now), now.filled(was)
    lost = was.em() - now.em()
    if lost <= 0:
        return []
    shares = {name: _won_back(name, was, now) / lost for name in _LINKS}
    ranked = sorted(shares, key=shares.__getitem__, reverse=True)
    return [_link(name, was, now, shares[name], before, after) for name in ranked if shares[name] >= _SHARE]


def _won_back(name: str, was: Chain, now: Chain) -> float:
    """The Shapley value of a link: the EM that it wins back at its earlier value, over all orders."""
    others = [one for one in _LINKS if one != name]
    value = 0.0
    for size in range(len(others) + 1):
        for known in combinations(others, size):
            at = replace(now, **{one: getattr(was, one) for one in known})
            gain = replace(at, **{name: getattr(was, name)}).em() - at.em()
            value += gain / (len(_LINKS) * comb(len(others), size))
    return value


def _link(name: str, was: Chain, now: Chain, share: float, before: Counts, after: Counts) -> Finding:
    title, sentence, where = _LINKS[name]
    evidence = [
        f"{_WORDS[name]}: {getattr(was, name) or 0:.1%} before, {getattr(now, name) or 0:.1%} since: "
        f"{min(share, 1):.0%} of the fall"
    ]
    if name == "answered":
        title, sentence, more = _unanswered(before, after)
        evidence += more
    elif name == "shown":
        title, sentence, more = _unshown(before, after, title, sentence)
        evidence += more
    return Finding(title, sentence, tuple(evidence), where)


def _unanswered(before: Counts, after: Counts) -> tuple[str, str, list[str]]:
    """Why episodes have no answer: cut off, no valid action, or turns that ran out."""
    lost = (before.answered / max(before.episodes, 1)) - (after.answered / max(after.episodes, 1))
    cut = after.truncated / max(after.episodes, 1) - before.truncated / max(before.episodes, 1)
    errors = [1 - counts.valid_actions / max(counts.turns, 1) for counts in (before, after)]
    length = [counts.tokens / max(counts.episodes, 1) for counts in (before, after)]
    evidence = [
        f"turns without a valid action: {errors[0]:.1%} before, {errors[1]:.1%} since",
        f"policy tokens an episode: {length[0]:.0f} before, {length[1]:.0f} since",
    ]
    if cut >= lost / 2:
        return "too long", "Episodes grow until they are cut off before an answer.", evidence
    if errors[1] - errors[0] >= 0.05:
        return "format errors", "Turns without a valid action became frequent.", evidence
    return "no answer", _LINKS["answered"][1], evidence


def _unshown(before: Counts, after: Counts, title: str, sentence: str) -> tuple[str, str, list[str]]:
    """Whether evidence is found and does not fit, or is not found; and what the queries did."""
    rates = [counts.found / max(counts.searched, 1) for counts in (before, after)]
    repeated = [counts.repeated / max(counts.searches, 1) for counts in (before, after)]
    evidence = [
        f"found a golden answer among all hits: {rates[0]:.1%} before, {rates[1]:.1%} since",
        f"queries asked before in the same episode: {repeated[0]:.1%} before, {repeated[1]:.1%} since",
    ]
    hidden = [
        rate - counts.shown / max(counts.searched, 1)
        for rate, counts in zip(rates, (before, after), strict=True)
    ]
    lost = before.shown / max(before.searched, 1) - after.shown / max(after.searched, 1)
    if hidden[1] - hidden[0] >= lost / 2:
        return "evidence cut", "The evidence is found but does not fit into the observation.", evidence
    if repeated[1] - repeated[0] >= 0.25:
        return (
            "repeated queries",
            "The policy repeats its queries instead of asking for what is missing.",
            evidence,
        )
    return title, sentence, evidence


_EQUAL = 0.6
"""A run has too few groups with a gradient if this share of them has none."""
_EQUAL_SHARES = ("env/equal_groups_share/right", "env/equal_groups_share/wrong")


def _of_standstill(log: _Log) -> list[Finding]:
    """Why a run that did not fall did not rise either; nothing for one that rose."""
    if _rose(log):
        return []
    steps = list(log.counts)
    later = steps[len(steps) // 2 :]
    late = log.over(later)
    found = []
    agree = level(log.metric("actor/no_gradient_share"), later)
    if agree is not None and agree >= _EQUAL:
        which = "nearly every group" if agree >= 0.9 else "most groups"
        shares = {name: level(log.metric(name), later) for name in _EQUAL_SHARES}
        known = [f"{name} {share:.2f}" for name, share in shares.items() if share is not None]
        found.append(Finding(
            "no gradient", f"The samples of {which} score the same: few questions teach anything.",
            (f"{', '.join([f'actor/no_gradient_share {agree:.2f}', *known])} (medians of the later half)",),
        ))  # fmt: skip
    errors = 1 - late.valid_actions / max(late.turns, 1)
    if errors >= 0.5:
        found.append(Finding("format errors", "Most turns have no valid action.",
                             (f"{errors:.1%} of the turns in the later half",), "em = 0"))  # fmt: skip
    if late.searched >= FEW and late.shown < 0.05 * late.searched:
        found.append(Finding("evidence", "Searches hardly ever bring a golden answer: retriever or queries.",
                             (f"shown to {late.shown} of {late.searched} episodes in the later half",),
                             "searches > 0 AND em = 0"))  # fmt: skip
    return found


def _series(log: _Log) -> dict[str, dict[int, float]]:
    """The curves of a report, by name."""

    def rate(part: str, whole: str) -> dict[int, float]:
        return {
            step: getattr(counts, part) / getattr(counts, whole)
            for step, counts in log.counts.items()
            if getattr(counts, whole)
        }  # fmt: skip

    found = {
        "validation EM": log.validation, "training EM": rate("right", "episodes"),
        "reward": rate("reward", "episodes"), "answered": rate("answered", "episodes"),
        "searches an episode": rate("searches", "episodes"), "searched": rate("searched", "answered"),
        "evidence shown": rate("shown", "searched"), "EM with evidence": rate("right_shown", "shown"),
        "valid actions": rate("valid_actions", "turns"), "tokens an episode": rate("tokens", "episodes"),
        "equal groups": log.metric("env/equal_groups_share"),
        "failed": {step: _failed(counts) for step, counts in log.counts.items()},
        "entropy": log.metric("actor/entropy"), "KL": log.metric("actor/ref_kl", "critic/kl"),
        "gradient norm": log.metric("actor/grad_norm"),
    }  # fmt: skip
    return {name: dict(series) for name, series in found.items() if series}


RULE = (
    "up to three wrong episodes of the last steps that show the cause, and up to two right ones from before "
    "it, of the same questions where there are any"
)
"""Which trajectories a report shows."""


def _examples(
    connection: duckdb.DuckDBPyConnection, run_id: str, cause: Finding, fell: Fall | None
) -> list[dict[str, Any]]:
    """Trajectories by `RULE`, each with `shows`: `since` or `before`."""
    columns = "id, step, phase, question_id, question, em, reward, searches, verdict, answer"
    base = f"SELECT {columns} FROM trajectories WHERE run_id = ? AND phase = 'train'"
    last = rows(connection, f"{base} AND ({cause.where}) ORDER BY step DESC, position LIMIT 3", [run_id])
    found = [row | {"shows": "since"} for row in last]
    if fell:
        asked = [row["question_id"] for row in last]
        order = "list_contains(?, question_id) DESC, step DESC, position"
        query = f"{base} AND em >= 1 AND step < ? ORDER BY {order} LIMIT 2"
        found += [row | {"shows": "before"} for row in rows(connection, query, [run_id, fell.since, asked])]
    return found


def _watches(connection: duckdb.DuckDBPyConnection, run_id: str) -> list[dict[str, Any]]:
    """The watches that fired, where the log has them."""
    known = "SELECT count(*) > 0 FROM duckdb_views() WHERE view_name = 'watches' AND NOT internal"
    if connection.execute(known).fetchall() != [(True,)]:
        return []
    return rows(connection, "SELECT * FROM watches WHERE run_id = ? ORDER BY number", [run_id])
