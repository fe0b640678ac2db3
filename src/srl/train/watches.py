"""Decides from the metrics of steps which watch fires; the trainer acts, or verl's log actor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal, Self

from srl.config import Config
from srl.config.sections import WatchName
from srl.trajectory import Phase

Metrics = Mapping[str, float]
ComparedWith = Literal["threshold", "highest", "median", "fall"]
"""What a value is compared with: the threshold itself; that share of the run's highest level; so many times
the median of the last steps; or the highest value minus the threshold."""
LEVEL = 5
"""Steps whose median is a level, so that one odd step does not set the highest."""
WINDOW = 20
"""Steps whose median an exploding value is compared with."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an episode may do at most: turns that search, and tokens that the policy writes."""

    max_turns: int
    max_tokens: int

    @classmethod
    def of(cls, config: Config) -> Self:
        rollout = config.rollout
        turns = (rollout.max_turns + 1) * rollout.max_turn_tokens
        return cls(rollout.max_turns if rollout.search else 0, min(turns, config.data.max_response_length))


@dataclass(frozen=True, slots=True)
class Rule:
    """What a watch looks at, and beyond which threshold it fires after `patience` steps in a row.

    `value` is None where a step does not have it.
    """

    metric: str
    value: Callable[[Metrics, Limits], float | None]
    threshold: float
    patience: int = 3
    above: bool = True
    compared_with: ComparedWith = "threshold"
    phase: Phase = "train"


def _first(*names: str) -> Callable[[Metrics, Limits], float | None]:
    """The first of these metrics that a step has."""
    return lambda metrics, limits: next((metrics[name] for name in names if name in metrics), None)


def _skipped(metrics: Metrics, limits: Limits) -> float | None:
    """Skipped optimiser steps; verl counts none, but logs a norm that is not finite."""
    counts = [metrics[name] for name in ("actor/skipped_steps", "critic/skipped_steps") if name in metrics]
    norms = [metrics[name] for name in ("actor/grad_norm", "critic/grad_norm") if name in metrics]
    if counts:
        return sum(counts)
    return float(sum(not math.isfinite(norm) for norm in norms)) if norms else None


def _searched(metrics: Metrics, limits: Limits) -> float | None:
    """Searches per question, where the policy may search."""
    return metrics.get("env/number_of_valid_search") if limits.max_turns else None


def _searched_without_answer(metrics: Metrics, limits: Limits) -> float | None:
    """The share of the turns for searching that is used, minus the share of episodes with an answer."""
    searches, answered = metrics.get("env/number_of_valid_search"), metrics.get("env/finish_ratio")
    if searches is None or answered is None or not limits.max_turns:
        return None
    return searches / limits.max_turns - answered


def _share_of_longest(metrics: Metrics, limits: Limits) -> float | None:
    length = metrics.get("response_length/mean")
    return None if length is None else length / limits.max_tokens


def _equally_wrong(metrics: Metrics, limits: Limits) -> float | None:
    """At least this share of groups agrees on something wrong: those that agree, minus the right answers."""
    equal, right = metrics.get("env/equal_groups_share"), metrics.get("train/em")
    return None if equal is None or right is None else equal - right


RULES: dict[WatchName, Rule] = {
    "entropy_low": Rule("actor/entropy", _first("actor/entropy"), 0.001, 5, above=False),
    "entropy_high": Rule("actor/entropy", _first("actor/entropy"), 2.0),
    "kl": Rule("actor/ref_kl", _first("actor/ref_kl", "critic/kl"), 1.0),
    "sampler_mismatch": Rule("rollout/logprob_diff/mean", _first("rollout/logprob_diff/mean"), 0.1),
    "grad_norm": Rule("actor/grad_norm", _first("actor/grad_norm"), 10.0, compared_with="median"),
    "skipped_steps": Rule("actor/skipped_steps", _skipped, 0.0),
    "searches_low": Rule(
        "env/number_of_valid_search", _searched, 0.25, above=False, compared_with="highest"
    ),
    "searches_high": Rule(
        "env/number_of_valid_search / rollout.max_turns − env/finish_ratio", _searched_without_answer, 0.5
    ),
    "valid_actions": Rule(
        "env/ratio_of_valid_action", _first("env/ratio_of_valid_action"), 0.7, above=False,
        compared_with="highest",
    ),
    "repetition": Rule("env/repetition", _first("env/repetition"), 0.5),
    "length_low": Rule(
        "response_length/mean", _first("response_length/mean"), 0.25, above=False, compared_with="highest"
    ),
    "length_high": Rule("response_length/mean / the most tokens", _share_of_longest, 0.8),
    "equal_groups": Rule("env/equal_groups_share − train/em", _equally_wrong, 0.9, 5),
    "explained_variance": Rule(
        "critic/vf_explained_var", _first("critic/vf_explained_var"), -0.5, 5, above=False
    ),
    "val_em": Rule(
        "val/em", _first("val/em"), 0.1, 2, above=False, compared_with="fall", phase="val"
    ),
}  # fmt: skip
"""Every watch, by the name of its section."""


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
        side = "below" if not RULES[self.watch].above else "above"
        value = "not a number" if self.value is None else f"{self.value:.4g}"
        bound = "" if self.bound is None else f", {side} {self.bound:.4g}"
        since = f"since step {self.since}"
        return f"watch {self.watch} at step {self.step}: {self.metric} is {value}{bound}, {since}"


