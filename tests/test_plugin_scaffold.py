"""`srl plugins new`: each package that it writes works and passes its own tests from the start."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.plugin_site import hook, site

from srl.cli import main
from srl.errors import UserError
from srl.plugins import manager
from srl.plugins.scaffold import KINDS, create, next_steps

__all__ = ["site"]


def run_tests(path: Path, tmp_path: Path) -> list[str]:
    """Run the test functions of a module here and now; their names."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    for test in tests.values():
        test(**({"tmp_path": tmp_path} if inspect.signature(test).parameters else {}))
    return list(tests)


@pytest.mark.parametrize("kind", KINDS)
def test_new_plugin_is_listed_and_passes_its_own_tests(kind, site, tmp_path, monkeypatch):
    folder = create(kind, "short-answers", tmp_path / "new")
    monkeypatch.syspath_prepend(str(folder / "src"))
    site.register("srl-search-short-answers", "srl_short_answers", version="0.1.0")
    (entry,) = manager.installed()
    assert (entry.kind, entry.name, entry.error) == (kind, "short-answers", "")
    names = run_tests(folder / "tests" / "test_srl_short_answers.py", tmp_path)
    assert names[0] == f"test_{entry.kind}_conforms"
    assert len(names) == 2
    assert main(["plugins", "check", "short-answers"]) == 0


@pytest.mark.parametrize("kind", ["algorithm", "algo"])
def test_an_algorithm_is_called_so_everywhere_and_algo_is_short_for_it(kind, tmp_path, capsys):
    assert main(["plugins", "new", kind, "my-own", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "src" / "srl_my_own" / "estimator.py").is_file()
    assert "srl train --set algorithm.name=my-own" in capsys.readouterr().err
    assert main(["plugins", "new", "engine", "my-own"]) == 2
    assert "there are retriever, reward, algorithm, provider" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_new_package_is_complete_and_nothing_stands_unfilled(kind, tmp_path):
    folder = create(kind, "my_own", tmp_path / "new")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    module = "src/srl_my_own"
    main_file = f"{module}/{KINDS[kind].file}.py"
    tests = "tests/test_srl_my_own.py"
    assert files == {"README.md", "pyproject.toml", f"{module}/__init__.py", main_file, tests}
    for name in files:
        text = (folder / name).read_text(encoding="utf-8")
        assert "{{" not in text
        assert text.endswith("\n")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "srl-search-my-own"
    assert project["entry-points"]["srl"] == {"my_own": "srl_my_own"}
    needed = ["srl-search", "srl-search-web"] if kind == "provider" else ["srl-search"]
    assert project["dependencies"] == [f"{package}>=0.1,<0.2" for package in needed]
    assert project["optional-dependencies"] == {"test": ["pytest"]}


def test_entry_module_of_a_new_plugin_imports_nothing_but_the_marker(tmp_path):
    for kind in KINDS:
        folder = create(kind, f"a-{kind}", tmp_path / kind)
        source = (folder / "src" / f"srl_a_{kind}" / "__init__.py").read_text()
        assert [line for line in source.splitlines() if "import" in line] == [
            "from srl.plugins import hookimpl"
        ]


@pytest.mark.parametrize(
    "name", ["", "Bad", "has space", "9x", "x-", "-x", "x--y", "a.b", "ü", "../up", "x\n"]
)
def test_name_that_cannot_be_one_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="cannot name a plugin"):
        create("reward", name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_name_that_is_taken_is_refused(site, tmp_path):
    site.install("srl-search-words", hook("reward", "bees"))
    with pytest.raises(UserError, match=r"reward 'bees' \(srl-search-words 1.2\) is installed already"):
        create("reward", "bees", tmp_path / "new")
    with pytest.raises(UserError, match="a module srl_words is installed already"):
        create("retriever", "words", tmp_path / "new")


def test_folder_that_exists_is_left_as_it_is(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        create("reward", "bees", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_command_prints_the_folder_and_what_to_type_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "reward", "bees"]) == 0
    out, err = capsys.readouterr()
    assert out == "srl-search-bees\n"
    assert err.splitlines() == [
        "next:",
        "  pip install -e './srl-search-bees[test]'",
        "  pytest ./srl-search-bees",
        "  srl plugins check bees",
        "  srl train --set reward.weights.bees=0.1",
    ]
    assert main(["plugins", "new", "reward", "bees"]) == 2


def test_steps_quote_a_folder_with_spaces():
    assert "pip install -e '/tmp/my plugins/x[test]'" in next_steps(
        "algorithm", "x", Path("/tmp/my plugins/x")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_last_of_the_next_steps_names_a_key_that_there_is(kind):
    from srl.config.keys import Config

    key = KINDS[kind].use.partition("--set ")[2].partition("=")[0]
    if kind == "provider":
        assert key in manager.options_model("retriever", "web").model_fields
        return
    section, key, *_ = key.split(".")
    fields = Config.model_fields
    assert key in fields[section].annotation.model_fields


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_new_plugin_installs_with_pip_and_is_listed(kind, tmp_path):
    folder, target = create(kind, "fresh-one", tmp_path / "new"), tmp_path / "target"
    install = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([sys.executable, "-m", *install, "--target", target, folder], check=True)
    code = "import sys; from srl.cli import main; sys.exit(main(['plugins', 'list', '--json']))"
    environment = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"}
    listed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    (entry,) = [entry for entry in json.loads(listed.stdout) if entry["name"] == "fresh-one"]
    assert entry["package"] == "srl-search-fresh-one"
    assert entry["error"] == ""
