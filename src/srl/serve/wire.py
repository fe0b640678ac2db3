"""The search protocol: the models of requests, and a reader of every server's answers.

`POST /retrieve` as Search-R1 speaks it, with `topk_retrieval` and `topk_rerank` of its rerank server, SkyRL's
single `query`, rLLM's `top_k` or `k` and its flat `results`; answers with and without scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, FailFast, Field, model_validator

from srl.safe import quoted
from srl.serve.query_batcher import clean
from srl.trajectory import Hit, Passage, contents_of

DIGEST_HEADER = "X-Index-Digest"
TOKEN_VARIABLE = "SRL_SEARCH_TOKEN"
"""The environment variable with the bearer token of servers and clients."""

MAX_QUERIES = 4096
"""Queries in a request: Search-R1 sends those of a whole batch of episodes."""
MAX_QUERY_CHARS = 10_000
MAX_TOPK = 1000
MAX_HITS = 100_000
"""Queries × k of a request, which bounds the size of its answer."""
MAX_BODY_BYTES = 8 << 20

Query = Annotated[
    str,
    Field(max_length=MAX_QUERY_CHARS),
    BeforeValidator(lambda text: clean(text) if isinstance(text, str) else text),
]
K = Annotated[int, Field(ge=1, le=MAX_TOPK)]


class SearchRequest(BaseModel):
    """Queries, as a list or as a single text, and how many hits each gets; other fields are ignored."""

    queries: Annotated[list[Query], FailFast(), Field(max_length=MAX_QUERIES)] = []
    query: Query | None = None
    """One query, instead of `queries`."""
    topk: K | None = None
    """Hits per query, at most. The first of this and the following that is given counts."""
    top_k: K | None = None
    k: K | None = None
    topk_rerank: K | None = None
    topk_retrieval: K | None = None
    return_scores: bool | None = False
    """Whether a hit is `{"document", "score"}` or the bare document."""

    @model_validator(mode="after")
    def _has_queries(self) -> SearchRequest:
        if ("queries" in self.model_fields_set) == (self.query is not None):
            raise ValueError("give either queries (a list of texts) or query (one text)")
        return self

    @property
    def texts(self) -> list[str]:
        return self.queries if self.query is None else [self.query]

    def hits_per_query(self, default: int) -> int:
        depths = (self.topk, self.top_k, self.k, self.topk_rerank, self.topk_retrieval)
        return next((k for k in depths if k is not None), default)


class PagesRequest(BaseModel):
    """Passages by their ids or web addresses."""

    urls: Annotated[list[str], FailFast(), Field(max_length=MAX_QUERIES)]


def write_request(queries: Sequence[str], topk: int) -> bytes:
    """A request body that servers of every dialect understand."""
    return json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()


def read_answer(body: bytes, queries: int, topk: int) -> list[list[Hit]]:
    """The hits for each query in a server's answer, in its order, at most `topk`, in any dialect.

    Hits without a score get 0. Raises ValueError with a one-line message.
    """
    result = _result(body, queries)
    if not all(isinstance(hits, list) for hits in result):
        raise ValueError('the answer is not {"result": [[…], …]}')
    return [[_hit(hit) for hit in hits[:topk]] for hits in result]


def _result(body: bytes, queries: int) -> list[Any]:
    """The list `result` of an answer. Raises ValueError."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"the answer is not JSON; it begins {quoted(body, 60)!r}") from None
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list):
        raise ValueError('the answer is not {"result": […]}')
    if len(result) != queries:
        raise ValueError(f"the answer has {len(result)} results for {queries} queries")
    return result


def write_access(names: Sequence[str]) -> bytes:
    """A request body for passages by their ids or web addresses."""
    return json.dumps({"urls": list(names)}).encode()


def read_pages(body: bytes, names: int) -> list[Passage | None]:
    """The passages in an answer to `write_access`, in its order. Raises ValueError with one line."""
    return [None if page is None else _passage(page) for page in _result(body, names)]


def _hit(hit: Any) -> Hit:
    if isinstance(hit, dict) and "document" in hit:
        document, score = hit["document"], hit.get("score", 0.0)
    else:
        document, score = hit, 0.0
    # Written so that NaN, infinities and integers beyond any float fail too.
    if isinstance(score, bool) or not isinstance(score, int | float) or not abs(score) <= 1.7e308:
        raise ValueError(f"a score is {quoted(str(score)[:80], 40)}")
    return Hit(_passage(document), float(score))


def _passage(document: Any) -> Passage:
    """A passage; without an id, a digest of its contents becomes the id. Raises ValueError."""
    fields: Mapping[str, Any] = {"contents": document} if isinstance(document, str) else document
    if not isinstance(fields, dict):
        raise ValueError("a document is neither a JSON object nor a text")
    contents = fields.get("contents")
    if contents is None and "text" in fields:
        contents = contents_of(str(fields.get("title") or ""), str(fields["text"]))
    if not isinstance(contents, str):
        raise ValueError("a document has neither contents nor text")
    name = next((fields[key] for key in ("id", "_id", "docid", "url") if fields.get(key) is not None), None)
    if name is None:
        name = blake2b(contents.encode(errors="replace"), digest_size=8).hexdigest()
    texts = {key: text for key, text in fields.items() if isinstance(text, str) and text != name}
    return Passage.of({**texts, "id": str(name), "contents": contents})


def read_digest(value: object) -> str:
    """The index digest that a server sent; empty if it sent none. Raises ValueError if it is no digest."""
    digest = "" if value is None else str(value)
    if digest and not re.fullmatch("[0-9a-f]{1,128}", digest):
        raise ValueError(f"the server sent the index digest {quoted(digest, 40)!r}")
    return digest
