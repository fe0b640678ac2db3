"""What each process of a run on verl registers with verl, and the trainer's check that all of them have.

`entry.py` calls `register` in every process of a run. verl swallows the errors of its plugins: so the trainer
asks each worker before the first step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from itertools import chain
from typing import Any

from srl.errors import UserError
from srl.safe import handle_logs
from srl.train.verl.job import LOOP, device_support

PATIENCE_S = 300.0
"""Longest wait for a worker's answer, in seconds: it may still be loading a model."""

_outcome: Exception | str = "srl was not registered with verl"
"""What registering has raised, or why it has not been done; empty where all is well."""


def register() -> None:
    """Register with verl, once per process: agent loop, rollout, patches, and what a CPU needs."""
    global _outcome
    if isinstance(_outcome, str) and _outcome:
        handle_logs()
        try:
            _register(on_cpu=os.environ.get("VERL_PLATFORM") == "cpu")
            _outcome = ""
        except Exception as error:  # verl would swallow it
            _outcome = error
            logging.getLogger(__name__).exception("this process cannot register with verl")


def _register(on_cpu: bool) -> None:
    if support := device_support(on_cpu):
        support.install()

    from srl.train.verl import patches

    patches.apply(on_cpu)

    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.workers.rollout import base

    _agent_loop_registry[LOOP] = {"_target_": "srl.train.verl.agent_loop.SearchLoop"}
    base._ROLLOUT_REGISTRY["vllm", "async"] = "srl.train.verl.vllm_delivery.CheckedAdapter"


def outcome(actor: object = None) -> Exception | str:
    """Why this process has not registered; empty where it has. `actor` is what Ray passes."""
    return _outcome


def check_registered(workers: Iterable[Any]) -> None:
    """Raises UserError naming a worker that has not registered, as where it has another version of verl."""
    import ray

    from srl.train.verl.failures import reason

    requests = [(worker, worker.__ray_call__.remote(outcome)) for worker in workers]
    answers = ((worker, ray.get(answer, timeout=PATIENCE_S)) for worker, answer in requests)
    for who, why in chain([("the trainer", outcome())], answers):
        if why:
            why = reason(why) if isinstance(why, Exception) else why
            raise UserError(f"{who} has not registered with verl: {why}")
