"""Web search as a retriever: there is no index; each query is sent to a search API."""

from __future__ import annotations

import asyncio
import os
import traceback
import weakref
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread, current_thread
from typing import Any, TypeVar

import httpx

from srl.errors import UserError
from srl.files import digest_text
from srl.index import Fault, RetrieverBase
from srl.index.timing import timed
from srl.plugins import manager
from srl.safe_text import quoted, safe_message
from srl.trajectory import Hit, Passage
from srl_web.api import Result
from srl_web.cache import Cache, cache_path, log, open_file
from srl_web.caller import Caller
from srl_web.hits import encodable, hits_of
from srl_web.limits import Budget
from srl_web.options import Options
from srl_web.pages import PageReader, check_extractor
from srl_web.secrets import Secrets
from srl_web.trusted_apis import check_trusted, trust

T = TypeVar("T")


class WebRetriever(RetrieverBase):
    """Searches the web. Thread-safe; concurrent identical queries are sent once."""

    name = "web"
    live = True

    def __init__(self, options: Options, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.options = options
        self._transport = transport
        self._secrets: Secrets | None = None
        self._session: _Session | None = None
        self._lock = Lock()

    def identity(self) -> dict[str, str]:
        """The digest of the API of another package's provider; our own are identified by their names."""
        name = self.options.provider
        if name is None or manager.find("provider", name).package == "srl-search-web":
            return {}
        return {"provider": digest_text(self.options.asked.model_dump_json(exclude={"key_env"}))}

    def build(
        self, passages: Iterable[Passage] | None, directory: Path, progress: Callable[[int], None]
    ) -> None:
        """Nothing to build; notes that this user trusts the API. Raises UserError if passages are given."""
        if passages is not None:
            raise UserError("web searches an external service and takes no corpus; leave it out")
        if self.options.api is not None:
            trust(self.options.api)

    def open(self, directory: Path | None = None) -> WebRetriever:
        """Read the keys, and open cache and ledger.

        Raises UserError if a key is missing, if a file is bad, or if an index from elsewhere would send keys
        that the user has not named.
        """
        if directory is not None and self.options.api is not None:
            check_trusted(self.options.api, {*self.options.env, self.options.key_env})
        if self.options.pages:
            check_extractor()
        self._secrets = Secrets.of(self.options.asked)
        self._running()
        return self

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, in the API's order. Raises the first Fault."""
        found = self.outcomes(queries, k)
        for outcome in found:
            if isinstance(outcome, Fault):
                raise outcome
        return [outcome for outcome in found if not isinstance(outcome, Fault)]

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """For each query its hits, or a Fault."""
        if not queries:
            return []
        session = self._running()
        try:
            with timed("web"):
                return session.run(session.outcomes(queries, k))
        except CancelledError:
            return [Fault("failed", "web search was closed before the answer arrived") for _ in queries]

    def close(self) -> None:
        """Cancel pending requests and end the thread. The next search starts a new one."""
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    @property
    def requests(self) -> int:
        """The number of requests counted towards the spending cap so far."""
        return self._running().budget.spent

    def _running(self) -> _Session:
        """The session of this process; a new one after a fork, which does not copy threads."""
        with self._lock:
            if self._session is None or self._session.process != os.getpid():
                if self._secrets is None:
                    raise RuntimeError("the retriever is not open")
                self._session = _Session(self.options, self._secrets, self._transport)
            return self._session


class _Session:
    """An event loop in its own thread, with the connections to API, pages, cache and ledger."""

    def __init__(
        self, options: Options, secrets: Secrets, transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self.process = os.getpid()
        self._options, self._api = options, options.asked
        self._secrets = secrets
        self._cache = _open_cache(options)
        ledger = open_file(options.ledger, "ledger") if options.ledger else None
        self.budget = Budget(options.cap, ledger)
        self._pending: dict[str, asyncio.Task[list[Result]]] = {}
        self._loop = asyncio.new_event_loop()
        thread = Thread(target=self._loop.run_forever, name="srl-web", daemon=True)
        thread.start()
        self._caller, self._pages = self.run(self._start(options, secrets, transport))
        self._stop = weakref.finalize(self, _stop, self._loop, thread, self._caller, self._pages)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and return its result. An interruption of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._stop()

    async def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        return list(await asyncio.gather(*(self._outcome(query, k) for query in queries)))

    async def _start(
        self, options: Options, secrets: Secrets, transport: httpx.AsyncBaseTransport | None
    ) -> tuple[Caller, PageReader | None]:
        caller = Caller(options, secrets, self.budget, transport=transport)
        return caller, PageReader(options, self._cache) if options.pages else None

    async def _outcome(self, query: str, k: int) -> list[Hit] | Fault:
        asked = " ".join(encodable(query).replace("\0", " ").split())
        try:
            self._check(asked)
            results = await self._results(asked, k)
            parts = await self._pages.parts(results[:k], asked) if self._pages else {}
        except Fault as fault:
            return fault
        except Exception as error:  # an unexpected error must not fail the other queries
            log.error("%s", safe_message("".join(traceback.format_exception(error))))
            return Fault("failed", quoted(f"{type(error).__name__}: {error}"))
        return hits_of(results, k, parts)

    def _check(self, query: str) -> None:
        """Raise Fault if the query is empty or too long."""
        if not query:
            raise Fault("rejected", "the query is empty")
        if len(query) > self._api.max_chars:
            raise Fault(
                "rejected", f"the query has {len(query):,} characters, at most {self._api.max_chars:,}"
            )
        if self._api.max_words and len(query.split()) > self._api.max_words:
            raise Fault("rejected", f"the query has more than {self._api.max_words} words")

    async def _results(self, query: str, k: int) -> list[Result]:
        """From the cache, from an identical pending request, or from a new one."""
        key = self._key(query, k)
        kept = self._cache.results(key)
        if kept is not None:
            return kept
        if key not in self._pending:
            task = asyncio.create_task(self._ask(key, query, k))
            self._pending[key] = task
            task.add_done_callback(lambda task: self._done(key, task))
        return await asyncio.shield(self._pending[key])

    def _done(self, key: str, task: asyncio.Task[list[Result]]) -> None:
        """Remove a pending request, and mark its error as retrieved in case nobody waits for it any more."""
        del self._pending[key]
        if not task.cancelled():
            task.exception()

    async def _ask(self, key: str, query: str, k: int) -> list[Result]:
        results = await self._caller.ask(query, k)
        self._cache.keep_results(key, results)
        return results

    def _key(self, query: str, k: int) -> str:
        """Digest of all that results depend on: not the key and its variable, but other variables."""
        options, api = self._options, self._api.model_dump_json(exclude={"key_env"})
        others = [value for name, value in self._secrets.values.items() if name != self._api.key_env]
        asked = (options.language or "", options.country or "", str(options.answers), str(k), query)
        return digest_text(api, *others, *asked)


def _stop(loop: asyncio.AbstractEventLoop, thread: Thread, *open_: Caller | PageReader | None) -> None:
    """Cancel the tasks of `loop`, close its connections, and end the thread."""
    if not thread.is_alive():  # in a forked process
        return
    if thread is current_thread():  # the last reference was dropped in the loop's own thread
        loop.stop()
        return
    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(_wind_up(open_), loop).result(timeout=10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)
    loop.close()


async def _wind_up(open_: Iterable[Caller | PageReader | None]) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for one in open_:
        if one is not None:
            await one.aclose()


def _open_cache(options: Options) -> Cache:
    """The cache of `options`. If the default cache file cannot be opened, a warning is logged instead."""
    path = cache_path(options.cache)
    try:
        return Cache(open_file(path, "cache") if path else None, options.cache_days)
    except UserError as error:
        if options.cache != "user":
            raise
        log.warning("web search runs without a cache: %s", error)
        return Cache(None, None)
