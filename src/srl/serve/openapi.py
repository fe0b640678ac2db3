"""The server's API as OpenAPI, from the models in `wire`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from srl import __version__
from srl.serve.wire import DIGEST_HEADER, PagesAnswer, PagesRequest, Problem, SearchAnswer, SearchRequest

_PROBLEMS = {
    400: "The body is not JSON.",
    401: "The token is missing or wrong.",
    403: "The server has no token, and the Host or Origin of the request is not allowed.",
    404: "No such index.",
    413: "The body is too large.",
    422: "Valid JSON, but an invalid request; or the retriever rejects the query.",
    502: "The retriever failed.",
    503: "The queue is full; try again after Retry-After seconds.",
    504: "The search timed out.",
}
_NAME = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]


def openapi() -> dict[str, Any]:
    """The document behind /openapi.json."""
    models: list[type[BaseModel]] = [SearchRequest, SearchAnswer, PagesRequest, PagesAnswer, Problem]
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    search = _post("Search the default index, or the one that the body names.", SearchRequest, SearchAnswer)
    pages = _post("Passages by id, which may be a web address.", PagesRequest, PagesAnswer)
    health = {"responses": {"200": {"description": "What is served.", **_json({"type": "object"})}}}
    text = {"responses": {"200": {"description": "Metrics for Prometheus.", "content": {"text/plain": {}}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "srl search", "version": __version__},
        "paths": {
            "/retrieve": {"post": search},
            "/retrieve/{name}": {"post": search | {"summary": "Search one index.", "parameters": _NAME}},
            "/access": {"post": pages},
            "/health": {"get": health | {"summary": "The default index, and all indexes by name."}},
            "/health/{name}": {"get": health | {"summary": "One index.", "parameters": _NAME}},
            "/metrics": {"get": text | {"summary": "Metrics of all indexes."}},
        },
        "components": {"schemas": schemas["$defs"]},
    }


def _post(summary: str, request: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
    problems = {
        str(code): {"description": text, **_json(_reference(Problem))} for code, text in _PROBLEMS.items()
    }
    digest = {DIGEST_HEADER: {"description": "The digest of the index.", "schema": {"type": "string"}}}
    good = {"description": "The answer.", "headers": digest, **_json(_reference(answer))}
    return {
        "summary": summary,
        "requestBody": {"required": True, **_json(_reference(request))},
        "responses": {"200": good, **problems},
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
