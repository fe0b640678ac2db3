"""Plugins that look installed: a module and its metadata in a directory on the path."""

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from srl.plugins import import_path, manager


class Site:
    """A directory that is on the path, and the only one in which packages are looked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, source: str, version: str = "1.2", module: str | None = None) -> str:
        """Write a module and the metadata of a package whose entry point names it."""
        module = module or package.replace("srl-search-", "srl_").replace("-", "_")
        (self.folder / f"{module}.py").write_text(dedent(source), encoding="utf-8")
        self.register(package, module, version)
        return module

    def register(self, package: str, module: str, version: str = "1.2") -> None:
        info = self.folder / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[srl]\n{module.removeprefix('srl_')} = {module}\n")
        importlib.invalidate_caches()
        manager.forget()


def hook(kind: str, *names: str, factory: str = "builtins:object") -> str:
    """The source of a plugin that registers `names` of one kind."""
    lines = [f"    register({name!r}, {factory!r}, 'does {name}')" for name in names]
    return "\n".join(
        ["from srl.plugins import hookimpl", "@hookimpl", f"def {manager.KINDS[kind]}(register):", *lines]
    )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A place to install plugins, without those of the environment."""
    folder = tmp_path / "site"
    folder.mkdir()
    find = importlib.metadata.distributions
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: find(path=[str(folder)]))
    monkeypatch.syspath_prepend(str(folder))
    manager.forget()
    yield Site(folder)
    manager.forget()
    forget_modules(tmp_path)


def forget_modules(folder: Path) -> None:
    """Forget what was imported from below `folder`, so that another test may import the same names."""
    import_path.imported.cache_clear()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
