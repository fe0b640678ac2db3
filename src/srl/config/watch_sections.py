"""The section `watch` of the configuration: which signs of a collapse are watched, and what is done then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from srl.config.sections import Count, Natural, NonNegative, Section, Share

Action = Literal["off", "note", "stop", "rollback"]


class Watch(Section):
    """One watch: it fires when a metric has been beyond its threshold for `patience` steps in a row."""

    threshold: float = 0.0
    """The threshold."""
    patience: Count = 3
    """Steps in a row beyond the threshold, after which the watch fires."""
    action: Action | None = None
    """off, note, stop or rollback, as for watch.action. null: watch.action."""


class EntropyLow(Watch):
    """The policy has become deterministic."""

    threshold: NonNegative = 0.001
    """Fires below this entropy (actor/entropy, in nats per token)."""
    patience: Count = 5
    """Steps in a row beyond the threshold, after which the watch fires."""


class EntropyHigh(Watch):
    """The policy writes at random."""

    threshold: NonNegative = 2.0
    """Fires above this entropy (actor/entropy, in nats per token)."""


class Kl(Watch):
    """The policy has left its reference."""

    threshold: NonNegative = 1.0
    """Fires above this KL to the reference (actor/ref_kl, or critic/kl where there is none)."""


class SamplerMismatch(Watch):
    """The sampler is not the policy that is trained."""

    threshold: NonNegative = 0.1
    """Fires above this mean difference of log-probs (rollout/logprob_diff/mean)."""


class GradNorm(Watch):
    """The gradient explodes."""

    threshold: NonNegative = 10.0
    """Fires above this many times the median gradient norm (actor/grad_norm) of the last 20 steps."""


class SkippedSteps(Watch):
    """Gradients that are not finite."""

    threshold: NonNegative = 0.0
    """Fires above this many optimiser steps of a training step that were skipped (actor/skipped_steps and
    critic/skipped_steps)."""
    action: Action | None = "stop"
    """off, note, stop or rollback, as for watch.action. null: watch.action."""


class SearchesLow(Watch):
    """The policy stops to search."""

    threshold: Share = 0.25
    """Fires below this share of the run's highest searches per question (env/number_of_valid_search; the
    highest median of five steps)."""


class SearchesHigh(Watch):
    """The policy searches until it may not, and does not answer."""

    threshold: Share = 0.5
    """Fires where the share of rollout.max_turns that is used exceeds the share of episodes with an answer by
    more than this (env/number_of_valid_search, env/finish_ratio)."""


class ValidActions(Watch):
    """The policy loses the form of an episode."""

    threshold: Share = 0.7
    """Fires below this share of the run's highest ratio of valid actions (env/ratio_of_valid_action; the
    highest median of five steps)."""


class Repetition(Watch):
    """The policy repeats itself."""

    threshold: Share = 0.5
    """Fires above this share of repeated 4-grams of tokens within a turn (env/repetition)."""


class LengthLow(Watch):
    """The policy writes next to nothing."""

    threshold: Share = 0.25
    """Fires below this share of the run's highest length (response_length/mean; the highest median of five
    steps)."""


class LengthHigh(Watch):
    """The policy writes until it is cut off."""

    threshold: Share = 0.8
    """Fires above this share of the tokens that an episode's policy may write (response_length/mean)."""


class EqualGroups(Watch):
    """Groups agree on wrong answers, so nothing is learned."""

    threshold: Share = 0.9
    """Fires where the share of groups with equal scores exceeds that of right answers by more than this
    (env/equal_groups_share, train/em)."""
    patience: Count = 5
    """Steps in a row beyond the threshold, after which the watch fires."""


class ExplainedVariance(Watch):
    """The critic is worse than a constant."""

    threshold: Annotated[float, Field(le=1)] = -0.5
    """Fires below this explained variance (critic/vf_explained_var)."""
    patience: Count = 5
    """Steps in a row beyond the threshold, after which the watch fires."""
    action: Action | None = "note"
    """off, note, stop or rollback, as for watch.action. null: watch.action."""


class ValEm(Watch):
    """Validation gets worse."""

    threshold: Share = 0.1
    """Fires where exact match of the validation (val/em) is below the run's best by more than this. Of 512
    questions, half of them right, two validations of the same policy differ by .03 (standard error)."""
    patience: Count = 2
    """Validations in a row beyond the threshold, after which the watch fires."""


class Watches(Section):
    """Watches over training: each has a threshold, a patience and an action."""

    action: Action = "note"
    """What a watch without an action of its own does. note: say it and log it. stop: end the run. rollback:
    continue from the last good checkpoint with a lower learning rate. off: nothing."""
    rollback_lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the learning rates at each roll-back."""
    max_rollbacks: Natural = 3
    """Most roll-backs of a run; the next one stops it."""
    entropy_low: EntropyLow = EntropyLow()
    entropy_high: EntropyHigh = EntropyHigh()
    kl: Kl = Kl()
    sampler_mismatch: SamplerMismatch = SamplerMismatch()
    grad_norm: GradNorm = GradNorm()
    skipped_steps: SkippedSteps = SkippedSteps()
    searches_low: SearchesLow = SearchesLow()
    searches_high: SearchesHigh = SearchesHigh()
    valid_actions: ValidActions = ValidActions()
    repetition: Repetition = Repetition()
    length_low: LengthLow = LengthLow()
    length_high: LengthHigh = LengthHigh()
    equal_groups: EqualGroups = EqualGroups()
    explained_variance: ExplainedVariance = ExplainedVariance()
    val_em: ValEm = ValEm()

    def active(self) -> Iterator[tuple[str, Watch, Action]]:
        """The name, the section and the action of each watch that is not off."""
        for name in type(self).model_fields:
            watch = getattr(self, name)
            if isinstance(watch, Watch) and (action := watch.action or self.action) != "off":
                yield name, watch, action

    @property
    def rolls_back(self) -> list[str]:
        """The names of the watches that roll back."""
        return [name for name, _, action in self.active() if action == "rollback"]
