"""`srl plugins new`: each package that it writes works, passes its own tests, and trains by name."""

import importlib.util
import inspect
from pathlib import Path

import pytest
from tests.plugin_site import hook, site

from srl.cli import main
from srl.errors import UserError
from srl.plugins import manager
from srl.plugins.scaffold import KINDS, create

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


@pytest.mark.parametrize(
    "name", ["", "Bad", "has space", "9x", "x-", "-x", "x--y", "a.b", "ü", "../up", "x\n"]
)
def test_name_that_cannot_be_one_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="my-search"):
        create("reward", name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_name_that_is_taken_is_refused(site, tmp_path):
    site.install("srl-search-words", hook("reward", "bees"))
    for kind, name in (("reward", "bees"), ("retriever", "words")):
        with pytest.raises(UserError, match=name):
            create(kind, name, tmp_path / "new")
    with pytest.raises(UserError, match="algorithm"):
        create("algo", "mine", tmp_path / "new")
    assert not (tmp_path / "new").exists()
