"""What can be set for REINFORCE."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    normalise: Literal["none", "centre", "whiten"] = "none"
    """What is done to the returns over all policy tokens of the batch: nothing, minus the mean, or
    minus the mean and divided by the standard deviation."""
