"""`srl inspect`: inspect runs, finished or running."""

from __future__ import annotations

from srl.cli.inspect import care, diff, files, views, why
from srl.cli.inspect.shared import app

__all__ = ["app", "care", "diff", "files", "views", "why"]
