"""The server's API as OpenAPI, from the models in `wire`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from srl import __version__
from srl.serve.wire import PagesAnswer, PagesRequest, Problem, SearchAnswer, SearchRequest

_NAME = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]


def openapi() -> dict[str, Any]:
    """The document behind /openapi.json."""
    models: list[type[BaseModel]] = [SearchRequest, SearchAnswer, PagesRequest, PagesAnswer, Problem]
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )

    def content(what: str, model: type[BaseModel] | None = None, kind: str = "application/json") -> Any:
        schema = {"$ref": f"#/components/schemas/{model.__name__}"} if model else {}
        return {"description": what, "content": {kind: {"schema": schema}}}

    def post(what: str, request: type[BaseModel], answer: type[BaseModel]) -> dict[str, Any]:
        responses = {"200": content("The answer.", answer), "default": content("An error.", Problem)}
        return {
            "summary": what,
            "requestBody": content("", request) | {"required": True},
            "responses": responses,
        }

    search = post("Search the default index, or the one that the body names.", SearchRequest, SearchAnswer)
    health = {"responses": {"200": content("What is served.")}}
    metrics = {"responses": {"200": content("For Prometheus.", kind="text/plain")}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "srl search", "version": __version__},
        "paths": {
            "/retrieve": {"post": search},
            "/retrieve/{name}": {"post": search, "parameters": _NAME},
            "/access": {"post": post("Passages by id or web address.", PagesRequest, PagesAnswer)},
            "/health": {"get": health},
            "/health/{name}": {"get": health, "parameters": _NAME},
            "/metrics": {"get": metrics},
        },
        "components": {"schemas": schemas["$defs"]},
    }
