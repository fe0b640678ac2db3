"""Configuration: typed sections, layered sources, and where each value came from."""

from srl.config.cross_checks import check_plugins
from srl.config.keys import Config
from srl.config.load import (
    DEFAULT_PRESET,
    Resolved,
    describe,
    load_config,
    load_saved,
    preset_names,
    save_config,
    to_yaml,
    with_changes,
)
from srl.config.paths import located

__all__ = [
    "DEFAULT_PRESET",
    "Config",
    "Resolved",
    "check_plugins",
    "describe",
    "load_config",
    "load_saved",
    "located",
    "preset_names",
    "save_config",
    "to_yaml",
    "with_changes",
]
