"""What every process of a run on verl knows besides its configuration: directory, devices, model."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from srl.config import Config

RUN_VARIABLE = "SRL_VERL_RUN"
"""The environment variable that names the run's directory; without it the plugin does nothing."""
ABOUT = "about.json"
"""In the run's directory: how the model was prompted, for its checkpoints."""
WORKERS_WITHOUT_GPU = 2
"""Default number of workers on a machine without a GPU."""
TORCH = "srl_torch"
"""The name of our own rollout replica in verl's registry."""
LOOP = "srl_search"
"""The name of our agent loop there."""
WITHOUT_GPU = "srl.train.verl.without_gpu"

Settings = dict[str, Any]
"""Values of verl's configuration by verl's dotted key."""


@dataclass(frozen=True, slots=True)
class Job:
    """Where a run is stored and what it runs on; `cpu` is true where there is no GPU."""

    run: Path
    resume: bool = False
    cpu: bool = False
    gpus_per_node: int = 1

    @property
    def tokenizer(self) -> Path:
        """A directory with the tokenizer alone: next to a `config.json`, some programs load another class."""
        return self.run / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"


def this_run() -> Path:
    """The directory of the run that this process belongs to, by the environment that the launcher has set."""
    return Path(os.environ[RUN_VARIABLE])


@cache
def this_config() -> Config:
    """The configuration of this process's run, which is read here alone, and once."""
    from srl.config import load_saved

    return load_saved(this_run())


def device_support(cpu: bool) -> Any:
    """The module `without_gpu` where `cpu` is true, else None. It is loaded by name: nothing imports it."""
    return import_module(WITHOUT_GPU) if cpu else None


def precision(config: Config, job: Job) -> str:
    """The dtype of forward and backward passes. The trained weights are float32 in any case."""
    if config.model.dtype == "auto":
        return "float32" if job.cpu else "bfloat16"
    return config.model.dtype


def rollout_name(config: Config, job: Job) -> str:
    """The name that verl registers the run's rollout engine under."""
    name = config.cluster.rollout
    if name == "auto":
        name = "torch" if job.cpu else "vllm"
    return TORCH if name == "torch" else name


def model_config(path: str | None) -> dict[str, Any]:
    """The model's `config.json`; empty if it is not on this machine."""
    file = Path(path or "") / "config.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def absolute(path: str | Path) -> str:
    """`path` independent of the working directory; the name of a model on a hub stays as it is."""
    return str(Path(path).absolute()) if Path(path).exists() or isinstance(path, Path) else path
