"""`srl plugins`: list, check and create plugins."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.cli import output, plugins_table
from srl.cli.options import Json, whole_settings
from srl.plugins import manager

if TYPE_CHECKING:
    from srl.testing import Check

app = typer.Typer(help="List, check and create plugins.", no_args_is_help=True)


class Kind(StrEnum):
    """The kinds of plugin, as `srl plugins list` names them."""

    retriever = "retriever"
    reward = "reward"
    algorithm = "algorithm"
    provider = "provider"


@app.command("list")
def list_plugins(as_json: Json = False) -> None:
    """List the installed plugins; broken ones with their error.

    \b
    Example:
      srl plugins list
    """
    plugins_table.print_list(as_json)


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
    from srl.testing import checks, conclude

    entry = _entry(name, kind)
    outcomes = checks(entry.kind, name, read_settings(name, set_ or [], entry.kind))
    if as_json:
        output.print_json({**plugins_table.described(entry), "checks": outcomes})
    else:
        rows = [(_verdict(check), ": ".join(filter(None, (check.name, check.detail)))) for check in outcomes]
        output.table(("result", str(entry)), rows)
    conclude(f"{entry.kind} {name!r}", outcomes)


def _verdict(check: Check) -> str:
    return "ok" if check.passed else "FAILED"


def _entry(name: str, kind: Kind | None) -> manager.Plugin:
    """The plugin called `name`, of `kind` if given."""
    from srl.errors import UserError, nearest

    if manager.is_import_path(name):
        return _imported(name, kind)
    if kind is not None:
        return manager.find(kind.value, name)
    known = manager.installed()
    kinds = list(dict.fromkeys(entry.kind for entry in known if entry.name == name))
    if kinds == [manager.UNKNOWN]:
        raise UserError(next(f"{e}: {e.error}" for e in known if e.name == name))
    if len(kinds) > 1:
        raise UserError(
            f"{name!r} is a {' and a '.join(kinds)}; type: srl plugins check {name} --kind {kinds[0]}"
        )
    if not kinds:
        names = [entry.name for entry in known]
        raise UserError(f"no plugin {name!r}; type: srl plugins list{nearest(name, names)}")
    return manager.find(kinds[0], name)


def _imported(name: str, kind: Kind | None) -> manager.Plugin:
    from srl.plugins.import_path import kind_of, look_in

    look_in(Path.cwd())
    return manager.find(kind.value if kind else kind_of(name), name)


@app.command()
def new(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="Kind: retriever, reward, algorithm or provider.", show_default=False
        ),
    ],
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
