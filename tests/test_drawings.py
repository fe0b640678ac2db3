"""The drawings of docs/ are what their scripts draw, and stand on their pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    "draw_architecture.py": "architecture.md",
    "draw_real_learning.py": "results.md",
    "draw_scale.py": "scale.md",
}
"""Each script with the page that shows its drawing."""


def test_each_script_has_its_page():
    assert {path.name for path in DOCS.glob("draw_*.py")} == PAGES.keys()


@pytest.mark.parametrize("script", PAGES)
def test_drawing_is_what_its_script_draws(script):
    if subprocess.run([sys.executable, DOCS / script, "--check"], check=False).returncode:
        pytest.fail(f"the drawing differs from what draws it; run: python docs/{script}", pytrace=False)


@pytest.mark.parametrize(("script", "page"), PAGES.items())
def test_page_shows_its_drawing(script, page):
    name = script.removeprefix("draw_").removesuffix(".py") + ".svg"
    assert f"]({name})" in (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["architecture.md", "draw_architecture.py"])
def test_architecture_names_files_that_exist(name):
    """Paths are below src/srl."""
    srl = DOCS.parent / "src" / "srl"
    text = (DOCS / name).read_text(encoding="utf-8")
    named = re.findall(r"\b(?:[a-z_]+/)+[a-z_]+\.py\b|\b(?:[a-z_]+/)+(?=[`\",:])", text)
    assert len(named) > 15
    assert [path for path in named if not ((srl / path).exists() or (DOCS.parent / path).exists())] == []
