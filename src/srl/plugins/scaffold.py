"""Writes a new plugin package: small, working and tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from srl import __version__
from srl.errors import UserError, nearest

TEMPLATE = Path(__file__).parent / "template"
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Kind:
    """What the templates say about one kind of plugin; `use` is a command that uses it."""

    file: str
    summary: str
    description: str
    use: str
    packages: tuple[str, ...] = ("srl-search",)


KINDS = {
    "retriever": Kind(
        "retriever",
        "Word overlap: the share of the query's words that a passage contains.",
        "word overlap: the share of the query's words that a passage contains.",
        "srl train --set retriever.name={name}",
    ),
    "reward": Kind(
        "reward",
        "1 for a short answer, less for a longer one.",
        "1 for a short answer, less for a longer one.",
        "srl train --set reward.weights.{name}=0.1",
    ),
    "algorithm": Kind(
        "estimator",
        "The score of an episode relative to the mean of its group.",
        "the score of an episode relative to the mean of its group.",
        "srl train --set algorithm.name={name}",
    ),
    "provider": Kind(
        "provider",
        "A web search API.",
        "a description of a web search API, for the retriever `web`.",
        "srl index build --retriever web --set provider={name} --out web-index",
        ("srl-search", "srl-search-web"),
    ),
}


_SHORT = {"algo": "algorithm"}
"""Another name of a kind, as `srl train --algo` has it."""


def create(kind: str, name: str, out: Path | None = None) -> Path:
    """Write the package `srl-search-<name>` into `out` (by default a directory of that name here).

    Raises UserError for a name that is taken or cannot be one, and a directory that exists.
    """
    from srl.files import atomic_directory

    kind = _SHORT.get(kind, kind)
    if kind not in KINDS:
        raise UserError(f"no template for {kind!r}: there are {', '.join(KINDS)}{nearest(kind, list(KINDS))}")
    _check_name(kind, name)
    folder = out or Path(_package(name))
    words = _words(kind, name)
    with atomic_directory(folder) as directory:
        for root in (TEMPLATE / "common", TEMPLATE / kind):
            for source in sorted(root.rglob("*.txt")):
                relative = str(source.relative_to(root)).removesuffix(".txt").replace("MODULE", _module(name))
                target = directory / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_filled(source.read_text(encoding="utf-8"), words), encoding="utf-8")
    return folder


def next_steps(kind: str, name: str, folder: Path) -> str:
    """The next commands to type, one a line."""
    source = str(folder) if folder.is_absolute() else f"./{folder}"
    commands = (
        f"pip install -e {quote(source + '[test]')}",
        f"pytest {quote(source)}",
        f"srl plugins check {name}",
        KINDS[_SHORT.get(kind, kind)].use.format(name=name),
    )
    return "\n".join(("next:", *(f"  {command}" for command in commands)))


def _check_name(kind: str, name: str) -> None:
    from importlib.util import find_spec

    from srl.plugins import manager

    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a plugin: expected lower-case words with '-', as in my-search")
    for entry in manager.installed(kind):
        if entry.name == name:
            raise UserError(f"{entry} is installed already; choose another name")
    if find_spec(_module(name)):
        raise UserError(f"a module {_module(name)} is installed already; choose another name than {name!r}")


def _package(name: str) -> str:
    return f"srl-search-{name.replace('_', '-')}"


def _module(name: str) -> str:
    return f"srl_{name.replace('-', '_')}"


def _words(kind: str, name: str) -> dict[str, str]:
    """The values of the placeholders `{{name}}` in the templates."""
    about = KINDS[kind]
    major, minor, *_ = __version__.split(".")
    versions = f">={major}.{minor},<{major}.{int(minor) + 1}"
    return {
        "name": name,
        "package": _package(name),
        "module": _module(name),
        "Class": "".join(map(str.capitalize, re.split("[-_]", name))) + kind.capitalize(),
        "dependencies": ", ".join(f'"{package}{versions}"' for package in about.packages),
        "kind": kind,
        "file": about.file,
        "summary": about.summary,
        "description": about.description,
        "use": about.use.format(name=name),
    }


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: words[match[1]], text)
