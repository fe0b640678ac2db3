"""The request log: one line of JSON per request."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TextIO

from srl.safe import hidden, safe_json
from srl.serve.server.queue import Answered


class RequestLog:
    """Writes to `stream`, by default stderr. Query texts are left out unless `queries` is set.

    `replica` is the number of this server if it is one of several.
    """

    def __init__(
        self, stream: TextIO | None = None, queries: bool = False, replica: int | None = None
    ) -> None:
        self._stream = stream
        self._queries = queries
        self._replica = replica

    def write(
        self,
        path: str,
        status: int,
        seconds: float,
        *,
        index: str = "",
        queries: Sequence[str] = (),
        k: int | None = None,
        answered: Answered | None = None,
        detail: str = "",
    ) -> None:
        """`detail` is the error, if any. Times are in milliseconds, None if nothing was searched."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "path": path,
            "index": index,
            "status": status,
            "queries": len(queries),
            "k": k,
            "cache_hits": answered.cached if answered else 0,
            "deduplicated": answered.shared if answered else 0,
            "queue_ms": _ms(answered.queue_s) if answered else None,
            "embed_ms": _ms(answered.embed_s) if answered else None,
            "search_ms": _ms(answered.search_s) if answered else None,
            "total_ms": _ms(seconds),
        }
        if self._replica is not None:
            line["replica"] = self._replica
        if detail:
            line["detail"] = hidden(detail)
        if self._queries:
            line["texts"] = list(queries)
        print(safe_json(json.dumps(line)), file=self._stream or sys.stderr, flush=True)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
