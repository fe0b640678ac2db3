"""What can be chosen about BM25."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """`k1`, `b` and the analysis belong to an index; `n_threads` to the machine that searches it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    k1: float = Field(default=0.9, ge=0, le=100)
    """How soon more occurrences of a term stop to matter; Anserini's default."""
    b: float = Field(default=0.4, ge=0, le=1)
    """How much long passages are marked down: 0 not at all, 1 in proportion to their length."""
    stopwords: Literal["english", "none"] = "english"
    """Words left out: Lucene's 33 English ones, or none."""
    stemmer: Literal["english", "porter", "none"] = "english"
    """What makes "died" and "dies" one term: Snowball's English stemmer, Porter's, or none."""
    n_threads: int = Field(default=1, ge=1, le=256, json_schema_extra={"runtime": True})
    """Threads that share the queries of one call; one leaves the other cores to training."""
