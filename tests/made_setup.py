"""The environment that `make setup` makes, inside a larger one: every other distribution is out of sight."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
_EDITABLE = re.compile(r"-e (?P<folder>[^\[\s]+)(?:\[(?P<extras>[\w,-]+)\])?")
_ALWAYS = {"pip", "setuptools"}
"""What `python -m venv` and torch bring."""


def local_projects() -> dict[str, dict[str, Any]]:
    """The `[project]` table of each package of this checkout, by name, as its file has it now."""
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/*/pyproject.toml"))]
    tables = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {canonicalize_name(table["name"]): table for table in tables}


def asked_for(requirements: Path) -> Iterator[Requirement]:
    """What the lines of a requirements file name: packages of this checkout with their extras, and others."""
    for line in requirements.read_text(encoding="utf-8").splitlines():
        if found := _EDITABLE.match(line):
            file = ROOT / found["folder"] / "pyproject.toml"
            name = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"]
            yield Requirement(f"{name}[{found['extras'] or ''}]")
        elif line and not line.startswith(("#", "-r")):
            yield Requirement(line)


def provided(wanted: Iterable[Requirement]) -> set[str]:
    """The names of all distributions that pip installs for `wanted`, by what the installed ones require."""
    local, waiting = local_projects(), [(canonicalize_name(item.name), *_extras(item)) for item in wanted]
    seen: set[tuple[str, ...]] = set()
    while waiting:
        name, *extras = here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        for text in _requires(local, name, extras):
            requirement = Requirement(text)
            if _holds(requirement, extras):
                waiting.append((canonicalize_name(requirement.name), *_extras(requirement)))
    return {name for name, *_ in seen} | _ALWAYS


def _extras(requirement: Requirement) -> list[str]:
    return sorted(requirement.extras)


def _requires(local: dict[str, dict[str, Any]], name: str, extras: Sequence[str]) -> list[str]:
    if name in local:
        optional = local[name].get("optional-dependencies", {})
        return [*local[name].get("dependencies", []), *(item for extra in extras for item in optional[extra])]
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _holds(requirement: Requirement, extras: Sequence[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def hide_all_but(names: set[str]) -> None:
    """From now on this process finds no module and no metadata of other distributions than `names`."""
    owners = importlib.metadata.packages_distributions()
    hidden = {
        module
        for module, packages in owners.items()
        if not {canonicalize_name(package) for package in packages} & names
    }

    class Provided(PathFinder):
        """The usual finder, for what is provided."""

        @classmethod
        def find_spec(
            cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
        ) -> ModuleSpec | None:
            if fullname.partition(".")[0] in hidden:
                return None
            return PathFinder.find_spec(fullname, path, target)

        @classmethod
        def find_distributions(cls, *given: Any, **named: Any) -> Iterator[importlib.metadata.Distribution]:
            found = PathFinder.find_distributions(*given, **named)
            return (item for item in found if canonicalize_name(item.metadata["Name"]) in names)

    sys.meta_path[:] = [Provided if finder is PathFinder else finder for finder in sys.meta_path]


def names_for(*more: str) -> set[str]:
    """What `make setup` installs, and what `pip install` of `more` adds."""
    wanted = [*asked_for(ROOT / "requirements.txt"), Requirement("hatchling"), Requirement("editables")]
    return provided([*wanted, *map(Requirement, more)])
