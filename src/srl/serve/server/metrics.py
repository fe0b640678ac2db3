"""Metrics of the server for Prometheus, over all of its processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from srl.serve.server.queue import Answered, Batch

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PROCESSES = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with the folder in which the processes of one server share their metrics."""


@dataclass(slots=True)
class RequestRecord:
    """What is known about a request to /retrieve so far, for the metrics."""

    path: str
    answered: Answered | None = None
    status: int = 500
    start: float = field(default_factory=perf_counter)


class Metrics:
    """The metrics of one server; each has a registry of its own, so that a process can have several.

    With `PROCESSES` in the environment, the text is that of all processes which share the folder.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests to /retrieve, by HTTP status.", "status")
        self._queries = self._counter("queries", "Queries answered.")
        self._cached = self._counter("cache_hits", "Queries answered from the cache.")
        self._total = self._histogram("request_seconds", "Time from the arrival of a request to its answer.")
        self._queue = self._histogram(
            "queue_seconds", "Time in the queue, until the search of the last query of a request begins."
        )
        self._search = self._histogram("search_seconds", "Time to search a batch.")
        self._batch = self._histogram("batch_queries", "Queries in a batch.", QUERIES)
        self._waiting = Gauge(
            "srl_search_waiting",
            "Queries in the queue.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"srl_search_{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"srl_search_{name}", what, buckets=buckets, registry=self._registry)

    def count(self, record: RequestRecord) -> None:
        """Count a request to /retrieve."""
        answered = record.answered
        self._requests.labels(str(record.status)).inc()
        self._total.observe(perf_counter() - record.start)
        if answered is not None and record.status == 200:
            self._queries.inc(len(answered.outcomes))
            self._cached.inc(answered.cached)
            if answered.cached < len(answered.outcomes):
                self._queue.observe(answered.queue_s)

    def count_batch(self, batch: Batch) -> None:
        self._batch.observe(len(batch.queries))
        self._search.observe(batch.search_s)

    def text(self, waiting: int) -> bytes:
        """What Prometheus reads; `waiting` queries are in the queue."""
        self._waiting.set(waiting)
        if PROCESSES not in os.environ:
            return generate_latest(self._registry)
        shared = CollectorRegistry()
        MultiProcessCollector(shared)
        return generate_latest(shared)
