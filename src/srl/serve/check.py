"""`srl serve check`: which dialects a search server speaks, and whether it can serve episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NoReturn

import httpx

from srl.errors import UserError
from srl.safe import quoted, refusal
from srl.serve.client import is_loopback, retrieve_url
from srl.serve.client.request import MAX_ANSWER_BYTES, page_url
from srl.serve.wire import DIGEST_HEADER, read_answer, read_digest
from srl.trajectory import Hit

QUERIES = ("Where was the first president of the country born?", "Who is the mayor of the capital city?")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one probe; `passed` is None if it was inconclusive."""

    name: str
    passed: bool | None
    detail: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class ServerCheck:
    url: str
    findings: list[Finding]
    index_digest: str = ""
    latency_s: list[float] = field(default_factory=list)

    @property
    def conforms(self) -> bool:
        """Whether everything that episodes require has passed."""
        return all(finding.passed for finding in self.findings if finding.required)

    @property
    def median_latency_s(self) -> float:
        return median(self.latency_s) if self.latency_s else float("nan")


def check_server(
    url: str,
    queries: Sequence[str] = QUERIES,
    topk: int = 3,
    calls: int = 10,
    timeout_s: float = 30.0,
    transport: httpx.BaseTransport | None = None,
    token: str = "",
) -> ServerCheck:
    """Probe the server at `url` with `queries`, at least two if possible. Raises UserError if none answers.

    `token` is sent with every request as `Authorization: Bearer`.
    """
    url = retrieve_url(url)
    with httpx.Client(
        timeout=timeout_s,
        trust_env=not is_loopback(httpx.URL(url).host),
        transport=transport,
        follow_redirects=True,
        headers={"Authorization": f"Bearer {token}"} if token else {},
    ) as client:
        probe = _Probe(client, url, list(queries), topk)
        findings = list(probe.findings())
        return ServerCheck(url, findings, probe.digest, list(probe.latencies(calls)))


class _ProblemError(Exception):
    """What is wrong with an answer, in one line that is safe to show."""

    def __init__(self, message: str) -> None:
        super().__init__(quoted(message))


