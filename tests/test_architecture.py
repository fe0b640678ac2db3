"""Imports go one way, as the data do: what each module of `srl` may import."""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

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


class Import(NamedTuple):
    """An import in a module: of a module, or of a name in one. It is late inside a function."""

    name: str
    line: int
    is_late: bool
    is_for_types: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]

    @property
    def room(self) -> str:
        """The part of `srl` it is from, `""` for other packages."""
        return self.name.split(".")[1] if self.top == "srl" and "." in self.name else ""


@cache
def imports_of(path: Path) -> list[Import]:
    """The imports of a file, `from a import b` as `a.b`; relative ones are not used."""
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), False, False))


def _imports(node: ast.AST, is_late: bool, is_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert not child.level, ast.unparse(child)
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        else:
            names = []
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, is_late or inside, is_for_types or typing)
        for name in names:
            yield Import(name, child.lineno, is_late, is_for_types)  # type: ignore[attr-defined]


def modules(*rooms: str) -> list[Path]:
    """The modules of these rooms (all without any), as paths below src/srl."""
    paths = sorted(path.relative_to(SRL) for path in SRL.rglob("*.py"))
    return [path for path in paths if not rooms or room_of(path) in rooms]


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def refuse(paths: list[Path], wrong: Callable[[Path, Import], bool], why: str) -> None:
    """Fail with every import of the modules `paths` that is `wrong`."""
    lines = [
        f"src/srl/{path}:{each.line}: {each.name}: {why}"
        for path in paths
        for each in imports_of(SRL / path)
        if wrong(path, each)
    ]
    assert not lines, "\n".join(lines)


def test_room_imports_nouns_and_rooms_before_it():
    def wrong(path: Path, each: Import) -> bool:
        room = room_of(path)
        before = {name for name in ORDER if ORDER[name] < ORDER[room]}
        return each.room not in {"", "__version__", room, *NOUNS, *before}

    refuse(modules(*ORDER), wrong, "that room comes later")


def test_noun_imports_only_nouns():
    refuse(modules(*NOUNS), lambda _, each: each.room not in {"", *NOUNS}, "the nouns come before every room")


def test_bare_rooms_need_only_torch_and_transformers():
    def wrong(path: Path, each: Import) -> bool:
        room, more = room_of(path), OTHER_ENGINES.get(path, set())
        if each.is_for_types or each.top in more or any(each.name.startswith(name) for name in more):
            return False
        if each.room:
            return each.room not in BARE | BARE_HELPERS
        if each.top in LATE.get(room, ()) and each.is_late:
            return False
        libraries = LIBRARIES if room in BARE else set()
        return each.top not in sys.stdlib_module_names | libraries | {"srl"}

    refuse(modules(*BARE, *BARE_HELPERS), wrong, "this room runs on a bare GPU machine")


def test_modules_of_engines_that_need_more_are_imported_late():
    others = tuple(f"srl.{'.'.join(other.with_suffix('').parts)}" for other in OTHER_ENGINES)
    refuse(
        [path for path in modules() if path not in OTHER_ENGINES],
        lambda _, each: each.name.startswith(others) and not (each.is_late or each.is_for_types),
        "an engine that needs more is imported where it is chosen",
    )


def test_core_does_not_know_its_plugins():
    refuse(modules(), lambda _, each: each.top.startswith("srl_"), "plugins are found by entry points")


def test_every_part_of_the_package_has_its_place():
    assert {room_of(path) for path in modules()} <= {*ORDER, *NOUNS, "__init__", "__main__"}


def test_no_module_imports_itself_through_others():
    """Also inside functions and for types; `graphlib` names a circle."""
    sources = [*SRL.rglob("*.py"), *ROOT.glob("plugins/*/*/src/**/*.py")]
    paths = {
        ".".join(path.with_suffix("").parts[path.parts.index("src") + 1 :]).removesuffix(".__init__"): path
        for path in (source.relative_to(ROOT) for source in sources)
    }
    graph = {}
    for name, path in paths.items():
        targets = {each.name for each in imports_of(ROOT / path)}
        targets = {target if target in paths else target.rpartition(".")[0] for target in targets}
        graph[name] = targets & paths.keys() - {name}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
