"""What to type to install a part of this project: it is not on a package index, so a checkout is named."""

from __future__ import annotations

import json
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit
from urllib.request import url2pathname

PROJECT = "srl-search"


def pip_install(*extras: str, of: str = PROJECT) -> str:
    """The command that installs the distribution `of` with these extras.

    It names the folder in the checkout that srl was installed from, `of` itself where there is none.
    """
    checkout, wanted = _folder(PROJECT), f"[{','.join(extras)}]" if extras else ""
    folder = _folder(of) or _plugin(checkout, of)
    if folder is None:
        return f"pip install {quote(of + wanted)}"
    return f"pip install -e {quote(f'{folder}{wanted}')}"


def install_default() -> str:
    """The command that installs the plugins that come with srl."""
    checkout = _folder(PROJECT)
    if checkout is None:
        return pip_install("default")
    return f"cd {quote(str(checkout))} && pip install -r requirements.txt"


def _folder(name: str) -> Path | None:
    """The folder that pip installed a distribution from; None for one from an index, or that is not there."""
    try:
        text = distribution(name).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(text)["url"]) if text else None
    folder = Path(url2pathname(url.path)) if url and url.scheme == "file" else None
    return folder if folder and (folder / "pyproject.toml").is_file() else None


def _plugin(checkout: Path | None, name: str) -> Path | None:
    """The folder of a plugin that is not installed, in the checkout."""
    for file in sorted(checkout.glob("plugins/*/*/pyproject.toml")) if checkout else ():
        if tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"] == name:
            return file.parent
    return None