@dataclass
class _Probe:
    """The requests of a check; `digest` is that of the answers' header, or else of /health."""

    client: httpx.Client
    url: str
    queries: list[str]
    topk: int
    digest: str = ""

    def findings(self) -> Iterator[Finding]:
        """Probes of Search-R1's dialect, which is required, then of the others."""
        name = "answers with documents and scores"
        try:
            batch = self.ask({"queries": self.queries, "topk": self.topk, "return_scores": True})
        except _ProblemError as problem:
            yield Finding(name, False, str(problem), required=True)
            return
        if not any(batch):
            yield Finding(name, None, "no hits; give --query with words from the corpus", required=True)
            return
        yield Finding(name, True, f"{sum(map(len, batch))} hits for {len(batch)} queries", required=True)
        yield self._try("orders hits by score", lambda: _in_order(batch, self.topk), required=True)
        yield self._try("answers a query alone as in a batch", lambda: self._alone(batch), required=True)
        yield from self._dialects(batch[0])

    def _dialects(self, hits: list[Hit]) -> Iterator[Finding]:
        first, ask = self.queries[0], {"topk": self.topk, "return_scores": True}
        bare = {"queries": [first], "topk": self.topk}
        yield self._try("return_scores: false gives bare documents", lambda: self._bare(bare, hits))
        yield self._try("query: one text", lambda: _same(self.ask({"query": first, **ask})[0], hits))
        for name in ("top_k", "k"):
            yield self._k(name, {name: 1}, hits)
        yield self._k("topk_retrieval, topk_rerank", {"topk_retrieval": 10, "topk_rerank": 1}, hits)
        yield self._try("a bad request gets a 4xx", self._refusal)
        yield self._try("an empty query fails no batch", lambda: self._empty(hits))
        yield self._try("/health", self._health)
        yield self._try("/metrics", self._metrics)
        yield self._try("/access", self._access)

    def _try(self, name: str, probe: Callable[[], str | None], required: bool = False) -> Finding:
        try:
            detail = probe()
        except _ProblemError as problem:
            return Finding(name, False, str(problem), required)
        return Finding(name, True, detail or "", required)

    def ask(self, body: dict[str, Any]) -> list[list[Hit]]:
        """The hits of an answer with scores. Raises _ProblemError."""
        expected = len(body.get("queries", [""]))
        answer = self._post(body)
        try:
            found = read_answer(answer, expected, topk=10_000)
        except ValueError as error:
            raise _ProblemError(str(error)) from error
        items = [item for hits in json.loads(answer)["result"] for item in hits]
        if not all(isinstance(item, dict) and {"document", "score"} <= set(item) for item in items):
            raise _ProblemError('a hit is not {"document": …, "score": …}')
        return found

    def _post(self, body: dict[str, Any]) -> bytes:
        response = self._send("POST", self.url, body)
        self._name(response.headers.get(DIGEST_HEADER))
        if response.status_code == 401:
            raise _ProblemError("HTTP 401: the server needs a token; type: export SRL_SEARCH_TOKEN=…")
        if response.status_code != 200:
            raise _ProblemError(refusal(response.status_code, response.content, 100))
        return response.content

    def _send(self, method: str, url: str, body: Any = None) -> httpx.Response:
        """The answer. Raises UserError where no server is, _ProblemError for what never ends."""
        answer = bytearray()
        try:
            with self.client.stream(method, url, json=body) as response:
                for chunk in response.iter_bytes():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        _fail(f"the answer is larger than {MAX_ANSWER_BYTES:,} bytes")
        except httpx.ConnectError as error:
            raise UserError(
                f"no search server answers at {self.url} ({quoted(str(error))}); "
                "type: srl serve retriever --index DIR"
            ) from error
        except httpx.HTTPError as error:
            raise _ProblemError(f"{type(error).__name__}: {error}") from error
        headers = {name: text for name, text in response.headers.items() if name != "content-encoding"}
        return httpx.Response(response.status_code, headers=headers, content=bytes(answer))

    def _name(self, digest: object) -> None:
        try:
            self.digest = read_digest(digest) or self.digest
        except ValueError as error:
            raise _ProblemError(str(error)) from error

    def _alone(self, batch: list[list[Hit]]) -> str | None:
        for query, hits in zip(self.queries, batch, strict=True):
            _same(self.ask({"queries": [query], "topk": self.topk, "return_scores": True})[0], hits)
        return None

    def _empty(self, hits: list[Hit]) -> str | None:
        """Models sometimes write empty queries; Search-R1's client sends them in the batch."""
        body = {"queries": ["", self.queries[0]], "topk": self.topk, "return_scores": True}
        return _same(self.ask(body)[1], hits)

    def _bare(self, body: dict[str, Any], hits: list[Hit]) -> str | None:
        for extra in ({}, {"return_scores": False}):
            answer = self._post(body | extra)
            try:
                (found,) = read_answer(answer, 1, self.topk)
            except ValueError as error:
                raise _ProblemError(str(error)) from error
            if any(isinstance(item, dict) and "document" in item for item in json.loads(answer)["result"][0]):
                raise _ProblemError("the documents are wrapped as if scores had been requested")
            _same_passages(found, hits)
        return None

    def _k(self, name: str, asked: dict[str, int], hits: list[Hit]) -> Finding:
        if len(hits) < 2:
            return Finding(name, None, "too few hits to tell; give --query with words from the corpus")

        def probe() -> str | None:
            (found,) = self.ask({"queries": self.queries[:1], "return_scores": True, **asked})
            return None if len(found) == 1 else _fail(f"{len(found)} hits, expected 1")

        return self._try(name, probe)

    def _refusal(self) -> str | None:
        code = self._send("POST", self.url, {"queries": 7}).status_code
        return f"HTTP {code}" if 400 <= code < 500 else _fail(f"HTTP {code}")

    def _metrics(self) -> str | None:
        response = self._beside("GET", "metrics")
        return None if "# TYPE" in response.text else _fail("not in Prometheus format")

    def _access(self) -> str | None:
        unknown = "srl-serve-check-asks-for-a-page-that-nobody-has"
        said = _json(self._beside("POST", "access", {"urls": [unknown]}))
        told = isinstance(said, dict) and said.get("result") == [None]
        return None if told else _fail("the answer for an unknown page is not null")

    def _beside(self, method: str, page: str, body: Any = None) -> httpx.Response:
        response = self._send(method, page_url(self.url, page), body)
        return response if response.status_code == 200 else _fail(f"HTTP {response.status_code}")

    def _health(self) -> str:
        found = _json(self._beside("GET", "health"))
        if not isinstance(found, dict) or not found:
            _fail("the answer is not a JSON object")
        self._name(self.digest or found.get("index_digest"))
        return "ok"

    def latencies(self, calls: int) -> Iterator[float]:
        """Seconds that each of `calls` sequential requests takes."""
        body = {"queries": self.queries, "topk": self.topk, "return_scores": True}
        for _ in range(calls):
            start = perf_counter()
            try:
                self._post(body)
            except _ProblemError:
                return
            yield perf_counter() - start


def _json(response: httpx.Response) -> Any:
    """The parsed answer; None if it is not JSON."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def _fail(why: str) -> NoReturn:
    raise _ProblemError(why)


def _in_order(batch: list[list[Hit]], topk: int) -> str | None:
    for hits in batch:
        scores = [hit.score for hit in hits]
        if len(hits) > topk:
            raise _ProblemError(f"{len(hits)} hits, expected at most {topk}")
        if scores != sorted(scores, reverse=True):
            raise _ProblemError(f"scores out of order: {scores}")
    return None


def _same(found: list[Hit], expected: list[Hit]) -> str | None:
    _same_passages(found, expected)
    gap = max((abs(a.score - b.score) for a, b in zip(found, expected, strict=True)), default=0.0)
    return None if gap <= 1e-3 else _fail(f"the scores differ by {gap:.3g}")


def _same_passages(found: list[Hit], expected: list[Hit]) -> None:
    ids = [hit.passage.id for hit in found], [hit.passage.id for hit in expected]
    if ids[0] != ids[1]:
        raise _ProblemError(f"found {ids[0]}, but {ids[1]} in the batch")
