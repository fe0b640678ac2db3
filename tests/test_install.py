"""What messages say to type to install an extra: the checkout that srl is installed from, or the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from srl.install import install_default, pip_install


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs distributions that hide those of this environment: a name, and the folder it comes from."""
    site = tmp_path / "site"
    monkeypatch.setattr("sys.path", [str(site)])

    def install(name: str, folder: Path | None) -> None:
        info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        if folder is not None:
            url = {"url": folder.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(url))

    return install


def project(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    return folder


def test_a_checkout_is_named_with_its_plugins_installed_or_not(tmp_path, installed):
    here = project(tmp_path / "my srl", "srl-search")
    plugin = project(here / "plugins" / "retrievers" / "e5", "srl-search-e5")
    installed("srl-search", here)
    assert pip_install("verl", "vllm") == f"pip install -e '{here}[verl,vllm]'"
    assert pip_install("cpu", of="srl-search-e5") == f"pip install -e '{plugin}[cpu]'"
    assert pip_install(of="srl-search-e5") == f"pip install -e '{plugin}'"
    assert pip_install(of="srl-search-other") == "pip install srl-search-other"
    assert str(here) in install_default()
