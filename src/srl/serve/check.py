"""`srl serve check`: which dialects a search server speaks, and whether it can serve episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx

from srl.errors import UserError
from srl.process import run_async
from srl.safe import quoted, refusal
from srl.serve.request import bearer_token, exchange, new_client, page_url, retrieve_url
from srl.serve.wire import DIGEST_HEADER, TOKEN_VARIABLE, read_answer, read_digest
from srl.trajectory import Hit

QUERIES = ("Where was the first president of the country born?", "Who is the mayor of the capital city?")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one probe; `passed` is None where it could not tell."""

    name: str
    passed: bool | None
    detail: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class ServerCheck:
    url: str
    findings: list[Finding]
    index_digest: str = ""

    @property
    def conforms(self) -> bool | None:
        """Whether nothing that episodes require has failed; None where the queries had no hits at all."""
        failed = any(finding.required and finding.passed is False for finding in self.findings)
        return False if failed else self.findings[0].passed


class _Unclear(Exception):  # noqa: N818 - a result
    """A probe tells nothing: the queries have too few hits."""


def check_server(
    url: str,
    queries: Sequence[str] = QUERIES,
    topk: int = 3,
    timeout_s: float = 30.0,
    transport: httpx.AsyncBaseTransport | None = None,
) -> ServerCheck:
    """Probe the server at `url` with `queries`, at least two if possible, with the token if there is one.

    Blocks. Raises UserError if no server answers.
    """
    url = retrieve_url(url)

    async def run() -> ServerCheck:
        async with new_client([url], bearer_token(), transport) as client:
            return await _Probes(client, url, list(queries), topk, timeout_s).run()

    return run_async(run())


class _Probes:
    """The requests of a check. What Search-R1's clients send is required, the rest is optional."""

    def __init__(
        self, client: httpx.AsyncClient, url: str, queries: list[str], topk: int, timeout_s: float
    ) -> None:
        self._client, self._url, self._timeout_s = client, url, timeout_s
        self._queries, self._topk = queries, topk
        self._findings: list[Finding] = []
        self._digest = ""
        self._batch: list[list[Hit]] = []
        """The hits that the first probe returned: what the others compare with."""

    async def run(self) -> ServerCheck:
        await self._try("answers with documents and scores", self._answers(), required=True)
        if self._findings[0].passed is not False:
            first, topk, scored = self._queries[:1], self._topk, {"return_scores": True}
            alone, request = self._batch[:1], {"queries": first, **scored}
            await self._try("orders hits by score", self._ordered(), required=True)
            await self._try("answers a query alone as in a batch", self._alone(), required=True)
            for name, body, expected in (
                ("return_scores: false gives bare documents", {"queries": first, "topk": topk}, alone),
                ("query: one text", {"query": first[0], "topk": topk, **scored}, alone),
                ("top_k", {**request, "top_k": 1}, None),
                ("k", {**request, "k": 1}, None),
                ("topk_retrieval, topk_rerank", {**request, "topk_retrieval": 10, "topk_rerank": 1}, None),
            ):
                await self._try(name, self._like(body, expected))
            mixed = {"queries": [*first, ""], "topk": topk, **scored}
            await self._try("an empty query fails no batch", self._like(mixed, [*alone, []]))
            await self._try("a bad request gets a 4xx", self._refuses())
            await self._try("/health", self._health())
        return ServerCheck(self._url, self._findings, self._digest)

    async def _try(self, name: str, probe: Awaitable[None], required: bool = False) -> None:
        passed: bool | None = True
        detail = ""
        try:
            await probe
        except _Unclear:
            passed, detail = None, "too few hits to tell; give --query with words from the corpus"
        except ValueError as error:
            passed, detail = False, quoted(str(error))
        self._findings.append(Finding(name, passed, detail, required))

    async def _answers(self) -> None:
        self._batch = await self._hits({"queries": self._queries, "topk": self._topk, "return_scores": True})
        if not any(self._batch):
            raise _Unclear
        pairs = sorted(zip(self._queries, self._batch, strict=True), key=lambda pair: -len(pair[1]))
        self._queries, self._batch = [query for query, _ in pairs], [hits for _, hits in pairs]

    async def _ordered(self) -> None:
        for hits in self._batch:
            scores = [hit.score for hit in hits]
            _expect(len(hits) <= self._topk, f"{len(hits)} hits, expected at most {self._topk}")
            _expect(scores == sorted(scores, reverse=True), f"scores out of order: {scores}")
        if max(map(len, self._batch)) < 2:
            raise _Unclear

    async def _alone(self) -> None:
        for query, hits in zip(self._queries, self._batch, strict=True):
            with suppress(_Unclear):
                await self._like({"queries": [query], "topk": self._topk, "return_scores": True}, [hits])

    async def _like(self, body: dict[str, Any], expected: list[list[Hit]] | None) -> None:
        """The hits must be as `expected`; None: a single one, where the batch has more for this query."""
        hits = await self._hits(body)
        if expected is None:
            if len(self._batch[0]) < 2:
                raise _Unclear
            _expect(len(hits[0]) == 1, f"{len(hits[0])} hits, expected 1")
            return
        names = [[[hit.passage.id for hit in row] for row in each] for each in (hits, expected)]
        _expect(names[0] == names[1], f"returned {names[0]}, but {names[1]} in the batch")
        gaps = [abs(a.score - b.score) for a, b in zip(chain(*hits), chain(*expected), strict=True)]
        _expect("return_scores" not in body or max(gaps, default=0.0) <= 1e-3, "the scores differ")
        if not any(expected):
            raise _Unclear

    async def _refuses(self) -> None:
        code = (await self._send("POST", self._url, {"queries": 7})).status_code
        _expect(400 <= code < 500, f"HTTP {code}")

    async def _health(self) -> None:
        response = await self._send("GET", page_url(self._url, "health"))
        _expect(response.status_code == 200, f"HTTP {response.status_code}")
        health = json.loads(response.content)
        _expect(isinstance(health, dict) and bool(health), "the answer is not a JSON object")
        self._digest = self._digest or read_digest(health.get("index_digest"))

    async def _hits(self, body: dict[str, Any]) -> list[list[Hit]]:
        """The hits of an answer in the form that the body asks for."""
        response = await self._send("POST", self._url, body)
        self._digest = read_digest(response.headers.get(DIGEST_HEADER)) or self._digest
        token = f"HTTP 401: the server needs a token; type: export {TOKEN_VARIABLE}=…"
        _expect(response.status_code != 401, token)
        _expect(response.status_code == 200, refusal(response.status_code, response.content, 100))
        hits = read_answer(response.content, len(body.get("queries", [""])), topk=10_000)
        for hit in chain(*json.loads(response.content)["result"]):
            has_score = isinstance(hit, dict) and {"document", "score"} <= hit.keys()
            _expect(
                has_score == ("return_scores" in body), 'hits with scores are {"document": …, "score": …}'
            )
        return hits

    async def _send(self, method: str, url: str, body: Any = None) -> httpx.Response:
        content = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await exchange(self._client, method, url, content)
        except httpx.ConnectError as error:
            why = f"no search server answers at {self._url} ({quoted(str(error))})"
            raise UserError(why, hint="type: srl serve retriever --index DIR") from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)
