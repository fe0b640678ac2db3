"""Plugins: found, listed, loaded, refused. One that is broken breaks nothing else."""

from __future__ import annotations

import inspect
import re

import pytest
from tests.plugin_site import hook, site

from srl.errors import UserError
from srl.install import install_default, pip_install
from srl.plugins import hookspecs, manager

__all__ = ["site"]

HOOKS = {name: function for name, function in vars(hookspecs).items() if name.startswith("srl_")}


@pytest.mark.parametrize("name", HOOKS)
def test_hook_is_documented_in_one_sentence_and_typed(name):
    doc = inspect.getdoc(HOOKS[name])
    assert doc.endswith(".")
    assert ". " not in doc
    assert "\n" not in doc
    annotations = inspect.get_annotations(HOOKS[name])
    assert set(annotations) == {*inspect.signature(HOOKS[name]).parameters, "return"}


def test_every_hook_is_asked_and_every_kind_has_one(site):
    assert set(HOOKS) == set(manager.KINDS.values())
    for kind in manager.KINDS:
        site.install(f"srl-search-my-{kind}", hook(kind, f"my-{kind}"))
    assert {(entry.kind, entry.name) for entry in manager.installed()} == {
        (kind, f"my-{kind}") for kind in manager.KINDS
    }


def test_entry_tells_package_version_and_summary(site):
    site.install("srl-search-bees", hook("reward", "bees"), version="0.7")
    (entry,) = manager.installed("reward")
    assert (entry.kind, entry.name, entry.package, entry.version, entry.summary, entry.error) == (
        "reward",
        "bees",
        "srl-search-bees",
        "0.7",
        "does bees",
        "",
    )


def test_entries_are_in_the_order_of_kind_and_name(site):
    site.install("srl-search-a", hook("algorithm", "z", "a"))
    site.install("srl-search-b", hook("retriever", "m"))
    assert [entry.name for entry in manager.installed()] == ["m", "a", "z"]


def test_one_plugin_may_register_several_kinds(site):
    site.install("srl-search-a", hook("reward", "x") + "\n" + hook("retriever", "x"))
    assert [(entry.kind, entry.name) for entry in manager.installed()] == [
        ("retriever", "x"),
        ("reward", "x"),
    ]


def test_package_that_is_on_the_path_twice_counts_once(site):
    site.install("srl-search-a", hook("reward", "a"), version="2.0")
    site.register("srl-search-a", "srl_a", version="1.0")
    assert [entry.name for entry in manager.installed()] == ["a"]


HOOK = "from srl.plugins import hookimpl\n@hookimpl\ndef srl_rewards(register):"
BROKEN = {
    "import no_such_module_of_anybody": "ModuleNotFoundError: No module named 'no_such_module_of_anybody'",
    "def broken(:": "SyntaxError: ",
    "raise SystemExit(3)": "SystemExit: 3",
    "1 / 0": "ZeroDivisionError: division by zero",
    "from srl.plugins import hookimpl\n@hookimpl\ndef srl_rewards(register): 1 / 0": "ZeroDivisionError: ",
    "from srl.plugins import hookimpl\n@hookimpl\ndef srl_reward(register): pass": (
        "UserError: there is no hook 'srl_reward'; did you mean 'srl_rewards'?"
    ),
    "from srl.plugins import hookimpl\n@hookimpl\ndef srl_rewards(registry): pass": "PluginValidationError: ",
    f"{HOOK} register(object, 'x', 's')": "UserError: register: the name is <class 'object'>, expected",
    f"{HOOK} register('a.b', object, 's')": "UserError: register: the name is 'a.b', expected a text without",
    f"{HOOK} register('x', 'object', 's')": "UserError: register: 'x' is made by 'object', expected 'module:",
    f"{HOOK} register('x', object, None)": "UserError: register: the summary of 'x' is None, expected a text",
}


@pytest.mark.parametrize("source", BROKEN)
def test_plugin_that_fails_to_import_breaks_no_other_and_is_listed_with_its_error(site, source):
    site.install("srl-search-bad", source, version="3")
    site.install("srl-search-good", hook("reward", "good"))
    good, bad = manager.installed()
    assert good.name == "good"
    assert (bad.kind, bad.name, bad.package, bad.version) == ("unknown", "bad", "srl-search-bad", "3")
    assert bad.error.startswith(BROKEN[source])
    assert "\n" not in bad.error
    assert manager.load("reward", "good") is not None


def test_the_argument_of_a_hook_that_is_wrong_is_named(site):
    site.install("srl-search-bad", "from srl.plugins import hookimpl\n@hookimpl\ndef srl_rewards(reg): pass")
    (bad,) = manager.installed()
    assert "'reg'" in bad.error


def test_options_that_are_no_pydantic_model_are_an_error_of_one_line(site):
    source = hook("reward", "odd").replace("'does odd')", "'does odd', options='builtins:dict')")
    site.install("srl-search-odd", source)
    with pytest.raises(UserError, match=r"'odd' .* has <class 'dict'> for its options, expected a pydantic"):
        manager.options_model("reward", "odd")


def test_plugin_manager_holds_the_modules_under_package_and_entry_point(site):
    site.install("srl-search-good", hook("reward", "good"))
    assert [name for name, _ in manager.plugin_manager().list_name_plugin()] == ["srl-search-good/good"]


def test_name_in_two_packages_is_an_error_where_it_is_used_and_shown_in_the_list(site):
    site.install("srl-search-one", hook("reward", "same", "only-one"))
    site.install("srl-search-two", hook("reward", "same"))
    errors = {(entry.name, entry.package): entry.error for entry in manager.installed()}
    assert errors["only-one", "srl-search-one"] == ""
    assert "srl-search-one and srl-search-two" in errors["same", "srl-search-one"]
    assert errors["same", "srl-search-one"] == errors["same", "srl-search-two"]
    manager.load("reward", "only-one")
    with pytest.raises(UserError, match="srl-search-one and srl-search-two; type: pip uninstall"):
        manager.load("reward", "same")


