"""Published files by name, from the Hugging Face hub (an optional install)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from srl.data.sources import Source
from srl.errors import UserError

_log = logging.getLogger(__name__)


def download(source: Source, split: str = "") -> Path:
    """The published file of `source` for `split`, from the hub or its cache.

    Raises UserError, naming the file to give instead, when the source is not on the hub, huggingface_hub
    is not installed, or the hub cannot be reached.
    """
    instead = (
        f"give the file instead: srl data prepare {source.name} --file PATH (published as {source.files})"
    )
    if not source.hub:
        raise UserError(f"{source.name} is not on the hub; {instead}")
    if split not in source.hub_files:
        known = ", ".join(source.hub_files)
        raise UserError(
            f"{source.name} has no {split} split on the hub: there is {known}; choose it with --split"
        )
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
        from huggingface_hub.utils.logging import set_verbosity_error
    except ImportError as error:
        raise UserError(
            f"{source.name} by name needs huggingface_hub (pip install 'srl-search[hub]'); {instead}"
        ) from error
    set_verbosity_error()
    _log.info("asking the hub for %s of %s", source.hub_files[split], source.hub)
    try:
        return Path(hf_hub_download(source.hub, source.hub_files[split], repo_type="dataset"))
    except (HfHubHTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise UserError(
            f"{source.name} could not be had from the hub ({_reason(error)}); {instead}"
        ) from error


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120].rstrip(" .") if lines else type(error).__name__
