"""Watches decide from the metrics of steps and validations whether something goes wrong.

One that fires is noted, or stops the run, which then says what starts again; the trainer acts, or verl's log
actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal

from srl.config import Config
from srl.config.load import SAVED
from srl.config.sections import WatchName
from srl.store import reading
from srl.train.run_directory import checkpoints
from srl.trajectory import Phase
from srl.workspace import Workspace

Metrics = Mapping[str, float]
LEVEL, WINDOW = 5, 20
"""Steps whose median is a level, so that one odd step does not set the highest; and those whose median an
exploding value is compared with."""
LOWER = 0.5
"""The factor on the learning rate that is proposed for a new run."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A watch fires once its value is beyond its bound `patience` steps in a row; without a metric there is
    no value.

    The bound is the threshold itself; that share of the run's `highest` level; so many times the `median` of
    the last steps; or the highest value minus the threshold, for a `fall`. `value` is that of the metrics of
    a step, where it is not `metric` alone.
    """

    metric: str
    threshold: float
    patience: int = 3
    above: bool = True
    compared_with: Literal["threshold", "highest", "median", "fall"] = "threshold"
    phase: Phase = "train"
    value: Callable[[Metrics, Config], float | None] | None = None

    def of(self, metrics: Metrics, config: Config) -> float | None:
        try:
            return metrics[self.metric] if self.value is None else self.value(metrics, config)
        except KeyError:
            return None


def _skipped(metrics: Metrics, config: Config) -> float:
    """Skipped optimiser steps; verl counts none, but logs a norm that is not finite."""
    if "actor/skipped_steps" in metrics:
        return metrics["actor/skipped_steps"] + metrics.get("critic/skipped_steps", 0.0)
    norms = (metrics["actor/grad_norm"], metrics.get("critic/grad_norm", 0.0))
    return float(sum(not math.isfinite(norm) for norm in norms))


def _share_of_longest(metrics: Metrics, config: Config) -> float:
    """The tokens that the policy writes, of the most that an episode allows."""
    turns = (config.rollout.max_turns + 1) * config.rollout.max_turn_tokens
    return metrics[_LENGTH] / min(turns, config.data.max_response_length)


_LENGTH = "response_length/mean"
_FALLS: Any = {"above": False, "compared_with": "highest"}
RULES: dict[WatchName, Rule] = {
    "entropy_low": Rule("actor/entropy", 0.001, 5, above=False),
    "entropy_high": Rule("actor/entropy", 2.0),
    "kl": Rule("actor/ref_kl", 1.0, value=lambda m, _: m.get("actor/ref_kl", m.get("critic/kl"))),
    "sampler_mismatch": Rule("rollout/logprob_diff/mean", 0.1),
    "grad_norm": Rule("actor/grad_norm", 10.0, compared_with="median"),
    "skipped_steps": Rule("actor/skipped_steps", 0.0, value=_skipped),
    "searches_low": Rule("env/number_of_valid_search", 0.25, **_FALLS),
    "valid_actions": Rule("env/ratio_of_valid_action", 0.7, **_FALLS),
    "repetition": Rule("env/repetition", 0.5),
    "length_low": Rule(_LENGTH, 0.25, **_FALLS),
    "length_high": Rule(f"{_LENGTH} / the most tokens", 0.8, value=_share_of_longest),
    "equal_groups": Rule(  # at least this share of groups agrees on something wrong
        "env/equal_groups_share − train/em", 0.9, 5,
        value=lambda m, _: m["env/equal_groups_share"] - m["train/em"],
    ),
    "explained_variance": Rule("critic/vf_explained_var", -0.5, 5, above=False),
    "val_em": Rule("val/em", 0.1, 2, above=False, compared_with="fall", phase="val"),
}  # fmt: skip
"""Every watch, by its name in `watch.actions`, `watch.thresholds` and `watch.patience`."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A watch that fired after `step`, because `value` is beyond `bound`; None for what is not a number.

    `since` is the first step that may be bad.
    """

    step: int
    phase: Phase
    watch: WatchName
    metric: str
    value: float | None
    bound: float | None
    since: int
    action: str

    def __str__(self) -> str:
        value = "not a number" if self.value is None else f"{self.value:.4g}"
        side = "above" if RULES[self.watch].above else "below"
        bound = "" if self.bound is None else f", {side} {self.bound:.4g}"
        what = f"{self.metric} is {value}{bound}, since step {self.since}"
        return f"watch {self.watch} at step {self.step}: {what}"


@dataclass(slots=True)
class Course:
    """How the value of one watch went so far: the last values within its bound and the highest level of all,
    then how many steps in a row are beyond it, and the first that may be."""

    good: list[float] = field(default_factory=list)
    highest: float = -math.inf
    beyond: int = 0
    since: int = 0

    def bound(self, rule: Rule, threshold: float) -> float | None:
        """What the next value is compared with; None while too little is known."""
        if rule.compared_with == "threshold":
            return threshold
        if rule.compared_with == "median":
            return threshold * median(self.good) if len(self.good) >= LEVEL else None
        if self.highest == -math.inf:
            return None
        return self.highest - threshold if rule.compared_with == "fall" else self.highest * threshold

    def note(self, step: int, value: float, is_good: bool, rule: Rule) -> None:
        """Count the step; a good one changes what later ones are compared with."""
        if not is_good:
            self.beyond, self.since = self.beyond + 1, self.since or step
            return
        self.good = [*self.good, value][-WINDOW:]
        self.beyond, self.since = 0, step + 1
        if rule.compared_with == "fall":
            self.highest = max(self.highest, value)
        elif len(self.good) >= LEVEL:
            self.highest = max(self.highest, median(self.good[-LEVEL:]))


class Watcher:
    """The watches of a run. A resumed run's have seen what its log has (`look_back`)."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.courses = {name: Course() for name in RULES if config.watch.does(name) != "off"}
        self.fired: list[Fired] = []

    def look_back(self, log: Path) -> None:
        """Observe the steps and validations in the directory `log`, one after the other."""
        query = "SELECT step, phase, name, value FROM metrics WHERE phase IN ('train', 'val') ORDER BY 1, 2"
        rows = reading([log], lambda connection: connection.execute(query).fetchall())
        for (step, phase), group in groupby(rows, itemgetter(0, 1)):
            self.observe(step, phase, {name: value for _, _, name, value in group})

    def observe(self, step: int, phase: Phase, metrics: Metrics) -> list[Fired]:
        """The watches that fire on the metrics of a finished step or validation."""
        fired, section = list[Fired](), self.config.watch
        for name, course in self.courses.items():
            rule = RULES[name]
            value = rule.of(metrics, self.config) if rule.phase == phase else None
            if value is None:
                continue
            bound = course.bound(rule, section.thresholds.get(name, rule.threshold))
            within = bound is None or (value <= bound if rule.above else value >= bound)
            course.note(step, value, math.isfinite(value) and within, rule)
            if course.beyond == section.patience.get(name, rule.patience):
                figure = value if math.isfinite(value) else None
                does = section.does(name)
                fired.append(Fired(step, phase, name, rule.metric, figure, bound, course.since, does))
        self.fired += fired
        return fired

    def rows(self) -> list[dict[str, Any]]:
        """What fired, as the log has it."""
        return [asdict(fired) for fired in self.fired]


def to_act_on(fired: Sequence[Fired]) -> Fired | None:
    """The first that stops the run."""
    return next((each for each in fired if each.action == "stop"), None)


def how_to_start_again(run: Path, config: Config, val_em: Mapping[int, float], since: int) -> str:
    """The command of a new run with a lower learning rate, from the newest good checkpoint before step
    `since`, if there is one.

    It is good if the last validation up to its step is, by the watch `val_em`: not more than the threshold
    below the best so far. `val_em` is the exact match of the validations by step.
    """
    margin = config.watch.thresholds.get("val_em", RULES["val_em"].threshold)

    def is_good(step: int) -> bool:
        so_far = [val_em[number] for number in sorted(val_em) if number <= step]
        return not so_far or so_far[-1] >= max(so_far) - margin

    good = [path for step, path in checkpoints(run).items() if step < since and is_good(step)]
    lower = ["--set", f"actor.optim.lr={LOWER * config.actor.optim.lr:.3g}"]
    model = ["--model", str(good[-1])] if good else []
    command = Workspace(run.parent.parent).command("train", "--config", str(run / SAVED), *model, *lower)
    where = "start from the last good checkpoint" if good else "start again"
    return f"{where} with a lower learning rate: {command}"
