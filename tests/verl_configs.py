"""Configurations and jobs for the tests of the translation to verl."""

from pathlib import Path
from typing import Any

import yaml

from srl.config import Config
from srl.train.verl.job import Job

BASE = Path(__file__).parent.parent / "src" / "srl" / "presets" / "base"
SMALL = (f"model.path={BASE}", "data.max_prompt_length=256", "data.max_response_length=512")
"""The base model that comes along, and episodes that it can read."""


def made(*settings: str) -> Config:
    """The defaults with `section.key=value` (the value in YAML) on top, the base model first."""
    tree: dict[str, Any] = {}
    for setting in (*SMALL, *settings):
        key, _, value = setting.partition("=")
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = yaml.safe_load(value)
    return Config.model_validate(tree)


def job(cpu: bool = True, gpus: int = 2, resume: bool = False, run: Path = Path("/runs/one")) -> Job:
    return Job(run, resume=resume, cpu=cpu, gpus_per_node=gpus)


GPU = job(cpu=False, gpus=8)
