"""Imports go one way, as the data do: what each module of `srl` may import, and how long it may be."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRL = ROOT / "src" / "srl"
MAX_LINES = 800

STAGES = ["data", "index", "serve", "rollout", "reward", "advantage", "update", "store"]
ORDER = {name: position for position, name in enumerate(["plugins", "config", *STAGES])}
"""Every room that imports more than nouns: it may import the rooms of a lower number."""
ORDER |= dict.fromkeys(["evaluate", "browse", "testing"], len(ORDER))
ORDER |= {"train": len(ORDER), "cli": len(ORDER) + 1}
NOUNS = {"trajectory", "protocol", "model", "errors", "answers", "files", "workspace"}
NOUNS |= {
    "daemon_thread",
    "progress",
    "renamed",
    "manifests",
    "inputs",
    "interrupts",
    "safe_log",
    "safe_text",
    "validation",
}
"""Modules at the root that everybody may import; they import each other and no stage."""

BARE = {"trajectory", "protocol", "model", "rollout", "advantage", "update"}
"""What runs on a machine that has torch and transformers and nothing else."""
BARE_HELPERS = {"errors", "files", "manifests", "inputs", "answers", "safe_text", "validation"}
"""Nouns of the standard library alone, which the bare ones may use too."""
LIBRARIES = {"numpy", "torch", "transformers"}
WITHOUT_GPU = "without_gpu"


@dataclass(frozen=True)
class Import:
    """One import: what, in which line, whether only when a function runs."""

    name: str
    line: int
    lazy: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def room(self) -> str:
        """The part of `srl` it is from, `""` for other packages."""
        parts = self.name.split(".")
        return parts[1] if parts[0] == "srl" and len(parts) > 1 else ""


def imports(source: str, package: str = "srl") -> list[Import]:
    """All imports of a module in `package` but those for type checkers."""
    return list(_imports(ast.parse(source), package, lazy=False))


def _imports(node: ast.AST, package: str, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _imports(ast.Module([other], []), package, lazy)
        elif isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from _names_from(child, package, lazy)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, lazy or inside)


def _names_from(node: ast.ImportFrom, package: str, lazy: bool) -> Iterator[Import]:
    """`from srl import store` is an import of srl.store, `from .x import y` one of the package's x."""
    base = node.module or ""
    if node.level:
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parents, base] if base else parents)
    names = [f"{base}.{alias.name}" for alias in node.names] if base == "srl" else [base]
    yield from (Import(name, node.lineno, lazy) for name in names)


def modules(*rooms: str) -> list[Path]:
    """The modules of these rooms (all without any), as paths below src/srl."""
    found = sorted(path.relative_to(SRL) for path in SRL.rglob("*.py"))
    return [path for path in found if not rooms or room_of(path) in rooms]


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[Import]:
    package = ".".join(["srl", *path.parts[:-1]])
    return imports((SRL / path).read_text(encoding="utf-8"), package)


def say(path: Path, wrong: list[Import], why: str) -> str:
    return "\n".join(f"src/srl/{path}:{item.line}: {item.name}: {why}" for item in wrong)


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=str)


@each(modules(*ORDER))
def test_room_imports_nouns_and_rooms_before_it(path):
    room = room_of(path)
    before = {name for name in ORDER if ORDER[name] < ORDER[room]}
    allowed = {"", "__version__", room, *NOUNS, *before}
    wrong = [item for item in imports_of(path) if item.room not in allowed]
    assert not wrong, say(path, wrong, f"{room} comes before it")


@each(modules(*(room for room in ORDER if room not in ("plugins", "train", "cli"))))
def test_stage_asks_the_manager_for_plugins(path):
    doors = {"srl.plugins", *(f"srl.plugins.{door}" for door in ("manager", "import_path", "options"))}
    wrong = [item for item in imports_of(path) if item.room == "plugins" and item.name not in doors]
    assert not wrong, say(path, wrong, "a stage does not write plugin packages")


@each(modules(*NOUNS))
def test_noun_imports_only_nouns(path):
    wrong = [item for item in imports_of(path) if item.room not in {"", *NOUNS}]
    assert not wrong, say(path, wrong, "the shared nouns come before every room")


@each(modules(*BARE, *BARE_HELPERS))
def test_bare_rooms_need_only_torch_and_transformers(path):
    room = room_of(path)
    libraries = LIBRARIES if room in BARE else set()
    wrong = [
        item
        for item in imports_of(path)
        if (item.room and item.room not in BARE | BARE_HELPERS)
        or not (item.room or item.top in sys.stdlib_module_names | libraries | {"srl"})
    ]
    if room == "model":
        wrong = [item for item in wrong if not (item.top == "peft" and item.lazy)]
    assert not wrong, say(path, wrong, f"{room} runs on a bare GPU machine")


@each([path for path in modules("train", "cli") if WITHOUT_GPU not in path.parts])
def test_nothing_imports_what_runs_verl_without_a_gpu(path):
    wrong = [item for item in imports_of(path) if item.name.startswith(f"srl.train.verl.{WITHOUT_GPU}")]
    assert not wrong, say(path, wrong, "it is loaded by name, in srl.train.verl.job.device_support")


@each(modules())
def test_core_does_not_know_its_plugins(path):
    wrong = [item for item in imports_of(path) if item.top.startswith("srl_")]
    assert not wrong, say(path, wrong, "plugins are found through entry points")


def test_every_part_of_the_package_has_its_place():
    rooms = {room_of(path) for path in modules()}
    assert rooms <= {*ORDER, *NOUNS, "__init__", "__main__"}


def test_no_root_module_is_named_like_a_standard_one():
    names = {path.name.removesuffix(".py") for path in SRL.iterdir() if not path.name.startswith("_")}
    assert not names & set(sys.stdlib_module_names)


@each([*(path.relative_to(ROOT) for path in [*SRL.rglob("*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")])])
def test_module_is_of_a_size_to_be_read(path):
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_imports_are_found_wherever_they_stand():
    source = """
import os.path, torch
from typing import TYPE_CHECKING
from srl import store
from .episode import run_episode
from ..errors import UserError
if TYPE_CHECKING:
    import duckdb
else:
    import json
try:
    import numpy
except ImportError:
    numpy = None
class A:
    import csv
    def f(self):
        from srl.plugins import manager
"""
    found = imports(source, "srl.rollout")
    assert [(item.name, item.lazy) for item in found] == [
        ("os.path", False),
        ("torch", False),
        ("typing", False),
        ("srl.store", False),
        ("srl.rollout.episode", False),
        ("srl.errors", False),
        ("json", False),
        ("numpy", False),
        ("csv", False),
        ("srl.plugins", True),
    ]
