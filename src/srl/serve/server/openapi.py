"""The OpenAPI description of the server, and a page that shows it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue

from srl.serve.wire import DIGEST_HEADER, Limits

QUERY = "who wrote the origin of species"
INDEX = "The name of the index; empty for the one in the URL, or the default."
_PASSAGE: dict[str, JsonValue] = {"id": "p7", "contents": '"Darwin"\nHe wrote On the Origin of Species.'}


class Document(BaseModel):
    """A passage; the first line of `contents` is its title. `url` is set if the id is a web address."""

    id: str
    contents: str
    url: str | None = None


class ScoredDocument(BaseModel):
    """A passage with the retriever's own score."""

    document: Document
    score: float


class Unsearched(BaseModel):
    """Why the query at a position (from 0) was not searched."""

    query: int
    detail: str


class Answer(BaseModel):
    """One list of hits per query, best first. `results` repeats the hits of a single `query`, flat."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"result": [[{"document": _PASSAGE, "score": 12.5}]]}}
    )

    result: list[list[ScoredDocument | Document]]
    results: list[ScoredDocument] | None = None
    errors: list[Unsearched] | None = None


class Page(BaseModel):
    """A passage that was requested by its id or web address."""

    id: str
    contents: str
    url: str


class UnknownPage(BaseModel):
    url: str
    detail: str


class Pages(BaseModel):
    """One page per url, null if unknown; `errors` lists the unknown ones."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "result": [{**_PASSAGE, "url": "p7"}, None],
                "errors": [{"url": "p8", "detail": "no passage has this id"}],
            }
        }
    )

    result: list[Page | None]
    errors: list[UnknownPage] | None = None


class IndexHealth(BaseModel):
    """An index and its retriever. A `live` retriever searches an external service and has no passages."""

    index_digest: str
    corpus_digest: str
    retriever: str
    options: dict[str, Any]
    passages: int
    live: bool
    waiting: int


class NamedHealth(IndexHealth):
    status: str
    version: str


class ReplicaHealth(BaseModel):
    """One process of several: `ok`, `starting`, or `silent` if it does not answer the others."""

    replica: int
    status: str
    pid: int
    starts: int
    ready: bool
    waiting: int


class Health(NamedHealth):
    """The default index, all indexes by name, and each process if there are several.

    The status is `degraded` if one of several processes does not answer.
    """

    indexes: dict[str, IndexHealth]
    replicas: list[ReplicaHealth] | None = None


class Problem(BaseModel):
    """An error, in one line."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"detail": "topk must be a whole number from 1 to 1000, not 0"}}
    )

    detail: str


_PROBLEMS = {
    400: "The body is not valid JSON in UTF-8, or the client disconnected.",
    401: "The token is missing or wrong.",
    403: "The server has no token, and the Host or Origin of the request is not allowed.",
    404: "No such index.",
    408: "The body did not arrive in time.",
    409: "The URL and the body name different indexes.",
    413: "The body, a query, or the number of queries or hits is too large.",
    415: "The content type is not JSON, or the body is compressed.",
    422: "Valid JSON, but an invalid request; or the retriever rejects the query.",
    502: "The retriever failed.",
    503: "The queue is full; try again after Retry-After seconds.",
    504: "The search timed out.",
}
_DIGEST = {DIGEST_HEADER: {"description": "The digest of the index.", "schema": {"type": "string"}}}
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}


def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route, for FastAPI's `responses`."""
    return {
        code: {
            "model": Problem,
            "description": _PROBLEMS[code],
            **({"headers": _RETRY} if code == 503 else {}),
        }
        for code in codes
    }


def answers(what: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": what, "headers": _DIGEST}}


def retrieve_request(limits: Limits, names: Sequence[str]) -> dict[str, Any]:
    """The body of /retrieve, for FastAPI's `openapi_extra`."""
    text = {"type": "string", "maxLength": limits.query_chars}
    k = {"type": ["integer", "null"], "minimum": 1, "maximum": limits.topk}
    ks = {
        "topk": "The number of hits per query, at most.",
        "top_k": "The same, in rLLM's dialect.",
        "k": "The same.",
        "topk_rerank": "The same, in the dialect of Search-R1's rerank server.",
        "topk_retrieval": "Used if no other name of k is present.",
    }
    properties = {
        "queries": {"type": "array", "items": text, "maxItems": limits.queries},
        "query": {**text, "description": "One query, instead of `queries`."},
        **{name: {**k, "description": what} for name, what in ks.items()},
        "return_scores": {
            "type": ["boolean", "null"],
            "default": False,
            "description": 'Whether a hit is {"document", "score"} or the bare document.',
        },
        "index": {"type": ["string", "null"], "enum": [*names, "", None], "description": INDEX},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "oneOf": [{"required": ["queries"]}, {"required": ["query"]}],
    }
    return _body(schema, {"queries": [QUERY], "topk": 3, "return_scores": True})


def name_in_path(names: Sequence[str]) -> dict[str, Any]:
    """The path parameter `name`, for FastAPI's `openapi_extra`."""
    schema = {"type": "string", "enum": list(names)}
    return {"parameters": [{"name": "name", "in": "path", "required": True, "schema": schema}]}


def access_request(limits: Limits) -> dict[str, Any]:
    """The body of /access."""
    urls = {"type": "array", "items": {"type": "string"}, "maxItems": limits.queries}
    schema = {"type": "object", "properties": {"urls": urls}, "required": ["urls"]}
    return _body(schema, {"urls": ["p7"]})


def _body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#8881;padding:.7rem;overflow:auto}table{border-collapse:collapse}"
    "td,th{border:1px solid #8886;padding:.2rem .6rem;text-align:left;vertical-align:top}"
)


def docs_page(openapi: Mapping[str, Any], base_url: str) -> str:
    """An HTML page that lists every route with its fields, its answers and a curl command.

    It has no script and fetches nothing, so it works offline.
    """
    about = openapi["info"]
    title = escape(f"{about['title']} {about['version']}")
    lines = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        "<p>For programs: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            lines += _route(path, method.upper(), operation, base_url)
    return "\n".join(lines) + "\n"


def _route(path: str, method: str, operation: Mapping[str, Any], base_url: str) -> Iterator[str]:
    yield f"<h2>{method} {escape(path)}</h2><p>{escape(operation.get('summary', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    properties = body.get("schema", {}).get("properties", {})
    if properties:
        yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
        yield from (_field(name, schema) for name, schema in properties.items())
        yield "</table>"
    yield f"<pre>{escape(_curl(base_url.rstrip('/') + path, method, body.get('example')))}</pre>"
    yield "<table>"
    for code, response in operation["responses"].items():
        yield f"<tr><td>{escape(code)}</td><td>{escape(response['description'])}</td></tr>"
    yield "</table>"


def _field(name: str, schema: Mapping[str, Any]) -> str:
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    kind = " or ".join(kinds)
    limits = [
        f"{word} {schema[word]:,.0f}"
        for word in ("minimum", "maximum", "maxItems", "maxLength")
        if word in schema
    ]
    cells = (name, ", ".join([kind, *limits]), schema.get("description", ""))
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _curl(url: str, method: str, example: Any) -> str:
    if example is None:
        return f"curl {shlex.quote(url)}" if method == "GET" else f"curl -X {method} {shlex.quote(url)}"
    sent = shlex.quote(json.dumps(example))
    return f"curl {shlex.quote(url)} -H 'Content-Type: application/json' -d {sent}"
