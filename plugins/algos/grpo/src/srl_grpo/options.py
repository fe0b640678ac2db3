"""What can be set for GRPO."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false is Dr. GRPO."""

    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation before dividing."""
