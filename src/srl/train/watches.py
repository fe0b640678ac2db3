"""Decides from the metrics of steps which watch fires; `srl.config.watch_sections` has their thresholds.

Nothing here acts: `srl.train.watched_run` does, and on verl the log actor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal, Self

from srl.config import Config
from srl.config.watch_sections import Watch
from srl.trajectory import Phase

Metrics = Mapping[str, float]
ComparedWith = Literal["threshold", "highest", "median", "fall"]
"""What a value is compared with: the threshold itself; that share of the run's highest level; so many times
the median of the last steps; or the highest value minus the threshold."""
ACTS = ("stop", "rollback")
"""The actions that end the course of a run, the first that is asked for before the others."""
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
    """What a watch looks at; `value` is None where a step does not have it."""

    metric: str
    value: Callable[[Metrics, Limits], float | None]
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


RULES: dict[str, Rule] = {
    "entropy_low": Rule("actor/entropy", _first("actor/entropy"), above=False),
    "entropy_high": Rule("actor/entropy", _first("actor/entropy")),
    "kl": Rule("actor/ref_kl", _first("actor/ref_kl", "critic/kl")),
    "sampler_mismatch": Rule("rollout/logprob_diff/mean", _first("rollout/logprob_diff/mean")),
    "grad_norm": Rule("actor/grad_norm", _first("actor/grad_norm"), compared_with="median"),
    "skipped_steps": Rule("actor/skipped_steps", _skipped),
    "searches_low": Rule("env/number_of_valid_search", _searched, above=False, compared_with="highest"),
    "searches_high": Rule(
        "env/number_of_valid_search / rollout.max_turns − env/finish_ratio", _searched_without_answer
    ),
    "valid_actions": Rule(
        "env/ratio_of_valid_action", _first("env/ratio_of_valid_action"), above=False, compared_with="highest"
    ),
    "repetition": Rule("env/repetition", _first("env/repetition")),
    "length_low": Rule(
        "response_length/mean", _first("response_length/mean"), above=False, compared_with="highest"
    ),
    "length_high": Rule("response_length/mean / the most tokens", _share_of_longest),
    "equal_groups": Rule("env/equal_groups_share − train/em", _equally_wrong),
    "explained_variance": Rule("critic/vf_explained_var", _first("critic/vf_explained_var"), above=False),
    "val_em": Rule("val/em", _first("val/em"), above=False, compared_with="fall", phase="val"),
}
"""Every watch, by the name of its section."""


@dataclass(frozen=True, slots=True)
class Fired:
    """A watch that fired after `step`, because `value` is beyond `bound`; None for what is not a number.

    `since` is the first step that may be bad. `to_step`: the checkpoint that the run was rolled back to.
    """

    step: int
    phase: Phase
    watch: str
    metric: str
    value: float | None
    bound: float | None
    since: int
    action: str
    to_step: int | None = None

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
        self.limits = Limits.of(config)
        self.active = {name: (watch, action) for name, watch, action in config.watch.active()}
        self.courses = {name: Course() for name in self.active}
        self.fired: list[Fired] = []

    def observe(self, step: int, phase: Phase, metrics: Metrics) -> list[Fired]:
        """The watches that fire on the metrics of a finished step or validation."""
        found = [
            fired
            for name, (watch, action) in self.active.items()
            if RULES[name].phase == phase
            and (value := RULES[name].value(metrics, self.limits)) is not None
            and (fired := self._fired(name, watch, action, step, value))
        ]
        self.fired += found
        return found

    def _fired(self, name: str, watch: Watch, action: str, step: int, value: float) -> Fired | None:
        rule, course = RULES[name], self.courses[name]
        bound = course.bound(rule, watch.threshold)
        course.note(step, value, is_beyond(value, bound, rule.above), rule)
        if course.within >= watch.patience:
            course.fired = False
        if course.fired or course.beyond < watch.patience:
            return None
        course.fired = True
        shown = value if math.isfinite(value) else None
        return Fired(step, rule.phase, name, rule.metric, shown, bound, course.since, action)

    def action(self, name: str) -> str:
        """What the watch `name` does."""
        return self.active[name][1] if name in self.active else "off"

    def diverged(self, since: int) -> Fired:
        """`skipped_steps`, fired because the policy of step `since` has logits that are not finite: no update
        can heal it, and no step follows that has metrics."""
        name, what = "skipped_steps", "a log-prob of the policy"
        fired = Fired(since + 1, "train", name, what, None, None, since, self.action(name))
        self.fired.append(fired)
        return fired

    def overrule(self, found: Sequence[Fired], acting: Fired | None) -> None:
        """Know those of `found` as notes whose action is not done, since another one's is."""
        for fired in found:
            if fired is not acting and fired.action in ACTS:
                self.replace(fired, replace(fired, action="note"))

    @property
    def rollbacks(self) -> int:
        """How often the run was rolled back."""
        return sum(fired.to_step is not None for fired in self.fired)

    def roll_back(self, fired: Fired, to_step: int, state: Mapping[str, Any]) -> Fired:
        """Continue from the `state` of the checkpoint at `to_step`; what fired stays known."""
        done = replace(fired, to_step=to_step)
        self.replace(fired, done)
        self._load_courses(state)
        return done

    def replace(self, fired: Fired, by: Fired) -> None:
        """Know `by` in the place of `fired`."""
        self.fired = [by if one is fired else one for one in self.fired]

    def rows(self) -> list[dict[str, Any]]:
        """What fired, as the log has it."""
        return [asdict(fired) for fired in self.fired]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        courses = {name: asdict(course) for name, course in self.courses.items()}
        return {"courses": courses, "fired": self.rows()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`, empty for a checkpoint of an older version."""
        self._load_courses(state)
        self.fired = [Fired(**fired) for fired in state.get("fired", ())]

    def _load_courses(self, state: Mapping[str, Any]) -> None:
        saved = state.get("courses", {})
        self.courses = {name: Course(**saved.get(name, {})) for name in self.active}


def to_act_on(found: Sequence[Fired]) -> Fired | None:
    """The one whose action is done: the first that stops the run, else the first that rolls it back."""
    for action in ACTS:
        if first := next((fired for fired in found if fired.action == action), None):
            return first
    return None
