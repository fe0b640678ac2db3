"""The examples and docs/scale.md: a shell reads them, and `srl` takes every line of theirs that is for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from srl.cli import command
from srl.config import load_config

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in (".sh", ".sbatch"))
PAGE = ROOT / "docs" / "scale.md"
_VARIABLE = re.compile(r"\$\(\([^)]*\)\)|\$\{(?P<braced>\w+)[^}]*\}|\$(?P<plain>\w+)")
GIVEN = {"PRESET": "search-r1-32b", "ALGO": "grpo", "SEARCH": "http://10.0.0.9:8000/retrieve"}
"""What a variable holds that must be more than a number."""


def shell_of(path: Path) -> str:
    """The shell in a script, or in the fenced blocks of a page."""
    text = path.read_text(encoding="utf-8")
    return text if path.suffix != ".md" else "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))


def commands(path: Path) -> Iterator[list[str]]:
    """The words after each `srl` of a script, variables filled in."""
    whole = shell_of(path).replace("\\\n", " ")
    for line in whole.splitlines():
        found = re.search(r"(?:^|\s)srl (?P<words>[a-z-].*)", line)
        if found and not line.lstrip().startswith(("#", "pip ")):
            filled = _VARIABLE.sub(
                lambda name: GIVEN.get(name["braced"] or name["plain"] or "", "1"), found["words"]
            )
            words = shlex.split(filled, comments=True)
            yield words[: words.index("&")] if "&" in words else words


LINES = [(path.name, words) for path in [*SCRIPTS, PAGE] for words in commands(path)]


def parsed(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The commands that the words name and the options of the last; click exits where one is not known."""
    context, path = command().make_context("srl", list(words)), ["srl"]
    while rest := [*getattr(context, "_protected_args", []), *context.args]:
        name, found, rest = context.command.resolve_command(context, rest)
        context = found.make_context(name, list(rest), parent=context)
        path.append(name)
    return path, context.params


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_reads_the_example(script):
    read = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/bin/bash\n")
    assert "set -euo pipefail" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_without_its_variables_says_which(script):
    """Nothing is started: the first thing that a script does is to ask for what it needs."""
    bare = {"PATH": os.environ["PATH"]}
    ran = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, env=bare)
    assert ran.returncode == 1
    assert ": give the" in ran.stderr


@pytest.mark.parametrize(
    ("name", "words"), LINES, ids=[f"{name}-{' '.join(words[:2])}" for name, words in LINES]
)
def test_srl_takes_the_line(name, words):
    path, params = parsed(words)
    assert len(path) > 1
    if path == ["srl", "train"] and not params["resume"]:
        flags = {"model.path": params["model"], "trainer.seed": params["seed"]}
        resolved = load_config(
            params["preset"], params["config"], params["algo"], flags, params["sets"] or []
        )
        assert resolved.config.cluster.nnodes >= 1


def test_every_file_has_lines_for_srl():
    names = {name for name, _ in LINES}
    assert names == {"scale.md", "submit.sh", "train.sbatch"}
    assert sum(name == "scale.md" for name, _ in LINES) >= 12


def test_line_that_srl_does_not_take_is_found():
    with pytest.raises(Exception, match="No such option"):
        parsed(["train", "--backend", "verl", "--cluster", "auto"])
    with pytest.raises(Exception, match="No such command"):
        parsed(["serve", "retriver", "--index", "x"])


def test_examples_are_named_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    assert [path for path in SCRIPTS if str(path.relative_to(ROOT)) not in text] == []
