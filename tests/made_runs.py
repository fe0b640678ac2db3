"""Made-up runs of 24 training steps whose cause is known: what goes wrong does so from step 14 on."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tests.store_builder import BERN, KLEE, episode, new_log, policy

from srl.store import Record
from srl.trajectory import Score

STEPS, EPISODES, SINCE, RAMP = 24, 40, 14, 3
RIGHT, WRONG = "Münchenbuchsee", "Bern"


@dataclass(frozen=True)
class Rates:
    """What an episode of one step does, as probabilities, and the numbers of its update."""

    failed: float = 0.01
    answered: float = 0.97
    truncated: float = 0.0
    format_errors: float = 0.02
    searched: float = 0.95
    found: float = 0.7
    cut: float = 0.0
    read: float = 0.75
    guessed: float = 0.1
    bonus: float = 0.0
    long: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


HEALTHY = Rates(metrics={"actor/entropy": 0.8, "actor/ref_kl": 0.01, "actor/grad_norm": 0.5})


def changed(**changes: object) -> Rates:
    """The healthy rates with these changes; `metrics` are added to them."""
    metrics = HEALTHY.metrics | changes.pop("metrics", {})  # type: ignore[operator]
    return replace(HEALTHY, **changes, metrics=metrics)  # type: ignore[arg-type]


BROKEN = {
    "stopped searching": changed(searched=0.03),
    "evidence": changed(found=0.1),
    "reader": changed(read=0.15),
    "format errors": changed(answered=0.3, format_errors=0.6),
    "entropy collapse": changed(read=0.3, found=0.4, metrics={"actor/entropy": 0.02}),
    "KL blow-up": changed(
        answered=0.5, searched=0.4, found=0.3, read=0.2, format_errors=0.4,
        metrics={"actor/ref_kl": 4.0, "actor/entropy": 3.5, "actor/grad_norm": 60.0},
    ),
    "failed search": changed(failed=0.4),
    "too long": changed(answered=0.3, truncated=1.0, long=0.9),
    "reward hacking": changed(read=0.25, bonus=0.6),
    "evidence cut": changed(cut=0.85),
}  # fmt: skip
"""Rates of the last steps, by the cause that a report has to name."""

START = replace(
    HEALTHY, read=0.35, metrics={"actor/entropy": 1.6, "actor/ref_kl": 0.001, "actor/grad_norm": 1}
)
SOUND = {
    "rises": (START, HEALTHY),
    "stays": (HEALTHY, HEALTHY),
    "searches less as it learns": (changed(searched=0.99, found=0.5), changed(searched=0.7, found=0.95)),
    "entropy falls as it learns": (START, changed(metrics={"actor/entropy": 0.1, "actor/ref_kl": 0.2})),
    "dips a little at the end": (START, changed(read=0.7, answered=0.96)),
}
"""Rates of the first and the last step of runs with nothing to explain."""


def write_broken(run: Path, cause: str) -> None:
    """A run that learns for ten steps, stays, and has the rates of `cause` three steps after step 13."""
    rates = []
    for step in range(1, STEPS + 1):
        learnt = mixed(START, HEALTHY, min(step / 10, 1.0))
        rates.append(mixed(learnt, BROKEN[cause], min(max(step - SINCE + 1, 0) / RAMP, 1.0)))
    write_run(run, rates)


def write_sound(run: Path, kind: str) -> None:
    first, last = SOUND[kind]
    write_run(run, [mixed(first, last, step / (STEPS - 1)) for step in range(STEPS)])


def mixed(one: Rates, other: Rates, share: float) -> Rates:
    """The rates between two; numbers of the update on a scale of ratios."""
    numbers = {
        name: getattr(one, name) * (1 - share) + getattr(other, name) * share
        for name in Rates.__dataclass_fields__
        if name != "metrics"
    }
    metrics = {
        name: value ** (1 - share) * other.metrics[name] ** share for name, value in one.metrics.items()
    }
    return Rates(**numbers, metrics=metrics)


def write_run(run: Path, rates: list[Rates]) -> None:
    rng, log = np.random.default_rng(0), new_log(run)
    for step, given in enumerate(rates, start=1):
        records = [_episode(rng, given, step, number) for number in range(EPISODES)]
        metrics = {name: value * rng.lognormal(0, 0.1) for name, value in given.metrics.items()}
        log.write(step, "train", records, metrics)


def _episode(rng: np.random.Generator, rates: Rates, step: int, number: int) -> Record:
    def happens(rate: float) -> bool:
        return bool(rng.random() < rate)

    searched, found, cut = happens(rates.searched), happens(rates.found), happens(rates.cut)
    right = happens(rates.read if searched and found and not cut else rates.guessed)
    answered = happens(rates.answered)
    passages = ((BERN, KLEE) if cut else (KLEE, BERN)) if found else (BERN,)
    made = episode(
        number, step=step, passages=passages if searched else None,
        answer=(RIGHT if right else WRONG) if answered else None,
    )  # fmt: skip
    if searched:
        made.searches = [replace(made.searches[0], shown=1)]
    if not answered and happens(rates.truncated):
        made.end = "truncated"
    if happens(rates.format_errors):
        made.valid_actions = 0
    if happens(rates.long):
        made.segments.append(policy("and so on " * 60, 2))
    if happens(rates.failed):
        made.end = "failed"
    em = float(answered and right and made.valid)
    return Record(made, Score(em + (1.0 if happens(rates.bonus) else 0.0), {"em": em}))
