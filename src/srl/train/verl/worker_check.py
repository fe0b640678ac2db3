"""The processes of a run on verl, asked before its first step whether they are as they have to be."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from srl.config import load_saved
from srl.errors import UserError
from srl.serve.client import check_servers
from srl.train.resume import resume_with
from srl.train.verl.job import ABOUT, RUN_VARIABLE
from srl.train.verl.register import check_reports, report

PATIENCE_S = 300.0
"""Seconds that a worker may take to answer: it may still be loading a model."""


def check_alike(workers: Mapping[str, Any]) -> None:
    """Raises UserError naming a worker that reports nothing, or something else than this process."""
    asked = {name: worker.__ray_call__.remote(report) for name, worker in workers.items()}
    expected = report()
    assert expected is not None, "the trainer's own process registers before it trains"
    check_reports({name: _got(answer) for name, answer in asked.items()}, expected)


def check_search(run: Path, workers: Sequence[Any]) -> None:
    """Raises UserError naming a search server that some machine does not reach: a URL may mean its own."""
    config = load_saved(run)
    if not config.rollout.search or config.search.url is None:
        return
    asked = [worker.__ray_call__.remote(search_problems) for worker in workers]
    for found in map(_got, asked):
        problems = found if isinstance(found, list) else [found]
        if problems:
            raise UserError(f"{problems[0]}; {resume_with(run)}")


def search_problems(actor: object = None) -> list[str]:
    """What is wrong with the servers of `search.url` as this machine sees them, a line each.

    They must have the index that the run began with. `actor` is whom Ray calls it on.
    """
    run = Path(os.environ[RUN_VARIABLE])
    search = load_saved(run).search
    digest = json.loads((run / ABOUT).read_text(encoding="utf-8")).get("index_digest") or search.digest or ""
    return check_servers(search.url or (), digest=digest, topk=search.topk, timeout_s=search.timeout_s)


def _got(answer: Any) -> Any:
    """What was answered, or the error that came instead."""
    try:
        return ray.get(answer, timeout=PATIENCE_S)
    except Exception as error:
        return error
