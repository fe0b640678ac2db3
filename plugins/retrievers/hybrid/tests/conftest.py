"""A second retriever beside the installed ones, and a cross-encoder made on the spot."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.plugin_site import Site, forget_modules

from srl.plugins import manager

sys.path.insert(0, str(Path(__file__).parent))

from hybrid_parts import PLUGIN, cross_encoder


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The retrievers `letters` and `outside`, installed beside the others."""
    site = Site(tmp_path / "site")
    site.folder.mkdir()
    monkeypatch.syspath_prepend(str(site.folder))
    yield importlib.import_module(site.install("srl-search-letters", PLUGIN))
    forget_modules(tmp_path)
    monkeypatch.undo()
    manager.forget()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cross_encoder(tmp_path_factory.mktemp("model") / "tiny")
