"""Writes a new plugin package: small, working and tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from srl import __version__
from srl.errors import UserError, nearest
from srl.plugins import manager

TEMPLATE = Path(__file__).parent / "template"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Kind:
    """What the templates say about one kind of plugin; `use` is a command that uses it."""

    file: str
    summary: str
    use: str


KINDS = {
    "retriever": Kind(
        "retriever",
        "Word overlap: the share of the query's words that a passage contains.",
        "srl train --set retriever.name={name}",
    ),
    "reward": Kind(
        "reward",
        "1 for a short answer, less for a longer one.",
        "srl train --set reward.weights.{name}=0.1",
    ),
    "algorithm": Kind(
        "estimator",
        "The score of an episode relative to the mean of its group.",
        "srl train --set algorithm.name={name}",
    ),
    "tool": Kind(
        "tool",
        "The number of days from one date to another.",
        "srl train --set rollout.protocol=native --set 'rollout.tools=[search, {name}]'",
    ),
}


def create(kind: str, name: str, out: Path | None = None) -> Path:
    """Write the package `srl-search-<name>` into `out` (by default a directory of that name here).

    Raises UserError for a name that is taken or cannot be one, and a directory that exists.
    """
    from srl.files import atomic_directory

    if kind not in KINDS:
        raise UserError(f"no template for {kind!r}: there are {', '.join(KINDS)}{nearest(kind, list(KINDS))}")
    module, package = f"srl_{name.replace('-', '_')}", f"srl-search-{name.replace('_', '-')}"
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a plugin: expected lower-case words with '-', as in my-search")
    if any(entry.name == name for entry in manager.installed(kind)) or find_spec(module):
        raise UserError(f"a {kind} {name!r} or a module {module} is installed already; choose another name")
    about = KINDS[kind]
    major, minor, *_ = __version__.split(".")
    versions = f">={major}.{minor},<{major}.{int(minor) + 1}"
    words = {
        "name": name,
        "identifier": name.replace("-", "_"),
        "package": package,
        "module": module,
        "Class": "".join(map(str.capitalize, re.split("[-_]", name))) + kind.capitalize(),
        "dependencies": f'"srl-search{versions}"',
        "kind": kind,
        "file": about.file,
        "summary": about.summary,
        "use": about.use.format(name=name),
    }
    folder = out or Path(package)
    with atomic_directory(folder) as directory:
        for root in (TEMPLATE / "common", TEMPLATE / kind):
            for source in sorted(root.rglob("*.txt")):
                path = str(source.relative_to(root)).removesuffix(".txt").replace("MODULE", module)
                target = directory / path
                target.parent.mkdir(parents=True, exist_ok=True)
                text = re.sub(r"\{\{(\w+)\}\}", lambda match: words[match[1]], source.read_text("utf-8"))
                target.write_text(text, encoding="utf-8")
    return folder


def next_steps(kind: str, name: str, folder: Path) -> str:
    """The next commands to type, one a line."""
    source = str(folder) if folder.is_absolute() else f"./{folder}"
    commands = (
        f"pip install -e {quote(source + '[test]')}",
        f"pytest {quote(source)}",
        f"srl plugins check {name}",
        KINDS[kind].use.format(name=name),
    )
    return "\n".join(("next:", *(f"  {command}" for command in commands)))
