"""docs/plugins.md: its plugins are complete, typed, short, and import only what it calls public."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs_page_lines import ROOT, blocks_of
from tests.plugin_site import forget_modules

import srl.advantage
from srl.testing import checks

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
PLUGINS = {
    text.partition("\n")[0].removeprefix("# "): text for text in blocks_of(PAGE, "python") if text[0] == "#"
}
KINDS = {
    "my_rewards.py": ("reward", "Brevity"),
    "my_algos.py": ("algorithm", "baseline"),
    "my_retriever.py": ("retriever", "Overlap"),
    "my_tools.py": ("tool", "Days"),
}
TEMPLATES = sorted((ROOT / "src" / "srl" / "plugins" / "template").rglob("*.py.txt"))
TYPED = """
from my_algos import baseline
from my_retriever import Overlap
from my_rewards import Brevity, Options
from my_tools import Days
from srl.advantage import Algorithm
from srl.index import Retriever, RetrieverBase
from srl.reward import Reward
from srl.rollout.turns import Tool

reward: Reward = Brevity(Options())
algorithm: Algorithm = baseline
retriever: Retriever = Overlap()
tool: Tool = Days()
base: Retriever = RetrieverBase()
"""


def written(folder: Path) -> Path:
    for name, text in PLUGINS.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_every_kind_is_on_the_page():
    assert PLUGINS.keys() == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_plugin_of_the_page_conforms_as_it_is_written(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(written(tmp_path)))
    kind, target = KINDS[name]
    assert all(check.passed for check in checks(kind, f"{name.removesuffix('.py')}:{target}"))
    forget_modules(tmp_path)


@pytest.mark.slow
def test_plugins_of_the_page_fit_the_public_types(tmp_path, monkeypatch):
    from mypy import api

    folder = written(tmp_path)
    (folder / "typed.py").write_text(TYPED, encoding="utf-8")
    monkeypatch.chdir(ROOT)
    output, errors, code = api.run(
        ["--config-file", "pyproject.toml", *map(str, sorted(folder.glob("*.py")))]
    )
    assert code == 0, output + errors


def imported(text: str) -> Iterator[tuple[str, str]]:
    """`(module, name)` of what a plugin imports from srl and its packages."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("srl"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("srl"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def is_public(module: str, name: str) -> bool:
    """Whether a row of the page names it as `module.name`, or names both `module` and `name`."""
    if module == "srl.advantage":
        return name in srl.advantage.__all__
    rows = PAGE.splitlines()
    spans = [set(re.findall(r"`([^`]+)`", row)) for row in rows]
    return any(f"{module}.{name}" in row or {module, name} <= row for row in spans)


@pytest.mark.parametrize("path", [Path(name) for name in PLUGINS] + TEMPLATES, ids=lambda path: path.name)
def test_what_a_plugin_imports_is_public(path):
    text = PLUGINS.get(path.name) or path.read_text(encoding="utf-8")
    words = {"{{module}}": "its_own", "{{Class}}": "Its"}
    for word, filled in words.items():
        text = text.replace(word, filled)
    assert [found for found in imported(text) if not is_public(*found)] == []
