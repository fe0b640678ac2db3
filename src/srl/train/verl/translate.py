"""Our configuration as verl's: verl's own defaults, what our keys say, and the section `verl` on top."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from srl.config import Config
from srl.errors import UserError
from srl.train.verl.decisions import check_supported
from srl.train.verl.job import Job
from srl.train.verl.overrides import lay_on_top
from srl.train.verl.setting import Setting, is_megatron
from srl.train.verl.translate_acting import acting
from srl.train.verl.translate_learning import learning
from srl.train.verl.translate_machines import machines

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["Setting", "compose", "defaults", "settings"]

INSTALL = "verl is not installed: pip install 'srl-search[verl]'"


def settings(config: Config, job: Job) -> dict[str, Setting]:
    """What our configuration says in verl's keys, without what verl leaves at its defaults."""
    found: dict[str, Setting] = {}
    for part in (acting, learning, machines):
        for key, value, ours in part(config, job):
            found[key] = Setting(value, ours)
    return found


def compose(config: Config, job: Job) -> DictConfig:
    """verl's configuration of a run: its defaults, then `settings`, then the section `verl`.

    Raises UserError for what this backend cannot keep, and for a key that verl does not have.
    """
    check_supported(config, job)
    pristine = defaults(config)
    composed = deepcopy(pristine)

    from omegaconf import OmegaConf

    for key, setting in settings(config, job).items():
        OmegaConf.update(composed, key, setting.value, merge=False, force_add=True)
    lay_on_top(composed, pristine, config)
    return composed


def defaults(config: Config) -> DictConfig:
    """verl's configuration as it comes, read from its files: the library itself is not imported."""
    return deepcopy(_as_it_comes(is_megatron(config)))


@cache
def _as_it_comes(megatron: bool) -> DictConfig:
    directory = str(config_directory())

    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(directory, version_base=None):
        return hydra_compose("ppo_trainer", ["model_engine=megatron"] if megatron else [])


def config_directory() -> Path:
    """Where the installed verl keeps its configuration. Raises UserError where there is none."""
    spec = find_spec("verl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places or find_spec("hydra") is None:
        raise UserError(INSTALL)
    return Path(places[0]) / "trainer" / "config"
