"""A value in verl's configuration with the key of ours that it came from, and words both sides share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from srl.config import Config
from srl.train.verl.job import Job

Row = tuple[str, Any, str]
"""verl's dotted key, its value, and our key (empty where the value is fixed)."""
Rows = Iterator[Row]

ACTOR, REF, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of verl's configuration; `ours` is the key it came from, empty where it is fixed."""

    value: Any
    ours: str = ""


def precision(config: Config, job: Job) -> Precision:
    """What the forward and backward pass compute in; the weights that train are float32 in any case."""
    if config.model.dtype == "auto":
        return "float32" if job.cpu else "bfloat16"
    return config.model.dtype


def is_megatron(config: Config) -> bool:
    return config.cluster.strategy == "megatron"


def rollout_name(config: Config, job: Job) -> str:
    """verl's name of what generates."""
    chosen = config.cluster.rollout
    if chosen == "auto":
        chosen = "torch" if job.cpu else "vllm"
    return "srl_torch" if chosen == "torch" else chosen


def longest(config: Config) -> int:
    """Tokens of the longest episode that may be."""
    return config.data.max_prompt_length + config.data.max_response_length


def at_least_one_episode(asked: int, config: Config) -> int:
    """Tokens of a pass on one GPU: verl ends a run whose limit is less than an episode that comes."""
    return max(asked, longest(config))


def model_sizes(path: str | None) -> dict[str, Any]:
    """The model's `config.json`, empty where it is not on this machine."""
    file = Path(path or "") / "config.json"
    return dict(json.loads(file.read_text())) if file.is_file() else {}


def everywhere(path: str | Path) -> str:
    """`path` as every process of a run finds it, whatever its working directory; a mere name stays one."""
    return str(Path(path).absolute()) if Path(path).exists() or isinstance(path, Path) else path
