"""The settings of a server process: which indexes it serves, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from srl.index import Index, open_index
from srl.serve.server.app import CACHE_BYTES, SearchApp, create_app
from srl.serve.server.request_log import RequestLog
from srl.serve.wire import Limits

if TYPE_CHECKING:
    from srl.serve.server.peers import Peers


@dataclass(frozen=True, slots=True)
class IndexSource:
    """An index on disk, and the options of its retriever for this machine."""

    directory: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Indexes by name, and the arguments of `create_app`; `log_requests` turns the request log on."""

    indexes: Mapping[str, IndexSource]
    topk: int = 3
    limits: Limits = field(default_factory=Limits)
    threads: int | None = None
    max_batch: int = 256
    batch_wait_s: float = 0.0
    cache_bytes: int = CACHE_BYTES
    token: str = field(default="", repr=False)
    hosts: tuple[str, ...] | None = None
    log_requests: bool = False
    log_queries: bool = False

    def open(self, name: str) -> Index:
        """Raises UserError."""
        return open_index(self.indexes[name].directory, self.indexes[name].options)

    def app(self, opened: Mapping[str, Index], peers: Peers | None = None) -> SearchApp:
        """The server of these indexes; with `peers`, one of several."""
        replica = peers.number if peers else None
        wanted = self.log_requests or self.log_queries
        return create_app(
            opened,
            self.topk,
            self.limits,
            threads=self.threads,
            max_batch=self.max_batch,
            batch_wait_s=self.batch_wait_s,
            cache_bytes=self.cache_bytes,
            token=self.token,
            hosts=self.hosts,
            log=RequestLog(queries=self.log_queries, replica=replica) if wanted else None,
            peers=peers,
        )

    def as_json(self) -> dict[str, Any]:
        """For another process; the inverse of `read`."""
        return asdict(self)

    @classmethod
    def read(cls, known: Mapping[str, Any]) -> ServerSettings:
        indexes = {name: IndexSource(**source) for name, source in known["indexes"].items()}
        hosts = None if known["hosts"] is None else tuple(known["hosts"])
        return cls(**{**known, "indexes": indexes, "limits": Limits(**known["limits"]), "hosts": hosts})


def facts_of(index: Index) -> dict[str, Any]:
    """What is reported about an index that is served."""
    return {
        "passages": len(index),
        "live": index.live,
        "retriever": index.manifest.retriever,
        "digest": index.digest,
    }
