"""What a retriever is: what is asked of one, and what is assumed of one that does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Literal, Protocol

from srl.index.passages import PassageStore
from srl.plugins import manager
from srl.safe import safe_message
from srl.trajectory import Hit, Passage

FaultStatus = Literal["timed_out", "refused", "failed", "rejected"]

Report = Callable[[int], None]
"""Told how many passages are done so far."""


class Fault(Exception):  # noqa: N818  # not an error of the program: an outcome
    """A query that a retriever could not answer; the statuses are those of `srl.trajectory.Search`.

    `rejected` is the query's own fault, the rest the infrastructure's. `retry_after_s` is when another
    try may help, where that is known. The message is made safe to show.
    """

    def __init__(self, status: FaultStatus, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(safe_message(message))
        self.status = status
        self.retry_after_s = retry_after_s


class Retriever(Protocol):
    """What every retriever does: build an index, open it, search it. Optional members: `RetrieverBase`."""

    name: str
    """The folder of an index in which the retriever keeps its files."""

    def build(self, passages: Iterable[Passage], directory: Path, progress: Report, /) -> None:
        """Write the index of `passages` into `directory`; tell `progress` how many are done so far."""

    def open(self, directory: Path, /) -> Retriever | None:
        """Read what `build` wrote. Returns what searches from then on; None for this same object."""

    def search(self, queries: list[str], k: int, /) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first; called from several threads at a time."""


class RetrieverBase:
    """All members of a retriever, with the defaults of the optional ones.

    A plugin's class may inherit from this one or have `build`, `open` and `search` by itself, and any of
    the others beside them.
    """

    live: bool = False
    """It searches something outside and takes no corpus: `build` gets None for the passages, and may be
    missing. It is opened on no directory, or on that of an index without passages."""
    parallel: bool = False
    """It searches as fast in two threads as in one, each on a core of its own."""
    resumable: bool = False
    """A `build` that was killed goes on, in the same directory, where it was."""

    def build(self, passages: Iterable[Passage], directory: Path, progress: Report) -> None:
        """Write the index of `passages` into `directory`."""
        raise NotImplementedError(f"{type(self).__name__} builds no index")

    def open(self, directory: Path | None) -> RetrieverBase | None:
        """Make ready for search what `build` wrote into `directory`; None for a live retriever without index.

        What this returns is what searches, and what is asked everything else from there on. None stands
        for the retriever itself. Raises OSError, ValueError, EOFError or KeyError for damaged files.
        """
        return self

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the corpus.

        Called from several threads at a time. May raise anything, best a `Fault`. Of a retriever that has
        `outcomes` instead, these are their hits, or the first Fault is raised.
        """
        if self.outcomes == MethodType(RetrieverBase.outcomes, self):
            raise NotImplementedError(f"{type(self).__name__} has no search")
        hits = []
        for outcome in self.outcomes(queries, k):
            if isinstance(outcome, Fault):
                raise outcome
            hits.append(outcome)
        return hits

    def outcomes(self, queries: list[str], k: int) -> Sequence[list[Hit] | Fault]:
        """For each query its hits or why there are none, for a retriever that can tell them apart."""
        return self.search(queries, k)

    def identity(self) -> Mapping[str, str]:
        """What results depend on besides the options, such as the digest of an encoder's weights.

        Asked before `build`, and again after `open`, where it must be the same.
        """
        return {}

    adopt: Callable[[Path, PassageStore, Path, Report], None] | None = None
    """`adopt(source, store, directory, progress)` makes an index in `directory` of what another program
    built at `source` of the passages in `store`. None: no index of another program can be imported."""
    passages_in: Callable[[Path], Iterator[Passage]] | None = None
    """`passages_in(source)` reads the passages that such an index holds. None: it holds none."""


_MEMBERS = tuple(name for name in vars(RetrieverBase) if not name.startswith("_"))


def as_retriever(plugin: object) -> RetrieverBase:
    """`plugin`; where its class does not inherit from `RetrieverBase`, its members replace the defaults."""
    if isinstance(plugin, RetrieverBase):
        return plugin
    adapter = RetrieverBase()
    for name in _MEMBERS:
        if hasattr(plugin, name):
            setattr(adapter, name, getattr(plugin, name))
    return adapter


def load_retriever(name: str, options: Mapping[str, Any] | None = None) -> RetrieverBase:
    """The installed retriever `name`, made with `options`. Raises UserError if it is not installed."""
    return as_retriever(manager.load("retriever", name, dict(options or {})))


def identity_of(name: str, retriever: RetrieverBase) -> dict[str, str]:
    """What `retriever`, the plugin `name`, says of itself. Raises UserError for what it raises."""
    with manager.named_errors(manager.find("retriever", name)):
        return dict(retriever.identity())


def open_retriever(retriever: RetrieverBase, directory: Path | None) -> RetrieverBase:
    """What searches after `retriever` was opened on `directory`."""
    searcher = retriever.open(directory)
    return retriever if searcher is None else as_retriever(searcher)


def build_live(retriever: RetrieverBase, directory: Path, progress: Report) -> None:
    """Let a live retriever that has a `build` write into `directory` what it keeps; it gets no passages."""
    build: Any = retriever.build
    if build != MethodType(RetrieverBase.build, retriever):
        build(None, directory, progress)


def as_fault(error: Exception) -> Fault:
    """What a retriever raised, as an outcome."""
    if isinstance(error, Fault):
        return error
    fault = Fault("failed", f"{type(error).__name__}: {error}".partition("\n")[0])
    fault.__cause__ = error
    return fault


def outcomes_of(retriever: RetrieverBase, queries: list[str], k: int) -> list[list[Hit] | Fault]:
    """For each query the hits of `retriever`, or why there are none; whatever it raises is one of these.

    Where a call fails the queries are tried one by one, so that only the one at fault pays.
    """
    if not queries:
        return []
    try:
        outcomes = list(retriever.outcomes(queries, k))
        if len(outcomes) != len(queries):
            raise ValueError(f"the retriever gave {len(outcomes)} answers to {len(queries)} queries")
        return outcomes
    except Exception as error:
        if len(queries) > 1:
            return [outcome for query in queries for outcome in outcomes_of(retriever, [query], k)]
        return [as_fault(error)]
