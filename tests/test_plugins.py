"""Plugins: found, listed, loaded, refused. One that is broken breaks nothing else."""

import pytest
from tests.plugin_site import hook, site

from srl.errors import UserError
from srl.install import INSTALL_ALL
from srl.plugins import manager

__all__ = ["site"]


HOOK = "from srl.plugins import hookimpl\n@hookimpl\ndef "
BROKEN = [
    "import no_such_module_of_anybody", "def broken(:", "raise SystemExit(3)", "1 / 0",
    f"{HOOK}srl_rewards(register): 1 / 0", f"{HOOK}srl_reward(register): pass",
    f"{HOOK}srl_rewards(reg): pass", f"{HOOK}srl_rewards(register): register(object, 'x', 's')",
    f"{HOOK}srl_rewards(register): register('a.b', object, 's')",
    f"{HOOK}srl_rewards(register): register('x', 'object', 's')",
]  # fmt: skip


@pytest.mark.parametrize("source", BROKEN)
def test_plugin_that_fails_to_import_breaks_no_other_and_is_listed_with_its_error(site, source):
    site.install("srl-search-bad", source, version="3")
    site.install("srl-search-good", hook("reward", "good"))
    good, bad = manager.installed()
    assert good.name == "good"
    assert (bad.kind, bad.name, bad.package, bad.version) == ("unknown", "bad", "srl-search-bad", "3")
    assert bad.error
    assert "\n" not in bad.error
    assert manager.load("reward", "good") is not None
    with pytest.raises(UserError, match="srl-search-bad"):
        manager.load("reward", "other")


def test_name_in_two_packages_is_an_error_where_it_is_used_and_shown_in_the_list(site):
    site.install("srl-search-one", hook("reward", "same", "only-one"))
    site.install("srl-search-two", hook("reward", "same"))
    errors = {(entry.name, entry.package): entry.error for entry in manager.installed()}
    assert errors["only-one", "srl-search-one"] == ""
    assert errors["same", "srl-search-one"] == errors["same", "srl-search-two"] != ""
    manager.load("reward", "only-one")
    with pytest.raises(UserError, match="srl-search-one and srl-search-two"):
        manager.load("reward", "same")


def test_unknown_name_tells_what_is_installed_and_what_to_type(site, monkeypatch):
    def error(kind: str, name: str) -> str:
        with pytest.raises(UserError) as caught:
            manager.load(kind, name)
        return str(caught.value)

    assert INSTALL_ALL in error("retriever", "nowhere")
    site.install("srl-search-a", hook("reward", "exact", "format"))
    assert all(word in error("reward", "exakt") for word in ("exact, format", "mean 'exact'", "plugins list"))
    assert "srl-search-bm25" in manager._own_packages()
    monkeypatch.setattr(manager, "_own_packages", lambda: {"srl-search-f1"})
    assert INSTALL_ALL in error("reward", "f1")
    with pytest.raises(UserError, match="'reward'"):
        manager.installed("rewards")


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        ("no_such_module_of_anybody:Reward", "no_such_module_of_anybody"),
        ("builtins:NoSuchThing", "NoSuchThing"),
        ("srl_a:make", "no_such_x"),
        ("srl_a:raising", "srl_a.py:3"),
    ],
)
def test_factory_is_imported_when_it_is_used_and_one_that_fails_is_named(site, monkeypatch, factory, named):
    makers = "def make(): import no_such_x\ndef raising():\n    raise KeyError('x')\n"
    site.install("srl-search-a", makers + hook("reward", "a", factory=factory))
    assert manager.installed()[0].error == ""
    with pytest.raises(UserError, match=named) as caught:
        manager.load("reward", "a")
    assert "'a' (srl-search-a 1.2)" in str(caught.value)
    assert "\n" not in str(caught.value)
    if factory == "srl_a:raising":
        monkeypatch.setattr(manager, "_own_packages", lambda: {"srl-search-a"})
        with pytest.raises(KeyError):  # in a plugin of this project: a bug
            manager.load("reward", "a")
