"""How a search and its answer are written over HTTP, in the dialects that are in use.

Search-R1's `POST /retrieve {"queries", "topk", "return_scores"}`, its rerank server's
`topk_retrieval`/`topk_rerank`, SkyRL's single `query`, rLLM's `top_k`/`k`; answers with and without
scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from srl.data.corpus import contents_of
from srl.trajectory import Hit, Passage

DIGEST_HEADER = "X-Index-Digest"
TOPK_NAMES = ("topk", "top_k", "k", "topk_rerank", "topk_retrieval")
"""The names of k, the first that is there counts: a rerank server returns `topk_rerank` passages."""


class RequestError(ValueError):
    """What is wrong with a request, in one line, and the HTTP status that says so."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for."""

    queries: int = 1024
    query_chars: int = 10_000
    topk: int = 1000
    body_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class Request:
    queries: list[str]
    topk: int
    return_scores: bool


def write_request(queries: Sequence[str], topk: int) -> bytes:
    """The body of a request that every dialect's server understands."""
    return json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()


def read_request(body: bytes, topk: int, limits: Limits) -> Request:
    """The request in `body`; `topk` stands in where it names none. Raises RequestError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON", 400) from None
    if not isinstance(found, dict):
        raise RequestError('the body must be a JSON object like {"queries": ["…"], "topk": 3}')
    scores = found.get("return_scores", False)
    if scores not in (True, False, None):
        raise RequestError(f"return_scores must be true or false, not {_shown(scores)}")
    return Request(_queries(found, limits), _topk(found, topk, limits), bool(scores))


def _queries(found: Mapping[str, Any], limits: Limits) -> list[str]:
    if ("queries" in found) == ("query" in found):
        raise RequestError("give either queries (a list of texts) or query (one text)")
    queries = found["queries"] if "queries" in found else [found["query"]]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise RequestError("queries must be a list of texts, query one text")
    if len(queries) > limits.queries:
        raise RequestError(f"{len(queries):,} queries; at most {limits.queries:,} are taken at once", 413)
    longest = max(map(len, queries), default=0)
    if longest > limits.query_chars:
        raise RequestError(
            f"a query has {longest:,} characters; at most {limits.query_chars:,} are taken", 413
        )
    return queries


def _topk(found: Mapping[str, Any], default: int, limits: Limits) -> int:
    name = next((name for name in TOPK_NAMES if found.get(name) is not None), None)
    if name is None:
        return default
    value = found[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limits.topk:
        raise RequestError(f"{name} must be a whole number from 1 to {limits.topk}, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return repr(value)[:40]


def write_answer(answers: Sequence[Sequence[Hit]], return_scores: bool) -> bytes:
    """`{"result": [[…], …]}`, one list for each query; bare documents without scores."""
    result = [[_item(hit, return_scores) for hit in hits] for hits in answers]
    return json.dumps({"result": result}).encode()


def _item(hit: Hit, return_scores: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if return_scores else document


def read_answer(body: bytes, queries: int, topk: int) -> list[list[Hit]]:
    """The hits for each query in a server's answer, in its order, at most `topk`.

    Hits without a score get 0. Raises ValueError, saying what is wrong in one line.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        start = body[:60].decode("utf-8", "replace").strip()
        raise ValueError(f"the answer is not JSON; it begins {start!r}") from None
    result = found.get("result") if isinstance(found, dict) else None
    if not isinstance(result, list) or not all(isinstance(hits, list) for hits in result):
        raise ValueError('the answer is not {"result": [[…], …]}')
    if len(result) != queries:
        raise ValueError(f"the answer has {len(result)} lists for {queries} queries")
    return [[read_hit(item) for item in hits[:topk]] for hits in result]


def read_hit(item: Any) -> Hit:
    """One hit in any dialect. Raises ValueError."""
    document, score = item, 0.0
    if isinstance(item, dict) and "document" in item:
        document, score = item["document"], item.get("score", 0.0)
    if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
        raise ValueError(f"a score is {_shown(score)}")
    return Hit(read_document(document), float(score))


def read_document(document: Any) -> Passage:
    """A passage; one without an id gets a digest of its contents for it. Raises ValueError."""
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict):
        raise ValueError(f"a document is {_shown(document)}")
    contents = document.get("contents")
    if contents is None and "text" in document:
        contents = contents_of(str(document.get("title") or ""), str(document["text"]))
    if not isinstance(contents, str):
        raise ValueError(
            f"a document has neither contents nor text, only {', '.join(map(str, document))}"[:200]
        )
    name = next(
        (document[key] for key in ("id", "_id", "docid", "url") if document.get(key) is not None), None
    )
    return Passage(
        blake2b(contents.encode(errors="replace"), digest_size=8).hexdigest() if name is None else str(name),
        contents,
    )
