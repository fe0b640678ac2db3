"""The check of a run's workers before its first step: same packages and patches, search servers in reach.

What can be checked before any process is started is in `config_check.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from srl.config import load_saved
from srl.errors import UserError
from srl.serve.client import check_servers
from srl.train.resume import resume_with
from srl.train.verl.job import ABOUT
from srl.train.verl.registration import WorkerReport, report

PATIENCE_S = 300.0
"""Longest wait for a worker's answer, in seconds: it may still be loading a model."""


def check_alike(workers: Mapping[str, Any]) -> None:
    """Raises UserError naming a worker whose packages, algorithms or patches differ from this process's."""
    asked = {name: worker.__ray_call__.remote(report) for name, worker in workers.items()}
    expected = report()
    assert expected is not None, "the trainer's process registers before it trains"
    check_reports({name: _got(answer) for name, answer in asked.items()}, expected)


def check_reports(reports: Mapping[str, WorkerReport | BaseException | None], expected: WorkerReport) -> None:
    """Raises UserError naming the first worker whose report is missing or differs from the trainer's."""
    for name, found in reports.items():
        if isinstance(found, BaseException):
            raise UserError(
                f"worker {name} does not answer: {_last_line(found)}; is srl-search installed there?"
            )
        if found is None:
            raise UserError(f"worker {name} has not loaded srl's plugin; is srl-search installed there?")
        if different := difference(found, expected):
            where = f"worker {name} on {found.host}"
            raise UserError(f"{where} differs from the trainer on {expected.host}: {different}")


def difference(found: WorkerReport, expected: WorkerReport) -> str:
    """The first difference of a worker's report from the trainer's, in words; empty if there is none."""
    if found.error:
        return f"it failed to register: {found.error}"
    mine, theirs = asdict(found), asdict(expected)
    for what in ("versions", "algorithms"):
        for name in sorted({*mine[what], *theirs[what]}):
            here, there = mine[what].get(name, "nothing"), theirs[what].get(name, "nothing")
            if here != there:
                return f"it has {name} {here}, the trainer {there}"
    if found.python != expected.python:
        return f"it runs Python {found.python}, the trainer {expected.python}"
    if found.patches != expected.patches:
        return f"it has the patches {found.patches}, the trainer {expected.patches}"
    return ""


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def check_search(run: Path, workers: Sequence[Any]) -> None:
    """Raises UserError naming a search server that a machine cannot reach: 127.0.0.1 differs on each."""
    config = load_saved(run)
    if not config.rollout.search or config.search.url is None or config.search.replays:
        return
    asked = [worker.__ray_call__.remote(search_problems, run) for worker in workers]
    for found in map(_got, asked):
        problems = found if isinstance(found, list) else [found]
        if problems:
            raise UserError(f"{problems[0]}; {resume_with(run)}")


def search_problems(actor: object, run: Path) -> list[str]:
    """What is wrong with the servers of `search.url`, seen from this machine, one line each.

    They must have the index that the run started with. `actor` is what Ray passes.
    """
    search = load_saved(run).search
    digest = json.loads((run / ABOUT).read_text(encoding="utf-8")).get("index_digest") or search.digest or ""
    return check_servers(search.url or (), digest=digest, topk=search.topk, timeout_s=search.timeout_s)


def _got(answer: Any) -> Any:
    """The answer, or the error in its place."""
    import ray

    try:
        return ray.get(answer, timeout=PATIENCE_S)
    except Exception as error:
        return error
