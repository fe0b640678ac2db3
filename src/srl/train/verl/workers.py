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
from dataclasses import dataclass
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


@dataclass(slots=True)
class Report:
    """What a process has installed and registered: a version by name; `error` if registering failed."""

    host: str
    has: dict[str, str]
    error: str = ""


_report: Report | None = None


def report(actor: object = None) -> Report | None:
    """This process's report; None if nothing was registered. `actor` is what Ray passes."""
    return _report


def register() -> None:
    """Register with verl, once per process: agent loop, patches, and what a CPU needs."""
    global _report
    if _report is not None:
        return
    handle_logs()
    _report = Report(socket.gethostname(), {"Python": platform.python_version()})
    _report.has |= {name: _version(name) for name in PACKAGES}
    try:
        _report.has |= _registered()
    except Exception as error:  # verl would swallow it
        _report.error = quoted(f"{type(error).__name__}: {error}")
        logging.getLogger(__name__).exception("this process cannot register with verl")


def _registered() -> dict[str, str]:
    """Register with verl; the patches that were applied, and the package and version of each algorithm."""
    run, on_cpu = this_run(), os.environ.get("VERL_PLATFORM") == "cpu"
    if support := device_support(on_cpu):
        support.install()

    from srl.train.verl import patches

    has = {"patches": ", ".join(patches.apply(on_cpu))}
    chosen = run.config.algorithm.name
    others = [entry for entry in manager.installed("algorithm") if entry.name != chosen and not entry.error]
    for entry in [manager.find("algorithm", chosen), *others]:
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

    mine = report()
    assert mine is not None, "the trainer's process registers before it trains"
    for worker, answer in [(worker, worker.__ray_call__.remote(report)) for worker in workers]:
        try:
            theirs = ray.get(answer, timeout=PATIENCE_S)
        except Exception as error:
            theirs = Report("a machine that does not answer", {}, first_line(error))
        if different := difference(theirs, mine):
            where = f" on {theirs.host}" if theirs else ""
            raise UserError(f"{worker}{where} differs from the trainer on {mine.host}: {different}")


def difference(theirs: Report | None, mine: Report) -> str:
    """The first difference of a worker's report from the trainer's, in words; empty if there is none."""
    if theirs is None:
        return "it has not loaded srl's plugin; is srl-search installed there?"
    if theirs.error:
        return theirs.error
    for name in {**mine.has, **theirs.has}:
        there, here = (report.has.get(name, "nothing") for report in (theirs, mine))
        if there != here:
            return f"it has {name} {there}, the trainer {here}"
    return ""


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
