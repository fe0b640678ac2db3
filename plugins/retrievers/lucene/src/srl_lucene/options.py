"""Options of the Lucene retriever."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Language = Literal[
    "en", "ar", "bn", "da", "de", "es", "fa", "fi", "fr", "hi", "hu", "id", "it",
    "ja", "ko", "nl", "no", "pl", "pt", "ru", "sv", "te", "th", "tr", "uk", "zh",
]  # fmt: skip


class Options(BaseModel):
    """`k1`, `b` and the analysis belong to an index; `n_threads` and `heap` to the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    k1: float = Field(default=0.9, ge=0, le=100)
    """How soon more occurrences of a term stop to matter; pyserini's default."""
    b: float = Field(default=0.4, ge=0, le=1)
    """How much long passages are marked down: 0 not at all, 1 in proportion to their length."""
    language: Language = "en"
    """The language whose Lucene analyzer makes the terms: an ISO 639 code, as pyserini's `--language`."""
    stemmer: Literal["porter", "krovetz", "none"] = "porter"
    """What makes "running" and "runs" one term, in English; other languages have their own."""
    stopwords: Literal["english", "none"] = "english"
    """Words left out, in English: Lucene's 33, or none; other languages have their own."""
    n_threads: int = Field(default=1, ge=1, le=256, json_schema_extra={"runtime": True})
    """Threads that build, and that share the queries of one call."""
    heap: str = Field(default="2g", pattern=r"^[1-9]\d*[mg]$", json_schema_extra={"runtime": True})
    """The most memory that Java takes for itself; the index is mapped, not read, and comes on top."""

    @model_validator(mode="after")
    def _english_only(self) -> Options:
        if self.language != "en" and (self.stemmer, self.stopwords) != ("porter", "english"):
            raise ValueError(
                f"stemmer and stopwords are for English; language={self.language} brings its own, "
                "leave the two out"
            )
        return self
