"""Published files by name, from the Hugging Face hub (an optional install)."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from srl.data.sources import Source
from srl.errors import UserError
from srl.install import pip_install
from srl.models.hub import hub_reason

_log = logging.getLogger(__name__)


def download(source: Source, split: str = "") -> Path:
    """The published file of `source` for `split`, from the hub or its cache.

    Raises UserError, naming the file to give instead, when the source is not on the hub, huggingface_hub
    is not installed, or the hub cannot be reached.
    """
    instead = f"give the file: srl data prepare {source.name}=FILE (published as {source.files})"
    if split not in source.hub_files:
        hint = (
            f"there is {', '.join(source.hub_files)}; say which by {source.name}:SPLIT"
            if source.hub
            else instead
        )
        what = f"has no {split} on the hub" if source.hub else "is not on the hub"
        raise UserError(f"{source.name} {what}", hint=hint)
    hub = hub_library(f"downloading {source.name}", instead)
    import httpx
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()
    _log.info("asking the hub for %s of %s", source.hub_files[split], source.hub)
    try:
        return Path(hub.hf_hub_download(source.hub, source.hub_files[split], repo_type="dataset"))
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        what = f"{source.name} could not be downloaded from the hub ({hub_reason(error)})"
        raise UserError(what, hint=instead) from error


def hub_library(purpose: str, instead: str = "") -> Any:
    """The library huggingface_hub, its telemetry off. Raises UserError where it is not installed."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import huggingface_hub
    except ImportError as error:
        way = f"; or {instead}" if instead else ""
        raise UserError(f"{purpose} needs huggingface_hub; type: {pip_install('hub')}{way}") from error
    return huggingface_hub
