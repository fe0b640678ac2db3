"""Published data that lies beside the checkout; a test that needs it is skipped where it is absent."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """The file or directory `name` under $SRL_SHARED_DATA, else under ../shared/data."""
    path = Path(os.environ.get("SRL_SHARED_DATA") or BESIDE) / name
    if not path.exists():
        pytest.skip(f"{name} is not under $SRL_SHARED_DATA (by default ../shared/data)")
    return path