def test_two_kinds_may_share_a_name(site):
    site.install("srl-search-a", hook("reward", "x"))
    site.install("srl-search-b", hook("retriever", "x"))
    assert not any(entry.error for entry in manager.installed())


def test_unknown_name_tells_what_is_installed_and_what_to_type(site):
    site.install("srl-search-a", hook("reward", "exact", "format"))
    with pytest.raises(UserError) as caught:
        manager.load("reward", "exakt")
    assert str(caught.value) == (
        "no reward 'exakt': installed are exact, format; type: srl plugins list; did you mean 'exact'?"
    )


def test_unknown_name_of_our_own_tells_its_package(site, monkeypatch):
    site.install("srl-search-a", hook("reward", "exact"))
    monkeypatch.setattr(manager, "_own_packages", lambda: ["srl-search-f1", "matplotlib"])
    with pytest.raises(UserError, match=re.escape(pip_install(of="srl-search-f1"))):
        manager.load("reward", "f1")


def test_own_packages_are_those_of_the_extras():
    assert "srl-search-bm25" in manager._own_packages()


def test_without_any_plugin_the_error_says_what_to_install(site):
    with pytest.raises(UserError, match=re.escape(install_default())):
        manager.load("retriever", "bm25")


def test_without_a_plugin_of_the_kind_the_error_says_so_and_names_the_broken_ones(site):
    site.install("srl-search-bad", "import no_such_module_of_anybody")
    with pytest.raises(UserError, match=r"no retriever is installed; not importable: srl-search-bad \("):
        manager.load("retriever", "bm25")


def test_unknown_kind_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'reward'"):
        manager.installed("rewards")


def test_listing_does_not_import_the_factory(site):
    site.install("srl-search-a", hook("reward", "a", factory="no_such_module_of_anybody:Reward"))
    assert manager.installed()[0].error == ""
    with pytest.raises(UserError, match="No module named 'no_such"):
        manager.load("reward", "a")


def test_factory_without_the_named_attribute_is_an_error_of_one_line(site):
    site.install("srl-search-a", hook("reward", "a", factory="builtins:NoSuchThing"))
    with pytest.raises(UserError, match="NoSuchThing"):
        manager.load("reward", "a")


def test_missing_package_of_a_factory_is_an_error_that_says_what_to_type(site):
    site.install("srl-search-a", hook("reward", "a", factory="srl_a:make") + "\ndef make(): import no_such_x")
    with pytest.raises(UserError, match="No module named 'no_such_x'"):
        manager.load("reward", "a")


RAISING = """
from srl.plugins import hookimpl

class Broken:
    def __init__(self):
        raise KeyError("x")

@hookimpl
def srl_rewards(register):
    register("broken", "srl_broken:Broken", "raises")
"""


def test_factory_that_raises_is_an_error_of_one_line_with_its_place(site):
    module = site.install("srl-search-broken", RAISING)
    place = re.escape(str(site.folder / f"{module}.py"))
    message = rf"^reward 'broken' \(srl-search-broken 1.2\) raised KeyError: 'x' \({place}:6\)$"
    with pytest.raises(UserError, match=message):
        manager.load("reward", "broken")


def test_factory_of_our_own_that_raises_is_a_bug(site, monkeypatch):
    site.install("srl-search-broken", RAISING)
    monkeypatch.setattr(manager, "_own_packages", lambda: ["srl-search-broken"])
    with pytest.raises(KeyError):
        manager.load("reward", "broken")


def test_installed_algorithm_that_is_none_is_refused(site):
    site.install("srl-search-odd", hook("algorithm", "odd"))
    with pytest.raises(UserError, match=r"^odd is not a valid algorithm: expected an srl.advantage"):
        manager.load("algorithm", "odd")


def test_factory_may_be_given_as_an_object(site):
    site.install("srl-search-a", hook("reward", "a").replace("'builtins:object'", "dict"))
    assert manager.load("reward", "a") == {}


OPTIONS = """
from pydantic import BaseModel, ConfigDict
from srl.plugins import hookimpl

class Options(BaseModel):
    model_config = ConfigDict(extra="allow")
    k1: float = 0.9
    stemmer: str = "english"

class Retriever:
    def __init__(self, options):
        self.options = options

@hookimpl
def srl_retrievers(register):
    register("bm", "srl_bm:Retriever", "with options", options="srl_bm:Options")
    register("plain", "builtins:object", "without")
"""


def test_options_reach_the_factory_validated(site):
    site.install("srl-search-bm", OPTIONS)
    assert manager.load("retriever", "bm", {"k1": 2}).options.k1 == 2.0
    assert manager.load("retriever", "bm").options.stemmer == "english"
    assert list(manager.options_model("retriever", "bm").model_fields) == ["k1", "stemmer"]
    assert manager.options_model("retriever", "plain") is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bm", {"k": 1}, "no option retriever.bm.k: there are k1, stemmer; did you mean 'k1'"),
        (
            "bm",
            {"k1": "much"},
            r"retriever.bm.k1 is 'much', expected a number; type: --set retriever.bm.k1=VALUE",
        ),
        ("bm", {"k1": "a", "stemmer": 3}, "and 1 more"),
        ("plain", {"k1": 1}, "takes no options; remove 'k1'"),
    ],
)
def test_option_that_does_not_fit_is_named(site, name, options, message):
    site.install("srl-search-bm", OPTIONS)
    with pytest.raises(UserError, match=message):
        manager.load("retriever", name, options)
