"""The command `srl`."""

from srl.cli.exit_codes import command, main

__all__ = ["command", "main"]
