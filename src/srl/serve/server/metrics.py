"""Metrics of the server, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from srl import __version__
from srl.index import Index
from srl.serve.server.answer_cache import AnswerCache
from srl.serve.server.queue import Answered, Batch, SearchQueue

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one server; each has a registry of its own, so that a process can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._children: dict[tuple[Any, ...], Any] = {}
        self._requests = self._counter("requests", "Requests to /retrieve, by HTTP status.", "status")
        self._errors = self._counter("errors", "Requests to /retrieve answered with an error.")
        self._queries = self._counter("queries", "Queries answered.")
        self._hits = self._counter("cache_hits", "Queries answered from the cache.")
        self._shared = self._counter(
            "deduplicated", "Queries answered together with an identical one, of another request or the same."
        )
        self._total = self._histogram("request", "Time from the arrival of a request to its answer.", SECONDS)
        self._queue = self._histogram(
            "queue", "Time in the queue, until the search of the last query of a request begins.", SECONDS
        )
        self._embed = self._histogram("embed", "Time to encode the queries of a batch.", SECONDS)
        self._search = self._histogram("search", "Time to search a batch, without encoding.", SECONDS)
        self._batch = Histogram(
            "srl_search_batch_queries",
            "Queries in a batch.",
            ["index"],
            buckets=QUERIES,
            registry=self.registry,
        )

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"srl_search_{name}", what, ["index", *labels], registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"srl_search_{name}_seconds", what, ["index"], buckets=buckets, registry=self.registry
        )

    def watch_cache(self, cache: AnswerCache) -> None:
        self._gauge("cache_bytes", "Size of the answer cache in bytes.").set_function(lambda: cache.bytes)
        self._gauge("cache_entries", "Answers in the cache.").set_function(lambda: len(cache))

    def watch_indexes(self, indexes: Mapping[str, Index], queues: Mapping[str, SearchQueue]) -> None:
        waiting = self._gauge("waiting", "Queries in the queue.", "index")
        passages = self._gauge(
            "index_passages", "Passages in the index.", "index", "retriever", "digest", "version"
        )
        for name, index in indexes.items():
            waiting.labels(name).set_function(partial(getattr, queues[name], "waiting"))
            passages.labels(name, index.manifest.retriever, index.digest, __version__).set(len(index))

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"srl_search_{name}", what, list(labels), registry=self.registry)

    def count(self, index: str, status: int, seconds: float, answered: Answered | None) -> None:
        """Count a request to /retrieve; `answered` is None if nothing was searched."""
        self._child(self._requests, index, str(status)).inc()
        self._child(self._total, index).observe(seconds)
        if status >= 400:
            self._child(self._errors, index).inc()
        if answered is None:
            return
        self._child(self._queries, index).inc(len(answered.outcomes))
        if answered.cached:
            self._child(self._hits, index).inc(answered.cached)
        if answered.shared:
            self._child(self._shared, index).inc(answered.shared)
        if answered.cached < len(answered.outcomes):
            self._child(self._queue, index).observe(answered.queue_s)

    def _child(self, metric: Any, *labels: str) -> Any:
        """The series of these labels, cached: the library's own lookup is slow."""
        key = (id(metric), *labels)
        if key not in self._children:
            self._children[key] = metric.labels(*labels)
        return self._children[key]

    def count_batch(self, index: str, batch: Batch) -> None:
        self._child(self._batch, index).observe(len(batch.queries))
        self._child(self._embed, index).observe(batch.embed_s)
        self._child(self._search, index).observe(batch.search_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)