@dataclass(slots=True)
class Course:
    """How the value of one watch went so far."""

    beyond: int = 0
    """Steps in a row beyond the bound, up to the last."""
    within: int = 0
    """Steps in a row within it, up to the last."""
    good: int | None = None
    """The last step within it."""
    since: int = 0
    """The step after `good` as it went beyond, or the first step that was seen."""
    fired: bool = False
    """Whether it has fired and not recovered since."""
    highest: float | None = None
    recent: list[float] = field(default_factory=list)

    def bound(self, rule: Rule, threshold: float) -> float | None:
        """What the next value is compared with; None while too little is known."""
        if rule.compared_with == "threshold":
            return threshold
        if rule.compared_with == "median":
            return threshold * median(self.recent) if len(self.recent) >= LEVEL else None
        if self.highest is None:
            return None
        return self.highest - threshold if rule.compared_with == "fall" else self.highest * threshold

    def note(self, step: int, value: float, is_beyond: bool, rule: Rule) -> None:
        """Count the step, and let its value change what later ones are compared with."""
        if is_beyond and not self.beyond:
            self.since = step if self.good is None else self.good + 1
        self.beyond, self.within = (self.beyond + 1, 0) if is_beyond else (0, self.within + 1)
        self.good = self.good if is_beyond else step
        if is_beyond or not math.isfinite(value):
            return
        self.recent = [*self.recent, value][-(WINDOW if rule.compared_with == "median" else LEVEL) :]
        level: float | None = value
        if rule.compared_with != "fall":
            level = median(self.recent) if len(self.recent) >= LEVEL else None
        if level is not None:
            self.highest = level if self.highest is None else max(self.highest, level)


def is_beyond(value: float, bound: float | None, above: bool) -> bool:
    """Whether `value` is on the wrong side of `bound`; what is not finite always is."""
    if not math.isfinite(value):
        return True
    return bound is not None and (value > bound if above else value < bound)


class Watcher:
    """The watches of a run. Its checkpoints keep `state_dict`, so that a resumed run continues the same."""

    def __init__(self, config: Config) -> None:
        self.limits, self.section = Limits.of(config), config.watch
        self.rules = {
            name: replace(
                rule,
                threshold=config.watch.thresholds.get(name, rule.threshold),
                patience=config.watch.patience.get(name, rule.patience),
            )
            for name, rule in RULES.items()
            if config.watch.does(name) != "off"
        }
        self.courses = {name: Course() for name in self.rules}
        self.fired: list[Fired] = []

    def observe(self, step: int, phase: Phase, metrics: Metrics) -> list[Fired]:
        """The watches that fire on the metrics of a finished step or validation."""
        fired = [
            self._fired(name, rule, step, value)
            for name, rule in self.rules.items()
            if rule.phase == phase and (value := rule.value(metrics, self.limits)) is not None
        ]
        self.fired += [each for each in fired if each]
        return [each for each in fired if each]

    def _fired(self, name: WatchName, rule: Rule, step: int, value: float) -> Fired | None:
        course = self.courses[name]
        bound = course.bound(rule, rule.threshold)
        course.note(step, value, is_beyond(value, bound, rule.above), rule)
        if course.within >= rule.patience:
            course.fired = False
        if course.fired or course.beyond < rule.patience:
            return None
        course.fired = True
        shown, action = value if math.isfinite(value) else None, self.section.does(name)
        return Fired(step, rule.phase, name, rule.metric, shown, bound, course.since, action)

    def rows(self) -> list[dict[str, Any]]:
        """What fired, as the log has it."""
        return [asdict(fired) for fired in self.fired]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        courses = {name: asdict(course) for name, course in self.courses.items()}
        return {"courses": courses, "fired": self.rows()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("courses", {})
        self.courses = {name: Course(**saved.get(name, {})) for name in self.rules}
        self.fired = [Fired(**fired) for fired in state.get("fired", ())]


def to_act_on(fired: Sequence[Fired]) -> Fired | None:
    """The first that stops the run."""
    return next((each for each in fired if each.action == "stop"), None)
