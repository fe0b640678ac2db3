"""The wire format: search requests and answers as JSON, in the dialects in use.

Search-R1's `POST /retrieve {"queries", "topk", "return_scores"}`, `topk_retrieval` and `topk_rerank` of its
rerank server, SkyRL's single `query`, rLLM's `top_k` or `k` (whose answer is a flat list called `results`);
answers with and without scores.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from ipaddress import ip_address
from typing import Any, NoReturn

from srl.data.corpus import contents_of
from srl.safe import quoted
from srl.trajectory import Hit, Passage

DIGEST_HEADER = "X-Index-Digest"
_DIGEST = re.compile(r"[0-9a-f]{1,128}")
TOPK_NAMES = ("topk", "top_k", "k", "topk_rerank", "topk_retrieval")
"""The names of k; the first one present counts: a rerank server returns `topk_rerank` passages."""


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine; such connections never use a proxy."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class RequestError(ValueError):
    """What is wrong with a request, in one line, and the HTTP status of the answer."""

    def __init__(self, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the server: sizes of a request, of all requests together, and time-outs."""

    queries: int = 1024
    """Queries in one request."""
    query_chars: int = 10_000
    topk: int = 1000
    hits: int = 100_000
    """Queries × k of one request, which bounds the size of its answer."""
    body_bytes: int = 4 << 20
    waiting: int = 8192
    """Queries queued for one index; further requests get a 503."""
    timeout_s: float = 25.0
    """For a search, queueing included; below the 30 s time-out of common clients."""
    body_s: float = 20.0
    """For the body of a request to arrive."""
    buffered_bytes: int = 256 << 20
    """Bytes of all bodies that are still arriving."""


@dataclass(frozen=True, slots=True)
class Request:
    """A search request; `single` if it had one `query` instead of `queries`."""

    queries: list[str]
    topk: int
    return_scores: bool
    index: str = ""
    single: bool = False


def write_request(queries: Sequence[str], topk: int) -> bytes:
    """A request body that servers of every dialect understand."""
    return json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()


def read_request(body: bytes, topk: int, limits: Limits) -> Request:
    """The request in `body`; `topk` is the default. Raises RequestError."""
    found = read_json(body)
    if not isinstance(found, dict):
        raise RequestError('the body must be a JSON object like {"queries": ["…"], "topk": 3}')
    scores, index = found.get("return_scores", False), found.get("index")
    if scores is not None and not isinstance(scores, bool):
        raise RequestError(f"return_scores must be true or false, not {_shown(scores)}")
    if index is not None and not isinstance(index, str):
        raise RequestError(f"index must be the name of an index, not {_shown(index)}")
    queries, k = _queries(found, limits), _topk(found, topk, limits)
    if len(queries) * k > limits.hits:
        raise RequestError(
            f"{len(queries):,} queries × {k} hits; at most {limits.hits:,} hits per request", 413
        )
    return Request(queries, k, bool(scores), index or "", "query" in found)


def read_json(body: bytes) -> Any:
    """The parsed body, which must be JSON in UTF-8 without NaN and Infinity. Raises RequestError."""
    try:
        return _DECODER.decode(body.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON", 400) from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _queries(found: Mapping[str, Any], limits: Limits) -> list[str]:
    if ("queries" in found) == ("query" in found):
        raise RequestError("give either queries (a list of texts) or query (one text)")
    queries = found["queries"] if "queries" in found else [found["query"]]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise RequestError("queries must be a list of texts, query one text")
    if len(queries) > limits.queries:
        raise RequestError(f"{len(queries):,} queries; at most {limits.queries:,} per request", 413)
    longest = max(map(len, queries), default=0)
    if longest > limits.query_chars:
        raise RequestError(
            f"a query has {longest:,} characters; at most {limits.query_chars:,} are allowed", 413
        )
    return queries


def _topk(found: Mapping[str, Any], default: int, limits: Limits) -> int:
    """The first k given; all others must be valid too. 3.0 counts as 3."""
    asked = [_k(name, found[name], limits) for name in TOPK_NAMES if found.get(name) is not None]
    return asked[0] if asked else default


def _k(name: str, value: Any, limits: Limits) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if not number or not 1 <= value <= limits.topk:
        raise RequestError(f"{name} must be a whole number from 1 to {limits.topk}, not {_shown(value)}")
    return int(value)


def _shown(value: object) -> str:
    return quoted(reprlib.repr(value), 40)


def read_answer(body: bytes, queries: int, topk: int) -> list[list[Hit]]:
    """The hits for each query in a server's answer, in its order, at most `topk`.

    Hits without a score get 0. Raises ValueError with a one-line message.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError(f"the answer is not JSON; it begins {quoted(body, 60)!r}") from None
    result = found.get("result") if isinstance(found, dict) else None
    if not isinstance(result, list) or not all(isinstance(hits, list) for hits in result):
        raise ValueError('the answer is not {"result": [[…], …]}')
    if len(result) != queries:
        raise ValueError(f"the answer has {len(result)} lists for {queries} queries")
    return [[read_hit(item) for item in hits[:topk]] for hits in result]


class BadDigestError(ValueError):
    """A server sent an invalid index digest."""


def read_digest(said: object) -> str:
    """The index digest that a server sent; empty if it sent none. Raises BadDigestError."""
    digest = "" if said is None else str(said)
    if digest and not _DIGEST.fullmatch(digest):
        raise BadDigestError(
            f"the server sent the index digest {quoted(digest, 40)!r}; expected up to 128 hexadecimal digits"
        )
    return digest


def read_hit(item: Any) -> Hit:
    """One hit, in any dialect. Raises ValueError."""
    document, score = item, 0.0
    if isinstance(item, dict) and "document" in item:
        document, score = item["document"], item.get("score", 0.0)
    try:
        value = math.nan if isinstance(score, bool) or not isinstance(score, int | float) else float(score)
    except OverflowError:  # an integer beyond any float
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"a score is {_shown(score)}")
    return Hit(read_document(document), value)


def read_document(document: Any) -> Passage:
    """A passage; without an id, a digest of its contents becomes the id. Raises ValueError."""
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict):
        raise ValueError(f"a document is {_shown(document)}")
    contents = document.get("contents")
    if contents is None and "text" in document:
        contents = contents_of(str(document.get("title") or ""), str(document["text"]))
    if not isinstance(contents, str):
        names = quoted(", ".join(map(str, document)), 160)
        raise ValueError(f"a document has neither contents nor text, only {names}")
    name = next(
        (document[key] for key in ("id", "_id", "docid", "url") if document.get(key) is not None), None
    )
    url = document.get("url")
    return Passage(
        blake2b(contents.encode(errors="replace"), digest_size=8).hexdigest() if name is None else str(name),
        contents,
        url if isinstance(url, str) and url != name else "",
    )
