"""The command `srl`."""

from srl.cli.exit_codes import main

__all__ = ["main"]
