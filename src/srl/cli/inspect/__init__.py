"""`srl inspect`: inspect runs, finished or running."""

from __future__ import annotations

from srl.cli.inspect import care, compare, exchange, find, report, tokens, views, why
from srl.cli.inspect.shared import app

__all__ = ["app", "care", "compare", "exchange", "find", "report", "tokens", "views", "why"]
