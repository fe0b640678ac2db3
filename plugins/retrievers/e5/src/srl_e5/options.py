"""Options of dense retrieval."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_RUNTIME: dict[str, Any] = {"runtime": True}
Pooling = Literal["mean", "cls", "pooler"]


class Options(BaseModel):
    """How texts are encoded, how vectors are searched, and on which device.

    `model`, the prefixes, `pooling` and `normalize` are part of the index's digest by their effective values
    (the digest of the weights, the prefix in use), through the retriever's `identity`. So the digest depends
    neither on the model's directory nor on whether a default was given explicitly.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = Field(
        default="intfloat/e5-base-v2", min_length=1, json_schema_extra={**_RUNTIME, "path": True}
    )
    """The encoder: a Hugging Face directory with safetensors, or a name on the hub. The index stores it."""
    query_prefix: str | None = Field(default=None, json_schema_extra=_RUNTIME)
    """Prefix of every query. null: the model's own prompt, or its family's (e5: `query: `)."""
    passage_prefix: str | None = Field(default=None, json_schema_extra=_RUNTIME)
    """Prefix of every passage. null: the model's own prompt, or its family's (e5: `passage: `)."""
    pooling: Pooling | None = Field(default=None, json_schema_extra=_RUNTIME)
    """How token vectors are pooled. null: as the model's configuration says, else as usual for its family."""
    normalize: bool | None = Field(default=None, json_schema_extra=_RUNTIME)
    """Scale vectors to length 1, so that a score is a cosine. null: yes, except for contriever."""
    query_max_length: int = Field(default=256, ge=8, le=8192)
    """Maximum length of a query in tokens, including the prefix; the rest is truncated."""
    passage_max_length: int = Field(default=256, ge=8, le=8192)
    """Maximum length of a passage in tokens, including the prefix; the rest is truncated."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the encoder. On a CPU, queries are always encoded in float32."""
    index: str = Field(default="Flat", min_length=1)
    """Factory string of faiss: Flat (exact), SQfp16, HNSW64, "IVF4096,PQ64", …"""
    ef_search: int = Field(default=128, ge=1)
    """HNSW: candidates kept during a search. More candidates: better recall, slower search."""
    nprobe: int = Field(default=32, ge=1)
    """IVF: lists read per search."""
    search_on: Literal["auto", "cpu", "gpu"] = Field(default="auto", json_schema_extra=_RUNTIME)
    """Where vectors are compared. auto: the encoder's GPU if the index is Flat and fits, else the CPU."""
    device: str = Field(default="auto", json_schema_extra=_RUNTIME)
    """Device of the encoder: auto, cpu, cuda or cuda:N."""
    batch_size: int = Field(default=64, ge=1, json_schema_extra=_RUNTIME)
    """Texts encoded per forward pass."""
    n_threads: int = Field(default=0, ge=0, le=1024, json_schema_extra=_RUNTIME)
    """Threads of a faiss call. 0: OMP_NUM_THREADS if set, else all cores."""
    trust_remote_code: bool = Field(default=False, json_schema_extra=_RUNTIME)
    """Run Python code from the model's directory. Only for models whose authors you trust."""
