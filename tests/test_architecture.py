"""Imports go one way, as the data do: what each module of `srl` may import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRL = ROOT / "src" / "srl"
STAGES = ["data", "index", "serve", "rollout", "reward", "advantage", "update", "store"]
ORDER = {name: position for position, name in enumerate(["plugins", "config", *STAGES])}
"""Every room that imports more than nouns: it may import the rooms of a lower number."""
ORDER |= {"evaluate": len(ORDER), "testing": len(ORDER), "browse": len(ORDER) + 1}
ORDER |= {"train": len(ORDER), "cli": len(ORDER) + 1}
NOUNS = {"trajectory", "protocol", "models", "errors", "answers", "files", "workspace"}
NOUNS |= {"progress", "install", "process", "safe", "user_cache"}
"""Modules at the root that everybody may import; they import each other and no stage."""

BARE = {"trajectory", "protocol", "models", "rollout", "advantage", "update"}
"""What runs on a machine that has torch and transformers and nothing else."""
BARE_HELPERS = {"errors", "files", "install", "process", "safe", "answers"}
"""Nouns of the standard library alone, which the bare ones may use too."""
LIBRARIES = {"numpy", "torch", "transformers"}
LATE = {"models": {"peft", "safetensors", "huggingface_hub", "httpx"}, "files": {"pyarrow"}}
"""What is imported only where it is used: adapters, weights in files, the hub, compressed inputs."""
OTHER_ENGINES = {
    Path("rollout/vllm_engine.py"): {"vllm", "psutil"},
    Path("rollout/openai_engine.py"): {"httpx", "tenacity", "srl.serve.http"},
}
"""The modules of engines that need more, and what; they are imported late, where their engine is chosen."""
WITHOUT_GPU = "without_gpu"


@dataclass(frozen=True)
class Import:
    """One import: what, in which line, whether only when a function runs, whether only for type checkers."""

    name: str
    line: int
    lazy: bool
    typing: bool = False
    targets: tuple[str, ...] = ()
    """What may be a module: the name itself, and for `from a import b` also `a.b`."""

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def room(self) -> str:
        """The part of `srl` it is from, `""` for other packages."""
        parts = self.name.split(".")
        return parts[1] if parts[0] == "srl" and len(parts) > 1 else ""


def imports(source: str, package: str = "srl", *, typing: bool = False) -> list[Import]:
    """All imports of a module in `package`; those for type checkers alone only if `typing`."""
    return [
        item
        for item in _imports(ast.parse(source), package, Import("", 0, False))
        if typing or not item.typing
    ]


def _imports(node: ast.AST, package: str, where: Import) -> Iterator[Import]:
    """The imports below `node`; `where` says whether it is inside a function or a block for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(ast.Module(child.body, []), package, replace(where, typing=True))
            yield from _imports(ast.Module(child.orelse, []), package, where)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield from _names(child, package, where)
        else:
            yield from _by_string(child, where)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, package, replace(where, lazy=where.lazy or inside))


def _names(node: ast.Import | ast.ImportFrom, package: str, where: Import) -> Iterator[Import]:
    """`from srl import store` is an import of srl.store, `from .x import y` one of the package's x."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield replace(where, name=alias.name, line=node.lineno, targets=(alias.name,))
        return
    base = node.module or ""
    if node.level:
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parents, base] if base else parents)
    below = [f"{base}.{alias.name}" for alias in node.names]
    for name in below if base == "srl" else [base]:
        yield replace(where, name=name, line=node.lineno, targets=tuple(below))


def _by_string(node: ast.AST, where: Import) -> Iterator[Import]:
    """`import_module("a.b")` and `__import__("a.b")`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        for argument in node.args[:1]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                name = argument.value
                yield replace(where, name=name, line=node.lineno, targets=(name,))


def modules(*rooms: str) -> list[Path]:
    """The modules of these rooms (all without any), as paths below src/srl."""
    found = sorted(path.relative_to(SRL) for path in SRL.rglob("*.py"))
    return [path for path in found if not rooms or room_of(path) in rooms]


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


@cache
def imports_of(path: Path, *, typing: bool = False) -> list[Import]:
    package = ".".join(["srl", *path.parts[:-1]])
    return imports((SRL / path).read_text(encoding="utf-8"), package, typing=typing)


def refuse(
    paths: list[Path], wrong: Callable[[Path, Import], bool], why: str, *, typing: bool = False
) -> None:
    """Fail with every import of the modules `paths` that is `wrong`."""
    found = [(path, item) for path in paths for item in imports_of(path, typing=typing) if wrong(path, item)]
    assert not found, "\n".join(f"src/srl/{path}:{item.line}: {item.name}: {why}" for path, item in found)


