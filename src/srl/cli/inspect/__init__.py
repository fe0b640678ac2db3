"""`srl inspect`: inspect runs, finished or running."""

from __future__ import annotations

from srl.cli.inspect import diff, files, views, why
from srl.cli.inspect.shared import app

__all__ = ["app", "diff", "files", "views", "why"]
