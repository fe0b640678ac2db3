"""Why a query has no hits, said by the retriever or learned from what it raises."""

from __future__ import annotations

from typing import Literal

from srl.safe_text import safe_message

FaultStatus = Literal["timed_out", "refused", "failed", "rejected"]


class Fault(Exception):  # noqa: N818  # not an error of the program: an outcome
    """A query that a retriever could not answer; the statuses are those of `srl.trajectory.Search`.

    `rejected` is the query's own fault, the rest the infrastructure's. `retry_after_s` is when another
    try may help, where that is known. The message is made safe to show.
    """

    def __init__(self, status: FaultStatus, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(safe_message(message))
        self.status = status
        self.retry_after_s = retry_after_s


def as_fault(error: Exception) -> Fault:
    """What a retriever raised, as an outcome."""
    if isinstance(error, Fault):
        return error
    fault = Fault("failed", f"{type(error).__name__}: {error}".partition("\n")[0])
    fault.__cause__ = error
    return fault
