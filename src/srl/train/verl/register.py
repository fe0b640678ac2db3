"""What one process of a run tells verl, and what it reports of itself.

verl swallows the errors of its plugins, and a worker on another machine may have other packages: so each
process keeps a report, the trainer asks all of them for it, and one that is missing or different ends the
run before it begins.
"""

from __future__ import annotations

import logging
import os
import platform as machine
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from srl.config import Config, load_saved
from srl.errors import UserError
from srl.plugins import manager
from srl.safe_log import handle_logs
from srl.safe_text import quoted
from srl.train.verl.job import RUN_VARIABLE

_log = logging.getLogger(__name__)

PREFIX = "srl_"
"""Before the name of an algorithm in verl's configuration."""
LOOP = "srl_search"
"""The name of our agent loop in verl's registry."""
PACKAGES = ("srl-search", "verl", "torch", "transformers", "ray", "tensordict", "TransferQueue")
"""The packages whose versions must be the same in every process."""


@dataclass(slots=True)
class Report:
    """One process: where it is, what is installed there and what was registered; `error` if that failed."""

    host: str
    pid: int
    python: str
    versions: dict[str, str]
    algorithms: dict[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()
    error: str = ""

    def difference(self, expected: Report) -> str:
        """What is not as in `expected`, in words; empty where nothing is."""
        if self.error:
            return f"it failed to register: {self.error}"
        mine, theirs = asdict(self), asdict(expected)
        for what in ("versions", "algorithms"):
            for name in sorted({*mine[what], *theirs[what]}):
                here, there = mine[what].get(name, "nothing"), theirs[what].get(name, "nothing")
                if here != there:
                    return f"it has {name} {here}, and the trainer {there}"
        if self.python != expected.python:
            return f"it runs Python {self.python}, and the trainer {expected.python}"
        if self.patches != expected.patches:
            return f"it patched {self.patches}, and the trainer {expected.patches}"
        return ""


_report: Report | None = None


def register() -> None:
    """Register the agent loop and patches and, without a GPU, platform and replica; once a process."""
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


def report(actor: object = None) -> Report | None:
    """This process's report, None where nothing was registered; `actor` is whom Ray calls it on."""
    return _report


def on_cpu() -> bool:
    """Whether this run has no accelerator: the launcher says so in the environment."""
    return os.environ.get("VERL_PLATFORM") == "cpu"


def _new_report() -> Report:
    versions = {name: _version(name) for name in PACKAGES}
    return Report(socket.gethostname(), os.getpid(), machine.python_version(), versions)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "nothing"


def _register(report: Report) -> None:
    from srl.train.verl import patches
    from srl.train.verl.without_gpu import vllm_cpu

    config = load_saved(Path(os.environ[RUN_VARIABLE]))
    if on_cpu():
        vllm_cpu.package_is_found_as_vllm()
        from srl.train.verl import torch_install
        from srl.train.verl.without_gpu import platform

        platform.install()
        torch_install.install()
    report.patches = tuple(patches.apply(on_cpu()))
    report.algorithms = _algorithm_versions(config)
    _register_loop()


def _algorithm_versions(config: Config) -> dict[str, str]:
    """The package and version of the run's algorithm and of every installed one, as `srl_<name>`.

    Raises UserError where one of them cannot be loaded.
    """
    found: dict[str, str] = {}
    chosen = config.algorithm.name
    others = [entry for entry in manager.installed("algorithm") if entry.name != chosen and not entry.error]
    for entry in [manager.find("algorithm", chosen), *others]:
        manager.load("algorithm", entry.name, config.algorithm.options(entry.name))
        found[f"{PREFIX}{entry.name}"] = f"{entry.package} {entry.version}"
    return found


def _register_loop() -> None:
    """Name our agent loop; it is imported where the first episode runs, and only there."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    _agent_loop_registry[LOOP] = {"_target_": "srl.train.verl.agent_loop.SearchLoop"}


def check_reports(reports: Mapping[str, Report | BaseException | None], expected: Report) -> None:
    """Raises UserError naming the first worker whose report is missing, or not as the trainer's own."""
    for name, found in reports.items():
        if isinstance(found, BaseException):
            raise UserError(
                f"the worker {name} does not report: {_line(found)}; is srl-search installed there?"
            )
        if found is None:
            raise UserError(f"the worker {name} has not loaded srl's plugin; is srl-search installed there?")
        if different := found.difference(expected):
            where = f"the worker {name} on {found.host}"
            raise UserError(f"{where} is not as the trainer on {expected.host}: {different}")


def _line(error: BaseException) -> str:
    lines: Sequence[str] = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
