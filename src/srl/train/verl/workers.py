"""What each process of a run on verl registers with verl, and the trainer's check that all of them have.

`entry.py` calls `register` in every process of a run. verl swallows the errors of its plugins, and another
machine may have other packages installed: so the trainer asks each worker before the first step.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from srl.errors import UserError
from srl.safe import handle_logs
from srl.train.verl.job import LOOP, device_support

PACKAGES = ("srl-search", "verl", "torch", "transformers", "ray")
"""Packages that must have the same version in every process."""
PATIENCE_S = 300.0
"""Longest wait for a worker's answer, in seconds: it may still be loading a model."""

_outcome: dict[str, str] | Exception | None = None


def register() -> None:
    """Register with verl, once per process: agent loop, rollout, patches, losses, and what a CPU needs."""
    global _outcome
    if _outcome is None:
        handle_logs()
        try:
            _register(on_cpu=os.environ.get("VERL_PLATFORM") == "cpu")
            _outcome = {name: version(name) for name in PACKAGES}
        except Exception as error:  # verl would swallow it
            _outcome = error
            logging.getLogger(__name__).exception("this process cannot register with verl")


def _register(on_cpu: bool) -> None:
    if support := device_support(on_cpu):
        support.install()

    from srl.train.verl import losses, patches

    patches.apply(on_cpu)
    losses.register_ours()

    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.workers.rollout import base

    _agent_loop_registry[LOOP] = {"_target_": "srl.train.verl.agent_loop.SearchLoop"}
    base._ROLLOUT_REGISTRY["vllm", "async"] = "srl.train.verl.vllm_delivery.CheckedAdapter"


def packages(actor: object = None) -> dict[str, str]:
    """This process's versions of `PACKAGES`; raises what its registering raised. `actor` is what Ray
    passes."""
    if isinstance(_outcome, Exception):
        raise _outcome
    return _outcome or {}


def check_registered(workers: Iterable[Any]) -> None:
    """Raises UserError naming a worker that could not register, or has other packages than this process."""
    import ray

    from srl.train.verl.failures import reason

    who: object = "this process"
    try:
        ours = packages()
        requests = [(worker, worker.__ray_call__.remote(packages)) for worker in workers]
        answers = [(who := worker, ray.get(answer, timeout=PATIENCE_S)) for worker, answer in requests]
    except Exception as error:
        raise UserError(f"{who} has not registered with verl: {reason(error)}") from error
    for worker, theirs in answers:
        if theirs != ours:
            raise UserError(f"{worker} has {theirs}, and the trainer has {ours}")
