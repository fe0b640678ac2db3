"""The table of installed plugins."""

from __future__ import annotations

from srl.cli import output
from srl.install import install_default
from srl.plugins import manager

COLUMNS = ("kind", "name", "package", "version", "summary")


def print_list(as_json: bool = False) -> None:
    """Print every plugin; a broken one has its error in place of a summary."""
    entries = manager.installed()
    if as_json:
        output.print_json([described(entry) for entry in entries])
    elif entries:
        output.table(COLUMNS, [_row(entry) for entry in entries])
    else:
        output.note(f"no plugin is installed; type: {install_default()}")


def described(entry: manager.Plugin) -> dict[str, str]:
    """The facts about a plugin, for JSON."""
    return {key: getattr(entry, key) for key in (*COLUMNS, "error")}


def _row(entry: manager.Plugin) -> tuple[str, ...]:
    summary = f"error: {entry.error}" if entry.error else entry.summary
    return entry.kind, entry.name, entry.package, entry.version, summary
