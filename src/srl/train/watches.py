"""Watches decide from the metrics of steps and validations whether something goes wrong.

One that fires is noted, or stops the run, which then says what starts again; the trainer acts, or verl's log
actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.config.load import SAVED
from srl.config.sections import WatchName
from srl.store import reading
from srl.train.run_directory import checkpoints
from srl.trajectory import Phase
from srl.workspace import Workspace

Metrics = Mapping[str, float]
LOWER = 0.5
"""The factor on the learning rate that is proposed for a new run."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A watch fires once its value is beyond its bound `patience` steps in a row; without a metric there is
    no value.

    The bound is the threshold, or with `of_highest` that share of the highest value so far that two steps in
    a row reached; a validation is `steady`, and reaches it alone. `value` is that of a step's metrics where
    it is not `metric` alone.
    """

    metric: str
    threshold: float
    patience: int = 3
    above: bool = False
    of_highest: bool = False
    steady: bool = False
    value: Callable[[Metrics], float] | None = None

    def of(self, metrics: Metrics) -> float | None:
        try:
            return metrics[self.metric] if self.value is None else self.value(metrics)
        except KeyError:
            return None


def _skipped(metrics: Metrics) -> float:
    """Skipped optimiser steps; verl counts none, but logs a norm that is not finite."""
    if "actor/skipped_steps" in metrics:
        return metrics["actor/skipped_steps"] + metrics.get("critic/skipped_steps", 0.0)
    norms = (metrics["actor/grad_norm"], metrics.get("critic/grad_norm", 0.0))
    return float(sum(not math.isfinite(norm) for norm in norms))


def _kl(metrics: Metrics) -> float:
    return metrics["actor/ref_kl"] if "actor/ref_kl" in metrics else metrics["critic/kl"]


def _wrong_together(metrics: Metrics) -> float:
    """At least this share of the groups agrees on something wrong."""
    return metrics["env/equal_groups_share"] - metrics["train/em"]


RULES: dict[WatchName, Rule] = {
    "entropy_low": Rule("actor/entropy", 0.001, 5),
    "kl": Rule("actor/ref_kl", 1.0, above=True, value=_kl),
    "sampler_mismatch": Rule("rollout/logprob_diff/mean", 0.1, above=True),
    "skipped_steps": Rule("actor/skipped_steps", 0.0, above=True, value=_skipped),
    "searches_low": Rule("env/number_of_valid_search", 0.25, of_highest=True),
    "valid_actions": Rule("env/ratio_of_valid_action", 0.7, of_highest=True),
    "repetition": Rule("env/repetition", 0.5, above=True),
    "equal_groups": Rule(
        "env/equal_groups_share − train/em", 0.9, 5, above=True, value=_wrong_together
    ),
    "val_em": Rule("val/em", 0.75, 2, of_highest=True, steady=True),
}  # fmt: skip
"""Every watch, by its name in `watch.actions` and `watch.thresholds`."""


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
    """How the value of one watch went so far: the last and the highest within its bound, then how many steps
    in a row are beyond it, and the first that may be."""

    last: float | None = None
    highest: float | None = None
    beyond: int = 0
    since: int = 0


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
            if (value := rule.of(metrics)) is None:
                continue
            threshold = section.thresholds.get(name, rule.threshold)
            bound: float | None = threshold
            if rule.of_highest:
                bound = None if course.highest is None else threshold * course.highest
            within = bound is None or (value <= bound if rule.above else value >= bound)
            if math.isfinite(value) and within:
                level = value if rule.steady or course.last is None else min(course.last, value)
                course.highest = level if course.highest is None else max(course.highest, level)
                course.last, course.beyond, course.since = value, 0, step + 1
                continue
            course.beyond, course.since = course.beyond + 1, course.since or step
            if course.beyond == rule.patience:
                figure, does = value if math.isfinite(value) else None, section.does(name)
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

    It is good if the last validation up to its step is, by the watch `val_em`: at least the threshold's share
    of the best so far. `val_em` is the exact match of the validations by step.
    """
    share = config.watch.thresholds.get("val_em", RULES["val_em"].threshold)

    def is_good(step: int) -> bool:
        so_far = [val_em[number] for number in sorted(val_em) if number <= step]
        return not so_far or so_far[-1] >= share * max(so_far)

    good = [path for step, path in checkpoints(run).items() if step < since and is_good(step)]
    lower = ["--set", f"actor.optim.lr={LOWER * config.actor.optim.lr:.3g}"]
    model = ["--model", str(good[-1])] if good else []
    command = Workspace(run.parent.parent).command("train", "--config", str(run / SAVED), *model, *lower)
    where = "start from the last good checkpoint" if good else "start again"
    return f"{where} with a lower learning rate: {command}"
