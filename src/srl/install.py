"""What to type to install a part of this project, which is on no package index but in a checkout."""

from __future__ import annotations

INSTALL_ALL = "pip install -r requirements.txt in the checkout of srl"
"""srl and the plugins that come with it."""


def pip_install(extra: str) -> str:
    """The command that installs an extra of srl."""
    return f"pip install -e '.[{extra}]' in the checkout of srl"
