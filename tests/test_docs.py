"""Generated pages, tables and drawings say what the code and the results say; help ends with an example."""

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


def test_tables_of_the_pages_are_those_of_the_results():
    checked = subprocess.run([sys.executable, "bench/tables.py", "--check"], cwd=DOCS.parent, check=False)
    assert checked.returncode == 0, "run: make docs"


@pytest.mark.parametrize("script", sorted(path.name for path in DOCS.glob("draw_*.py")))
def test_drawing_is_what_its_script_draws(script):
    drawn = subprocess.run([sys.executable, DOCS / script, "--check"], check=False)
    assert drawn.returncode == 0, f"run: python docs/{script}"


@pytest.mark.parametrize("name", ["architecture.md", "draw_architecture.py"])
def test_architecture_names_files_that_exist(name):
    """Paths are below src/srl."""
    srl = DOCS.parent / "src" / "srl"
    text = (DOCS / name).read_text(encoding="utf-8")
    named = re.findall(r"\b(?:[a-z_]+/)+[a-z_]+\.py\b|\b(?:[a-z_]+/)+(?=[`\",:])", text)
    assert len(named) > 15
    assert [path for path in named if not ((srl / path).exists() or (DOCS.parent / path).exists())] == []
