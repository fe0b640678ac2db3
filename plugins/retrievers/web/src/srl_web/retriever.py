"""Web search as a retriever: there is no index; each query is sent to a search API."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import httpx

from srl.files import digest_text
from srl.index import Fault, RetrieverBase
from srl.index.retriever import as_fault
from srl.trajectory import Hit
from srl.user_cache import UserCache
from srl_web.api import Result
from srl_web.caller import Caller
from srl_web.hits import encodable, hits_of
from srl_web.keys import check_named, read_keys
from srl_web.options import Options

_TABLE = "CREATE TABLE IF NOT EXISTS kept (key TEXT PRIMARY KEY, value TEXT, at REAL)"
_DAYS = 30
"""Results older than this are requested again."""


class WebRetriever(RetrieverBase):
    """Searches the web. Thread-safe."""

    name = "web"
    live = True

    def __init__(self, options: Options, transport: httpx.BaseTransport | None = None) -> None:
        self.options = options
        self._api, self._transport = options.chosen_api, transport

    def open(self, directory: Path | None = None) -> WebRetriever:
        """Read the keys and open the cache.

        Raises UserError if a key is missing, if the cache is no cache, or if the API of an index in
        `directory` would get keys that the user has not named.
        """
        options = self.options
        if directory is not None and options.api is not None:
            check_named(self._api, {*options.env, options.key_env})
        keys = read_keys(self._api)
        self._cache = UserCache(options.cache, "web.sqlite", _TABLE, "retriever.web.cache")
        self._caller = Caller(options, keys, self._transport)
        # What results depend on besides query and k: the API without its key, and other variables.
        variables = [value for name, value in keys.items() if name != self._api.key_env]
        about = (options.language or "", options.country or "", str(options.answers), *variables)
        self._source = digest_text(self._api.model_dump_json(exclude={"key_env"}), *about)
        return self

    @property
    def requests(self) -> int:
        """The number of requests counted towards the spending cap so far."""
        return self._caller.limits.spent

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """For each query its hits, or a Fault."""
        if not queries:
            return []
        with ThreadPoolExecutor(min(len(queries), self.options.concurrency)) as pool:
            try:
                return list(pool.map(self._outcome, queries, repeat(k)))
            except BaseException:  # an interruption: nothing waits or is sent again
                self._caller.stop()
                raise

    def _outcome(self, query: str, k: int) -> list[Hit] | Fault:
        try:
            query = " ".join(encodable(query).replace("\0", " ").split())
            self._check(query)
            return hits_of(self._results(query, k), k)
        except Exception as error:  # an unexpected error must not fail the other queries
            return as_fault(error)

    def _check(self, query: str) -> None:
        """Raise Fault if the query is empty or too long."""
        api = self._api
        if not query:
            raise Fault("rejected", "the query is empty")
        if len(query) > api.max_chars or (api.max_words and len(query.split()) > api.max_words):
            words = f" and {api.max_words} words" if api.max_words else ""
            raise Fault("rejected", f"the query is longer than {api.max_chars:,} characters{words}")

    def _results(self, query: str, k: int) -> list[Result]:
        """From the cache, or from a request."""
        key = digest_text(self._source, str(k), query)
        since = time.time() - _DAYS * 86400
        rows = self._cache.run("SELECT value FROM kept WHERE key = ? AND at >= ?", key, since)
        if rows:
            return [Result(*parts) for parts in json.loads(rows[0][0])]
        results = self._caller.ask(query, k)
        self._cache.run("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", key, json.dumps(results), time.time())
        return results
