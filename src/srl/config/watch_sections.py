"""The section `watch` of the configuration: which signs of a collapse are watched, and what is done then."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from srl.config.sections import Count, Listed, Section

Action = Literal["off", "note", "stop"]
WatchName = Literal[
    "entropy_low", "entropy_high", "kl", "sampler_mismatch", "grad_norm", "skipped_steps", "searches_low",
    "searches_high", "valid_actions", "repetition", "length_low", "length_high", "equal_groups",
    "explained_variance", "val_em",
]  # fmt: skip


class Watches(Section):
    """Watches over training: each fires when a metric has been beyond its threshold for some steps."""

    action: Action = "note"
    """What is done when a watch fires. note: say it and log it. stop: end the run, with the command that
    starts again from the last good checkpoint with a lower learning rate. off: nothing."""
    stop: Annotated[tuple[WatchName, ...], Listed] = ("skipped_steps",)
    """Watches that stop the run whatever watch.action is, unless they are off."""
    off: Annotated[tuple[WatchName, ...], Listed] = ()
    """Watches that do nothing."""
    thresholds: dict[WatchName, float] = Field(default={})
    """Thresholds of watches by name, in place of their own."""
    patience: dict[WatchName, Count] = Field(default={})
    """Steps in a row beyond the threshold (validations for val_em), by name, in place of a watch's own."""

    def does(self, name: WatchName) -> Action:
        """What is done when the watch fires."""
        if name in self.off or self.action == "off":
            return "off"
        return "stop" if name in self.stop else self.action
