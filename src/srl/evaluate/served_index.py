"""A search server, ours or another's, evaluated as if it were an index."""

from __future__ import annotations

import asyncio

from srl import interrupts
from srl.index import Fault
from srl.serve.client import HttpSearch
from srl.serve.wire import Limits
from srl.trajectory import Hit, Search


class ServedIndex:
    """The server at `url`. Its passages are not at hand, only its hits.

    `digest` is that of the index it serves, empty where it tells none. Raises UserError where it does not
    answer.
    """

    passages = None

    def __init__(self, url: str) -> None:
        self.url = url
        self.digest = interrupts.run(self._connect())

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """The hits of each query, or why there are none."""
        return interrupts.run(self._ask(queries, k))

    async def _connect(self) -> str:
        client = HttpSearch(self.url)
        try:
            return await client.connect()
        finally:
            await client.aclose()

    async def _ask(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        client = HttpSearch(self.url, k, max_query_chars=Limits().query_chars)
        try:
            found = await asyncio.gather(*(client.search(query) for query in queries))
        finally:
            await client.aclose()
        return [_outcome(search) for search in found]


def _outcome(search: Search) -> list[Hit] | Fault:
    if search.status in ("ok", "empty"):
        return list(search.hits)
    return Fault(search.status, search.error)  # type: ignore[arg-type]
