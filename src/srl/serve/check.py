"""`srl serve check`: which dialects a search server speaks, and whether it can serve episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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

    @property
    def conforms(self) -> bool:
        """Whether everything that episodes require has passed."""
        return all(finding.passed for finding in self.findings if finding.required)


class _WrongError(Exception):
    """What is wrong with an answer, in one line."""


class _UnclearError(Exception):
    """Why a probe tells nothing."""


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
        self._digest = ""
        self._batch: list[list[Hit]] = []
        """What the first probe found: what the others compare with."""

    async def run(self) -> ServerCheck:
        findings = [await self._try("answers with documents and scores", self._answers, required=True)]
        if findings[0].passed:
            findings += [
                await self._try("orders hits by score", self._ordered, required=True),
                await self._try("answers a query alone as in a batch", self._alone, required=True),
                await self._try("return_scores: false gives bare documents", self._bare),
                await self._try("query: one text", self._one_text),
                await self._try("top_k", lambda: self._k(top_k=1)),
                await self._try("k", lambda: self._k(k=1)),
                await self._try(
                    "topk_retrieval, topk_rerank", lambda: self._k(topk_retrieval=10, topk_rerank=1)
                ),
                await self._try("a bad request gets a 4xx", self._refuses),
                await self._try("an empty query fails no batch", self._empty),
                await self._try("/health", self._health),
                await self._try("/metrics", self._metrics),
                await self._try("/access", self._access),
            ]
        return ServerCheck(self._url, findings, self._digest)

    async def _try(self, name: str, probe: Callable[[], Awaitable[None]], required: bool = False) -> Finding:
        try:
            await probe()
        except _UnclearError as error:
            return Finding(name, None, str(error), required)
        except (_WrongError, ValueError) as error:
            return Finding(name, False, quoted(str(error)), required)
        return Finding(name, True, "", required)

    async def _answers(self) -> None:
        self._batch = await self._ask(queries=self._queries, topk=self._topk)
        if not any(self._batch):
            raise _UnclearError("no hits; give --query with words from the corpus")

    async def _ordered(self) -> None:
        for hits in self._batch:
            scores = [hit.score for hit in hits]
            _expect(len(hits) <= self._topk, f"{len(hits)} hits, expected at most {self._topk}")
            _expect(scores == sorted(scores, reverse=True), f"scores out of order: {scores}")

    async def _alone(self) -> None:
        for query, expected in zip(self._queries, self._batch, strict=True):
            (hits,) = await self._ask(queries=[query], topk=self._topk)
            _same(hits, expected)

    async def _bare(self) -> None:
        content = await self._post({"queries": self._queries[:1], "topk": self._topk})
        (hits,) = read_answer(content, 1, self._topk)
        wrapped = any("document" in hit for hit in json.loads(content)["result"][0] if isinstance(hit, dict))
        _expect(not wrapped, "the documents are wrapped as if scores had been requested")
        _same_passages(hits, self._batch[0])

    async def _one_text(self) -> None:
        _same((await self._ask(query=self._queries[0], topk=self._topk))[0], self._batch[0])

    async def _k(self, **k: int) -> None:
        if len(self._batch[0]) < 2:
            raise _UnclearError("too few hits to tell; give --query with words from the corpus")
        (hits,) = await self._ask(queries=self._queries[:1], **k)
        _expect(len(hits) == 1, f"{len(hits)} hits, expected 1")

    async def _refuses(self) -> None:
        code = (await self._send("POST", self._url, {"queries": 7})).status_code
        _expect(400 <= code < 500, f"HTTP {code}")

    async def _empty(self) -> None:
        hits, none = await self._ask(queries=[self._queries[0], ""], topk=self._topk)
        _same(hits, self._batch[0])
        _expect(not none, "an empty query has hits")

    async def _health(self) -> None:
        said = json.loads(await self._page("GET", "health"))
        _expect(isinstance(said, dict) and bool(said), "the answer is not a JSON object")
        self._digest = self._digest or read_digest(said.get("index_digest"))

    async def _metrics(self) -> None:
        _expect(b"# TYPE" in await self._page("GET", "metrics"), "not in Prometheus format")

    async def _access(self) -> None:
        said = json.loads(await self._page("POST", "access", {"urls": ["a-page-that-nobody-has"]}))
        known = not isinstance(said, dict) or said.get("result") != [None]
        _expect(not known, "the answer for an unknown page is not null")

    async def _ask(self, **body: Any) -> list[list[Hit]]:
        """The hits of an answer with scores."""
        content = await self._post({**body, "return_scores": True})
        hits = read_answer(content, len(body.get("queries", [""])), topk=10_000)
        items = [item for each in json.loads(content)["result"] for item in each]
        scored = all(isinstance(item, dict) and {"document", "score"} <= item.keys() for item in items)
        _expect(scored, 'a hit is not {"document": …, "score": …}')
        return hits

    async def _post(self, body: dict[str, Any]) -> bytes:
        response = await self._send("POST", self._url, body)
        self._digest = read_digest(response.headers.get(DIGEST_HEADER)) or self._digest
        if response.status_code == 401:
            raise _WrongError(f"HTTP 401: the server needs a token; type: export {TOKEN_VARIABLE}=…")
        _expect(response.status_code == 200, refusal(response.status_code, response.content, 100))
        return response.content

    async def _page(self, method: str, page: str, body: Any = None) -> bytes:
        response = await self._send(method, page_url(self._url, page), body)
        _expect(response.status_code == 200, f"HTTP {response.status_code}")
        return response.content

    async def _send(self, method: str, url: str, body: Any = None) -> httpx.Response:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await exchange(
                    self._client, method, url, None if body is None else json.dumps(body).encode()
                )
        except httpx.ConnectError as error:
            why = f"no search server answers at {self._url} ({quoted(str(error))})"
            raise UserError(why, hint="type: srl serve retriever --index DIR") from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise _WrongError(f"{type(error).__name__}: {error}") from error


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _WrongError(otherwise)


def _same(hits: list[Hit], expected: list[Hit]) -> None:
    _same_passages(hits, expected)
    gap = max((abs(a.score - b.score) for a, b in zip(hits, expected, strict=True)), default=0.0)
    _expect(gap <= 1e-3, f"the scores differ by {gap:.3g}")


def _same_passages(hits: list[Hit], expected: list[Hit]) -> None:
    ids = [hit.passage.id for hit in hits], [hit.passage.id for hit in expected]
    _expect(ids[0] == ids[1], f"found {ids[0]}, but {ids[1]} in the batch")
