"""Configuration: typed sections, layered sources, and where each value came from."""

from srl.config.keys import Config
from srl.config.load import (
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
    "Config",
    "Resolved",
    "describe",
    "load_config",
    "load_saved",
    "located",
    "preset_names",
    "save_config",
    "to_yaml",
    "with_changes",
]
