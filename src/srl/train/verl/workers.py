"""The processes of a run on verl: each registers with verl, the trainer compares them and watches over them.

`entry.py` calls `register` in every process of a run. verl swallows the errors of its plugins, and another
machine may have other packages installed: so each process keeps a report, which the trainer compares with its
own before the first step.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from srl.errors import UserError, first_line
from srl.plugins import manager
from srl.safe import handle_logs, quoted
from srl.train.verl.job import device_support, this_run

LOOP = "srl_search"
"""The name of our agent loop in verl's registry."""
PACKAGES = ("srl-search", "verl", "torch", "transformers", "ray", "tensordict", "TransferQueue")
"""Packages that must have the same version in every process."""
PATIENCE_S = 300.0
"""Longest wait for a worker's report, in seconds: it may still be loading a model."""
POLL_S = 1.0
"""Seconds between two looks at which processes are alive."""


Report = dict[str, str]
"""What a process has installed and registered: versions by name, its `host`, an `error` of registering."""
_report: Report = {}


def report(actor: object = None) -> Report:
    """This process's report; empty if nothing was registered. `actor` is what Ray passes."""
    return _report


def register() -> None:
    """Register with verl, once per process: agent loop, patches, and what a CPU needs."""
    global _report
    if _report:
        return
    handle_logs()
    _report = {"host": socket.gethostname(), "Python": platform.python_version()}
    _report |= {name: _version(name) for name in PACKAGES}
    try:
        _report |= _registered()
    except Exception as error:  # verl would swallow it
        _report["error"] = quoted(f"{type(error).__name__}: {error}")
        logging.getLogger(__name__).exception("this process cannot register with verl")


def _registered() -> dict[str, str]:
    """Register with verl; the patches that were applied, and the package and version of each algorithm."""
    run, on_cpu = this_run(), os.environ.get("VERL_PLATFORM") == "cpu"
    if support := device_support(on_cpu):
        support.install()

    from srl.train.verl import patches

    has = {"patches": ", ".join(patches.apply(on_cpu))}
    algorithm = run.config.algorithm.name
    other_entries = [
        entry for entry in manager.installed("algorithm") if entry.name != algorithm and not entry.error
    ]
    for entry in [manager.find("algorithm", algorithm), *other_entries]:
        manager.load("algorithm", entry.name, run.config.algorithm.options(entry.name))
        has[f"algorithm {entry.name}"] = f"{entry.package} {entry.version}"

    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.workers.rollout import base

    _agent_loop_registry[LOOP] = {"_target_": "srl.train.verl.agent_loop.SearchLoop"}
    base._ROLLOUT_REGISTRY["vllm", "async"] = "srl.train.verl.vllm_delivery.CheckedAdapter"
    return has


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "nothing"


def check_alike(workers: Sequence[Any]) -> None:
    """Raises UserError naming a worker whose packages, algorithms or patches differ from this process's."""
    import ray

    trainer = report()
    for worker, answer in [(worker, worker.__ray_call__.remote(report)) for worker in workers]:
        try:
            worker_report = ray.get(answer, timeout=PATIENCE_S)
        except Exception as error:
            worker_report = {"host": "a machine that does not answer", "error": first_line(error)}
        if different := difference(worker_report, trainer):
            where = worker_report.get("host", "a machine without srl's plugin")
            raise UserError(f"{worker} on {where} differs from the trainer on {trainer['host']}: {different}")


def difference(worker: Report, trainer: Report) -> str:
    """What a worker has that the trainer has not, or otherwise; empty where they are alike."""
    if "error" in worker:
        return worker["error"]
    differing = [
        name for name in {**trainer, **worker} if name != "host" and worker.get(name) != trainer.get(name)
    ]
    return ", ".join(f"{name} {worker.get(name, 'missing')}, not {trainer.get(name)}" for name in differing)


class Health:
    """Which of `actors` has died: each has one ping under way, which a busy one answers late, and Ray answers
    for a dead one. `check` never waits."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.pings = {actor.__ray_ready__.remote(): actor for actor in actors}
        self.next = 0.0

    def check(self) -> None:
        """Raises Ray's ActorDiedError of a dead one. Looks once every `POLL_S` seconds."""
        import ray
        from ray.exceptions import ActorDiedError, RayError

        if not self.pings or time.monotonic() < self.next:
            return
        self.next = time.monotonic() + POLL_S
        for ping in ray.wait(list(self.pings), num_returns=len(self.pings), timeout=0)[0]:
            actor = self.pings.pop(ping)
            try:
                ray.get(ping)
            except ActorDiedError:
                raise
            except RayError:  # not reachable for the moment
                pass
            self.pings[actor.__ray_ready__.remote()] = actor
