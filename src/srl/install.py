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
    """The command that installs the distribution `of` with these extras: its folder in the checkout that srl
    was installed from, `of` itself where there is none."""
    folder, wanted = _folder(of), f"[{','.join(extras)}]" if extras else ""
    return (
        f"pip install {quote(of + wanted)}"
        if folder is None
        else f"pip install -e {quote(f'{folder}{wanted}')}"
    )


def install_default() -> str:
    """The command that installs the plugins that come with srl."""
    checkout = _folder(PROJECT)
    if checkout is None:
        return pip_install("default")
    return f"cd {quote(str(checkout))} && pip install -r requirements.txt"


def _folder(name: str) -> Path | None:
    """The folder of a distribution in the checkout that srl was installed from."""
    try:
        text = distribution(PROJECT).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(text)["url"]) if text else None
    if url is None or url.scheme != "file":
        return None
    checkout = Path(url2pathname(url.path))
    for file in (checkout / "pyproject.toml", *sorted(checkout.glob("plugins/*/*/pyproject.toml"))):
        if file.is_file() and tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"] == name:
            return file.parent
    return None