def test_room_imports_nouns_and_rooms_before_it():
    def wrong(path: Path, item: Import) -> bool:
        room = room_of(path)
        before = {name for name in ORDER if ORDER[name] < ORDER[room]}
        return item.room not in {"", "__version__", room, *NOUNS, *before}

    refuse(modules(*ORDER), wrong, "that room comes later", typing=True)


def test_stage_asks_the_manager_for_plugins():
    doors = {"srl.plugins", *(f"srl.plugins.{door}" for door in ("manager", "import_path", "options"))}
    stages = modules(*(room for room in ORDER if room not in ("plugins", "train", "cli")))
    refuse(
        stages, lambda _, item: item.room == "plugins" and item.name not in doors,
        "a stage does not write plugin packages",
    )  # fmt: skip


def test_noun_imports_only_nouns():
    nouns = {"", *NOUNS}
    refuse(modules(*NOUNS), lambda _, item: item.room not in nouns, "the shared nouns come before every room")


def test_bare_rooms_need_only_torch_and_transformers():
    def wrong(path: Path, item: Import) -> bool:
        room = room_of(path)
        if {item.top, item.name} & OTHER_ENGINES.get(path, set()):
            return False
        if item.room:
            return item.room not in BARE | BARE_HELPERS
        if item.top in LATE.get(room, ()) and item.lazy:
            return False
        libraries = LIBRARIES if room in BARE else set()
        return item.top not in sys.stdlib_module_names | libraries | {"srl"}

    refuse(modules(*BARE, *BARE_HELPERS), wrong, "this room runs on a bare GPU machine")


def test_modules_of_engines_that_need_more_are_imported_late():
    others = {f"srl.{'.'.join(other.with_suffix('').parts)}" for other in OTHER_ENGINES}
    refuse(
        [path for path in modules() if path not in OTHER_ENGINES],
        lambda _, item: bool(others & {item.name, *item.targets}) and not item.lazy,
        "an engine that needs more is imported where it is chosen",
    )


def test_nothing_imports_what_runs_verl_without_a_gpu():
    refuse(
        [path for path in modules("train", "cli") if WITHOUT_GPU not in path.parts],
        lambda _, item: item.name.startswith(f"srl.train.verl.{WITHOUT_GPU}"),
        "it is loaded by name, in srl.train.verl.job.device_support",
    )


def test_core_does_not_know_its_plugins():
    refuse(modules(), lambda _, item: item.top.startswith("srl_"), "plugins are found by entry points")


def test_every_part_of_the_package_has_its_place():
    rooms = {room_of(path) for path in modules()}
    assert rooms <= {*ORDER, *NOUNS, "__init__", "__main__"}


def test_no_root_module_is_named_like_a_standard_one():
    names = {path.name.removesuffix(".py") for path in SRL.iterdir() if not path.name.startswith("_")}
    assert not names & set(sys.stdlib_module_names)


SOURCES = sorted(
    path.relative_to(ROOT)
    for path in [*SRL.rglob("*.py"), *ROOT.glob("plugins/*/*/src/**/*.py"), *ROOT.glob("bench/*.py")]
)


def dotted(path: Path) -> str:
    """The name that a file is imported by: `srl.rollout.episode`, `srl_gae.estimator`; of bench, its own."""
    parts = path.with_suffix("").parts
    inside = parts[parts.index("src") + 1 :] if "src" in parts else parts[1:]
    return ".".join(inside).removesuffix(".__init__")


def import_graph() -> dict[str, set[str]]:
    """Each module of ours with those that it imports, also inside functions and for typing."""
    names = {dotted(path): path for path in SOURCES}
    graph = {}
    for name, path in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        source = (ROOT / path).read_text(encoding="utf-8")
        found = {target for item in imports(source, package, typing=True) for target in item.targets}
        graph[name] = {_module(target, names) for target in found} - {name, ""}
    return graph


def _module(target: str, names: dict[str, Path]) -> str:
    """The module that an import of `target` (a module, or a name in one) loads, empty if not ours."""
    parent = target.rpartition(".")[0]
    return target if target in names else parent if parent in names else ""


def test_no_module_imports_itself_through_others():
    """`graphlib` names a circle: its modules, the first repeated at the end."""
    graph = {name: set(needs) for name, needs in import_graph().items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


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
        import_module("srl.cli")
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
        ("srl.cli", True),
    ]
    assert [item.name for item in imports(source, "srl.rollout", typing=True) if item.typing] == ["duckdb"]
