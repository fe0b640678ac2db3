"""Options of the retriever `bm25`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Stemmer = Literal[
    "english", "porter", "none", "arabic", "armenian", "basque", "catalan", "danish", "dutch", "finnish",
    "french", "german", "greek", "hindi", "hungarian", "indonesian", "irish", "italian", "lithuanian",
    "nepali", "norwegian", "portuguese", "romanian", "russian", "serbian", "spanish", "swedish", "tamil",
    "turkish", "yiddish",
]  # fmt: skip
StopWords = Literal[
    "english", "none", "chinese", "danish", "dutch", "french", "german", "italian", "korean", "norwegian",
    "portuguese", "russian", "spanish", "swedish", "turkish",
]  # fmt: skip


class Options(BaseModel):
    """`k1`, `b` and the analysis are part of the index; the others are machine-dependent."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    k1: float = Field(default=0.9, ge=0, le=100)
    """Term-frequency saturation of BM25. The default is Anserini's."""
    b: float = Field(default=0.4, ge=0, le=1)
    """Length normalisation of BM25: 0 is none, 1 is full."""
    stopwords: StopWords = "english"
    """Stop words: Lucene's 33 English ones, NLTK's of another language, or none."""
    stemmer: Stemmer = "english"
    """Snowball stemmer of a language (it makes "died" and "dies" one term), `porter`, or none."""
    n_threads: int = Field(default=1, ge=1, le=256, json_schema_extra={"runtime": True})
    """Threads per search call. 1 leaves the other cores to training."""
    build_processes: int = Field(default=0, ge=0, le=64, json_schema_extra={"runtime": True})
    """Processes that tokenise passages during a build. 0: one per core, at most 8."""
