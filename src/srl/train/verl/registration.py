"""Registration with verl: our agent loop, patches and, without a GPU, platform and rollout.

`entry.py` calls `register` in every process of a run. verl swallows the errors of its plugins, and a worker
on another machine may have other packages installed: so each process keeps a report of what it registered,
which the trainer compares with its own before the first step (`worker_check.py`).
"""

from __future__ import annotations

import logging
import os
import platform as machine
import socket
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from srl.config import Config, load_saved
from srl.plugins import manager
from srl.safe import handle_logs, quoted
from srl.train.verl.job import RUN_VARIABLE, device_support

_log = logging.getLogger(__name__)

PREFIX = "srl_"
"""Prefix of an algorithm's name in verl's configuration."""
LOOP = "srl_search"
"""The name of our agent loop in verl's registry."""
PACKAGES = ("srl-search", "verl", "torch", "transformers", "ray", "tensordict", "TransferQueue")
"""Packages that must have the same version in every process."""


@dataclass(slots=True)
class WorkerReport:
    """One process of a run: where it is, what is installed, what was registered; `error` if that failed."""

    host: str
    pid: int
    python: str
    versions: dict[str, str]
    algorithms: dict[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    error: str = ""


_report: WorkerReport | None = None


def register() -> None:
    """Register with verl, once per process. An error is kept in the report, for the trainer to find."""
    global _report
    if _report is not None:
        return
    handle_logs()
    _report = _new_report()
    try:
        _register(_report)
    except Exception as error:
        _report.error = quoted(f"{type(error).__name__}: {error}")
        _log.exception("this process cannot register with verl")


def report(actor: object = None) -> WorkerReport | None:
    """This process's report; None if nothing was registered. `actor` is what Ray passes."""
    return _report


def on_cpu() -> bool:
    """Whether the run has no GPU, by the environment that the launcher has set."""
    return os.environ.get("VERL_PLATFORM") == "cpu"


def _new_report() -> WorkerReport:
    versions = {name: _version(name) for name in PACKAGES}
    return WorkerReport(socket.gethostname(), os.getpid(), machine.python_version(), versions)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "nothing"


def _register(report: WorkerReport) -> None:
    from srl.train.verl import patches

    run = Path(os.environ[RUN_VARIABLE])
    config = load_saved(run)
    if support := device_support(on_cpu()):
        support.install()
    report.patches = patches.apply(on_cpu())
    report.algorithms = _algorithm_versions(config)
    _register_loop(run)


def _algorithm_versions(config: Config) -> dict[str, str]:
    """The package and version of the run's algorithm and of every installed one, as `srl_<name>`.

    Raises UserError if one of them cannot be loaded.
    """
    found: dict[str, str] = {}
    chosen = config.algorithm.name
    others = [entry for entry in manager.installed("algorithm") if entry.name != chosen and not entry.error]
    for entry in [manager.find("algorithm", chosen), *others]:
        manager.load("algorithm", entry.name, config.algorithm.options(entry.name))
        found[f"{PREFIX}{entry.name}"] = f"{entry.package} {entry.version}"
    return found


def _register_loop(run: Path) -> None:
    """Register our agent loop by its class path, with the run it is for; the first episode imports it. And
    the adapter that checks what vLLM holds."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY["vllm", "async"] = "srl.train.verl.vllm_delivery.CheckedAdapter"
    _agent_loop_registry[LOOP] = {"_target_": "srl.train.verl.agent_loop.SearchLoop", "run": str(run)}
