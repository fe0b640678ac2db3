"""The generated pages say what the code says, and every command's help ends with an example."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.test_page_commands import known

DOCS = Path(__file__).parent.parent / "docs"


@cache
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config.md", "store.md", "verl-patches.md"])
def test_page_is_what_the_code_says(name):
    page = generator().PAGES[name]()
    if (DOCS / name).read_text(encoding="utf-8") != page:
        pytest.fail(f"docs/{name} differs from what it is written from; run: make docs", pytrace=False)


def helps(command: Any, name: str = "srl", parent: Any = None) -> Iterator[tuple[str, str]]:
    """`(path, help)` of each command below `command`, groups left out."""
    context = command.context_class(command, info_name=name, parent=parent)
    if hasattr(command, "list_commands"):
        for child in command.list_commands(context):
            yield from helps(command.get_command(context, child), child, context)
    else:
        yield context.command_path, command.get_help(context)


def test_every_command_ends_its_help_with_an_example():
    from srl.cli.app import command

    for path, text in helps(command()):
        examples = text.partition("Example:\n")[2]
        assert examples.startswith(f"    {path}"), path
        for example in re.findall(r"^    (srl .*(?:\\\n.*)*)", examples, re.MULTILINE):
            known(example.replace("\\\n", " "))


def test_check_says_what_to_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    module = generator()
    monkeypatch.setattr(module, "DOCS", tmp_path)
    monkeypatch.setattr(module, "PAGES", {"a.md": lambda: "# A\n", "b.md": lambda: "# B\n"})
    (tmp_path / "a.md").write_text("# A\n")
    assert module.main(["--check"]) == 1
    assert capsys.readouterr().err.endswith(
        "docs/b.md differs from what it is written from; run: make docs\n"
    )
    assert not (tmp_path / "b.md").exists()
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0


def test_tables_of_the_pages_are_those_of_the_results():
    checked = subprocess.run([sys.executable, "bench/tables.py", "--check"], cwd=DOCS.parent, check=False)
    assert checked.returncode == 0, "run: make docs"
