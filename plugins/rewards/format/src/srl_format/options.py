"""What `reward.format.…` may set."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """The three scores of the scheme; the defaults are those of Search-R1's v0.3 scripts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    structure_score: float = Field(default=0.2, ge=0, le=1)
    """Given for a well-formed episode with a wrong answer, taken from a right answer that is malformed."""
    final_format_score: float = Field(default=0.1, ge=0, le=1)
    """Given for a wrong answer in a malformed episode: at least it is between the answer tags."""
    retrieval_score: float = Field(default=0.0, ge=0, le=1)
    """Added to `structure_score` when a retrieved passage holds a gold answer and the answer is wrong."""
