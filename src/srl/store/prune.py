"""Pruning: the trajectories of some steps go, with segments, searches and rescores; their metrics stay."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from srl.errors import UserError, parsing
from srl.store import run_info
from srl.store.beside import drop_rescores
from srl.store.drop import Steps, prune_steps
from srl.store.lock import LogLock
from srl.store.parts import PARTS_DIRECTORY, damaged_parts
from srl.store.reader import reading
from srl.store.records import rows
from srl.workspace import EVALUATION

_QUERY = """
SELECT phase, step, count(*) AS trajectories FROM raw.trajectories GROUP BY ALL ORDER BY phase, step
"""


def plan(
    log: Path, steps: tuple[int, int] | None = None, phase: str | None = None, keep_every: int | None = None
) -> list[dict[str, Any]]:
    """The `phase`, `step` and number of `trajectories` of each step that meets every condition given.

    `steps` are the first and the last. With `keep_every` n, the steps that n divides stay, and the last of
    each phase. Evaluations stay, as their scores are computed from their trajectories: raises UserError where
    they are the `phase`.
    """
    if phase == EVALUATION:
        raise UserError("the scores of an evaluation are computed from its trajectories, so none are pruned")
    logged = reading([log], lambda connection: rows(connection, _QUERY))
    last = {row["phase"]: row["step"] for row in logged}

    def goes(step: int, of: str) -> bool:
        return (
            of != EVALUATION
            and phase in (None, of)
            and (steps is None or steps[0] <= step <= steps[1])
            and (keep_every is None or (step % keep_every != 0 and step != last[of]))
        )

    return [row for row in logged if goes(row["step"], row["phase"])]


def prune(log: Path, pruned: Steps) -> None:
    """Remove the trajectories of these steps from `log`, part by part; repeated, a killed prune is completed.

    Raises UserError for a log that is being written, or has damaged parts.
    """
    with LogLock(log):
        status = run_info.status(run_info.load(log))
        if status in (run_info.RUNNING, "unknown"):
            raise UserError(f"{log} may be being written: its run is {status}")
        for fault in damaged_parts(log / PARTS_DIRECTORY).values():
            raise UserError(fault, hint="remove that part, or restore it, and repeat the command")
        drop_rescores(log, lambda step, phase, _: (step, phase) in pruned)
        with parsing(log):
            prune_steps(log / PARTS_DIRECTORY, pruned)


def summed(planned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each phase how many steps, from which to which, and their trajectories."""
    by_phase = {phase: list(of) for phase, of in groupby(planned, key=lambda row: row["phase"])}
    return [
        {
            "phase": phase,
            "steps": len(steps),
            "first": steps[0]["step"],
            "last": steps[-1]["step"],
            "trajectories": sum(row["trajectories"] for row in steps),
        }
        for phase, steps in by_phase.items()
    ]
