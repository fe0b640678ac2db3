"""Options of the retrievers `hybrid` and `rerank`."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from srl.errors import UserError
from srl_hybrid.inner_retriever import folders, split, with_runtime

_RUNTIME: dict[str, Any] = {"runtime": True}
_HYBRID, _RERANK = "retriever.hybrid", "retriever.rerank"


class HybridOptions(BaseModel):
    """The retrievers to fuse, and their weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    retrievers: dict[str, dict[str, Any]]
    """Retrievers to fuse, with options, as in {bm25: {k1: 0.9}, e5: {model: DIR}}, or a list: [bm25, e5]."""
    weights: dict[str, float] = Field(default={}, validate_default=True)
    """Weights of the rankings, as in {e5: 2}. The default weight is 1."""
    rank_constant: int = Field(default=60, ge=0)
    """k in 1 / (k + rank). A larger k gives the top ranks less weight."""
    depth: int = Field(default=100, ge=1)
    """Passages fused from each ranking; if a search requests more, the others follow by their best rank."""
    runtime: dict[str, dict[str, Any]] = Field(default={}, json_schema_extra=_RUNTIME)
    """Machine-dependent options of each retriever, as in {bm25: {n_threads: 2}}."""

    @model_validator(mode="before")
    @classmethod
    def _sort_out(cls, given: Any) -> Any:
        """Fill in each retriever's defaults, and move machine-dependent options to `runtime`.

        A list of names selects retrievers with default options.
        """
        named, runtime = given.get("retrievers"), given.get("runtime", {})
        if not named:
            raise UserError(f'{_HYBRID} fuses retrievers; type: --set "retrievers=[bm25, e5]"')
        if isinstance(named, list):
            named = {str(name): {} for name in named}
        if not (_is_nested(named) and _is_nested(runtime)):
            return given
        _only(f"{_HYBRID}.runtime", runtime, named)
        where = {name: f"{_HYBRID}.retrievers.{name}" for name in named}
        machine = {
            name: with_runtime(where[name], name, options, runtime.get(name, {}))
            for name, options in named.items()
        }
        built = {name: split(where[name], name, options)[0] for name, options in named.items()}
        return {**given, "retrievers": built, "runtime": {name: one for name, one in machine.items() if one}}

    @field_validator("retrievers")
    @classmethod
    def _each_once(cls, given: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for folder, times in Counter(folders("hybrid", {"retrievers": given})).items():
            if times > 1:
                raise UserError(f"{_HYBRID}.retrievers: {folder} occurs {times} times; list each once")
        return given

    @field_validator("weights")
    @classmethod
    def _weigh_all(cls, given: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        names = info.data.get("retrievers", given)
        _only(f"{_HYBRID}.weights", given, names)
        for name, weight in given.items():
            if not 0 < weight < float("inf"):
                raise UserError(f"{_HYBRID}.weights.{name}: expected a number above 0, found {weight}")
        return {name: given.get(name, 1.0) for name in names}


class RerankOptions(BaseModel):
    """The retriever that finds the candidates, and the cross-encoder that reranks them."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    model: str | None = Field(default=None, min_length=1, json_schema_extra={**_RUNTIME, "path": True})
    """The cross-encoder: a Hugging Face directory of a sequence classifier, or a name on the hub. The index
    stores it; the digest of its weights is part of the index's digest."""
    retriever: str = "bm25"
    """Retriever of the candidates; `hybrid` works too."""
    options: dict[str, Any] = Field(default={}, validate_default=True)
    """Options of that retriever."""
    depth: int = Field(default=50, ge=1)
    """Candidates reranked per query; if a search requests more, the others follow as they were found."""
    max_length: int = Field(default=512, ge=8)
    """Maximum length of query plus passage in tokens; the rest is truncated."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the cross-encoder on a GPU. On a CPU it is always float32."""
    trust_remote_code: bool = Field(default=False, json_schema_extra=_RUNTIME)
    """Run Python code from the model's directory. Only for models whose authors you trust."""
    runtime: dict[str, Any] = Field(default={}, json_schema_extra=_RUNTIME)
    """Machine-dependent options of the retriever of the candidates."""
    device: str = Field(default="auto", json_schema_extra=_RUNTIME)
    """Device of the cross-encoder: auto, cpu, cuda or cuda:N."""
    batch_size: int = Field(default=32, ge=1, json_schema_extra=_RUNTIME)
    """Pairs of query and passage scored per forward pass."""

    @model_validator(mode="before")
    @classmethod
    def _sort_out(cls, given: Any) -> Any:
        """Fill in the retriever's defaults, and move machine-dependent options to `runtime`."""
        name, options = given.get("retriever", "bm25"), given.get("options", {})
        runtime = given.get("runtime", {})
        if not (isinstance(name, str) and isinstance(options, dict) and isinstance(runtime, dict)):
            return given
        where = f"{_RERANK}.options"
        machine = with_runtime(where, name, options, runtime)
        return {
            **given,
            "options": split(where, name, options)[0],
            **({"runtime": machine} if machine else {}),
        }


def _is_nested(given: Any) -> bool:
    return isinstance(given, dict) and all(isinstance(one, dict) for one in given.values())


def _only(where: str, given: dict[str, Any], names: Any) -> None:
    for name in given:
        if name not in names:
            raise UserError(f"{where}: no retriever {name!r}; there are {', '.join(names)}")
