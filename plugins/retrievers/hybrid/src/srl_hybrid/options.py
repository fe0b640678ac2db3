"""Options of the retrievers `hybrid` and `rerank`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from srl.errors import UserError
from srl.plugins import manager
from srl.plugins.options import runtime_options, validated

_RUNTIME: dict[str, Any] = {"runtime": True}


class HybridOptions(BaseModel):
    """The retrievers to fuse, and their weights."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )
    where: ClassVar[str] = "retriever.hybrid"

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
    def _sort_out(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in each retriever's defaults, and move machine-dependent options to `runtime`.

        A list of names selects retrievers with default options.
        """
        retrievers = values.get("retrievers", cls.model_fields["retrievers"].default)
        runtime = values.get("runtime", {})
        if isinstance(retrievers, list):
            retrievers = {str(name): {} for name in retrievers}
        if not isinstance(retrievers, dict) or not isinstance(runtime, dict):
            return values
        nested = [*retrievers.values(), *runtime.values()]
        if not all(isinstance(options, dict) for options in nested):
            return values
        if not retrievers:
            raise UserError("no retrievers", key=f"{cls.where}.retrievers", hint="for example [bm25, e5]")
        _check_names(f"{cls.where}.runtime", runtime, retrievers)
        index_options: dict[str, Any] = {}
        machine: dict[str, Any] = {}
        for name, options in retrievers.items():
            where = f"{cls.where}.retrievers.{name}"
            index_options[name], own = _split(where, name, options, runtime.get(name, {}))
            machine |= {name: own} if own else {}
        return {**values, "retrievers": index_options, "runtime": machine}

    @field_validator("weights")
    @classmethod
    def _weigh_all(cls, weights: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        names = info.data.get("retrievers", weights)
        _check_names(f"{cls.where}.weights", weights, names)
        if not all(0 < weight < float("inf") for weight in weights.values()):
            raise ValueError("expected numbers above 0")
        return {name: weights.get(name, 1.0) for name in names}


class RerankOptions(HybridOptions):
    """The retrievers that find the candidates, and the cross-encoder that reranks them."""

    where: ClassVar[str] = "retriever.rerank"

    retrievers: dict[str, dict[str, Any]] = {"bm25": {}}
    """Retrievers of the candidates, with options. The rankings of several are fused, as by `hybrid`."""
    model: str | None = Field(default=None, min_length=1, json_schema_extra={**_RUNTIME, "path": True})
    """The cross-encoder: a Hugging Face directory of a sequence classifier, or a name on the hub. The index
    stores it; the digest of its weights is part of the index's digest."""
    candidates: int = Field(default=50, ge=1)
    """Passages reranked per query; if a search requests more, the others follow as they were found."""
    max_length: int = Field(default=512, ge=8)
    """Maximum length of query plus passage in tokens; the rest is truncated."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the cross-encoder on a GPU. On a CPU it is always float32."""
    trust_remote_code: bool = Field(default=False, json_schema_extra=_RUNTIME)
    """Run Python code from the model's directory. Only for models whose authors you trust."""
    device: str = Field(default="auto", json_schema_extra=_RUNTIME)
    """Device of the cross-encoder: auto, cpu, cuda or cuda:N."""
    batch_size: int = Field(default=32, ge=1, json_schema_extra=_RUNTIME)
    """Pairs of query and passage scored per forward pass."""


def _split(
    where: str, name: str, options: dict[str, Any], runtime: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of retriever `name` that are part of the index, with defaults, and those of the machine.

    `runtime` overrides machine-dependent `options`, and may contain no others. Raises UserError.
    """
    if name in ("hybrid", "rerank"):
        raise UserError(f"{name} cannot be a part of another; list its retrievers", key=where)
    model = manager.options_model("retriever", name)
    if model is None:
        if options or runtime:
            raise UserError(f"{name} takes no options", key=where)
        return {}, {}
    machine = runtime_options(model)
    for key in runtime.keys() & (model.model_fields.keys() - machine):
        raise UserError(f"{where}.{key} is part of the index, not of the machine", key=f"{where}.{key}")
    checked = validated(where, model, {**options, **runtime})
    local = machine & checked.model_fields_set
    return checked.model_dump(mode="json", exclude=machine), checked.model_dump(mode="json", include=local)


def _check_names(where: str, mapping: dict[str, Any], names: dict[str, Any]) -> None:
    for name in mapping.keys() - names.keys():
        raise UserError(f"no retriever {name!r}; there are {', '.join(names)}", key=where)
