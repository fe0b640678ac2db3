"""`srl plugins`: list, check and create plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from srl.cli import output
from srl.cli.options import Json, whole_settings
from srl.errors import CheckFailed, UserError, nearest
from srl.install import INSTALL_ALL
from srl.plugins import manager

app = typer.Typer(help="List, check and create plugins.", no_args_is_help=True)

Kind = Literal["retriever", "reward", "algorithm", "tool"]
COLUMNS = ("kind", "name", "package", "version", "summary")


@app.command("list")
def list_plugins(as_json: Json = False) -> None:
    """List the installed plugins; broken ones with their error.

    \b
    Example:
      srl plugins list
    """
    entries = manager.installed()
    if as_json:
        output.print_json([_facts(entry) for entry in entries])
        return
    if not entries:
        output.note(f"no plugin is installed; type: {INSTALL_ALL}")
    rows = []
    for entry in entries:
        summary = f"error: {entry.error}" if entry.error else entry.summary
        rows.append((entry.kind, entry.name, entry.package, entry.version, summary))
    output.table(COLUMNS, rows)


def _facts(entry: manager.Plugin) -> dict[str, str]:
    return {name: getattr(entry, name) for name in (*COLUMNS, "error")}


@app.command()
def check(
    name: Annotated[
        str, typer.Argument(help="The name of an installed plugin, or module:Class.", show_default=False)
    ],
    kind: Annotated[
        Kind | None, typer.Option(help="Kind; needed if two kinds of plugin have this name.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the plugin.", callback=whole_settings),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the conformance checks of a plugin's kind.

    Exit code 1 if a check fails.

    \b
    Example:
      srl plugins check em
    """
    from srl.cli.options import read_settings
    from srl.plugins.import_path import look_in
    from srl.testing import checks

    look_in(Path.cwd())
    entry = manager.find(kind or _kind_of(name), name)
    outcomes = checks(entry.kind, name, read_settings(name, set_ or [], entry.kind))
    if as_json:
        output.print_json({**_facts(entry), "checks": outcomes})
    else:
        rows = [("ok" if each.passed else "FAILED", each.name, each.detail) for each in outcomes]
        output.table(("result", str(entry), "found"), rows)
    if failed := sum(not each.passed for each in outcomes):
        raise CheckFailed(f"{entry.kind} {name!r} fails {failed} of {len(outcomes)} checks")


def _kind_of(name: str) -> str:
    """The kind of the plugin called `name`. Raises UserError where there is none, or several have it."""
    if manager.is_import_path(name):
        from srl.plugins.import_path import kind_of

        return kind_of(name)
    entries = manager.installed()
    kinds = sorted({entry.kind for entry in entries if entry.name == name})
    if not kinds:
        names = [entry.name for entry in entries]
        raise UserError(f"no plugin {name!r}{nearest(name, names)}", hint="type: srl plugins list")
    if kinds == [manager.UNKNOWN]:
        raise UserError(next(f"{entry}: {entry.error}" for entry in entries if entry.name == name))
    if len(kinds) > 1:
        raise UserError(f"{name!r} is a {' and a '.join(kinds)}", hint=f"add --kind {kinds[0]}")
    return kinds[0]


@app.command()
def new(
    kind: Annotated[Kind, typer.Argument(help="Kind of plugin.", show_default=False)],
    name: Annotated[str, typer.Argument(help="Name of the plugin, such as my-search.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Directory to create.", show_default="./srl-search-NAME")
    ] = None,
) -> None:
    """Create a plugin package: small, working and tested.

    \b
    Example:
      srl plugins new reward short-answers
    """
    from srl.plugins.scaffold import create, next_steps

    folder = create(kind, name, out)
    output.line(folder)
    output.note(next_steps(kind, name, folder))
