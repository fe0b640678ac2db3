"""Options of the Lucene retriever."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Language = Literal[
    "en", "ar", "bn", "da", "de", "es", "fa", "fi", "fr", "hi", "hu", "id", "it",
    "ja", "ko", "nl", "no", "pl", "pt", "ru", "sv", "te", "th", "tr", "uk", "zh",
]  # fmt: skip


class Options(BaseModel):
    """`k1`, `b` and the analysis are part of the index; `n_threads` and `heap` are machine-dependent."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    k1: float = Field(default=0.9, ge=0, le=100)
    """Term-frequency saturation of BM25. The default is pyserini's."""
    b: float = Field(default=0.4, ge=0, le=1)
    """Length normalisation of BM25: 0 is none, 1 is full."""
    language: Language = "en"
    """Language of the Lucene analyzer: an ISO 639 code, as in pyserini's `--language`."""
    stemmer: Literal["porter", "krovetz", "none"] = "porter"
    """English stemmer. The analyzers of other languages have their own."""
    stopwords: Literal["english", "none"] = "english"
    """English stop words: Lucene's 33, or none. The analyzers of other languages have their own."""
    n_threads: int = Field(default=1, ge=1, le=256, json_schema_extra={"runtime": True})
    """Threads of a search call."""
    heap: str = Field(default="2g", pattern=r"^[1-9]\d*[mg]$", json_schema_extra={"runtime": True})
    """Maximum Java heap, such as 512m. The memory-mapped index is not part of it."""

    @model_validator(mode="after")
    def _english_only(self) -> Options:
        if self.language != "en" and (self.stemmer, self.stopwords) != ("porter", "english"):
            raise ValueError(f"stemmer and stopwords are for English; {self.language} has its own")
        return self
