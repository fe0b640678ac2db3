"""Plugins named as `module:Class`: found in the current directory, and again by what a run saved."""

import sys
from pathlib import Path
from textwrap import dedent

import pytest
from tests.plugin_site import forget_modules

from srl.config import load_config, load_saved, located, save_config
from srl.errors import UserError
from srl.index import build_index, open_index
from srl.plugins import import_path, manager
from srl.reward import RewardMix
from srl.trajectory import Passage

REWARD = """
    from pydantic import BaseModel
    from srl.trajectory import Score

    class Options(BaseModel):
        max_words: int = 5

    class Brevity:
        "Short answers."
        def __init__(self, options: Options | None = None):
            self.options = options or Options()
        def score(self, trajectories):
            return [Score(1.0) for _ in trajectories]
"""
RETRIEVER = """
    from srl.trajectory import Hit, Passage

    class First:
        def build(self, passages, directory, progress):
            (directory / "first.txt").write_text(next(iter(passages)).contents)
        def open(self, directory):
            self.contents = (directory / "first.txt").read_text()
        def search(self, queries, k):
            return [[Hit(Passage("p", self.contents), 1.0)] for _ in queries]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, empty and not on Python's path; what is imported from it is forgotten."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("_directories", "_used"):
        monkeypatch.setattr(import_path, name, [])
    monkeypatch.setattr(import_path, "_typed_names", set())
    yield here
    monkeypatch.undo()  # it may bring back modules that a test made it forget
    forget_modules(tmp_path)


def write(folder: Path, name: str, source: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(dedent(source), encoding="utf-8")


def test_reward_of_the_current_directory_trains_with_its_options_and_is_found_again_elsewhere(
    folder, monkeypatch, tmp_path
):
    write(folder, "my/rewards.py", REWARD)
    write(folder, "my/__init__.py", "")
    sets = ["reward.weights.my.rewards:Brevity=0.1", "reward.my.rewards:Brevity.max_words=3"]
    config = located(load_config(sets=sets).config)
    assert config.reward.weights["my.rewards:Brevity"] == 0.1
    assert config.reward.options("my.rewards:Brevity") == {"max_words": 3}
    assert config.trainer.plugin_path == (str(folder),)
    save_config(tmp_path, config)

    monkeypatch.chdir(tmp_path)
    forget(monkeypatch)
    saved = load_saved(tmp_path)
    options = {name: saved.reward.options(name) for name in saved.reward.weights}
    mix = RewardMix(saved.reward.weights, options)
    assert mix.plugins["my.rewards:Brevity"].options.max_words == 3


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    import_path.imported.cache_clear()
    monkeypatch.setattr(
        sys, "path", [path for path in sys.path if path not in import_path.used_directories()]
    )
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my", "mine")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("_directories", "_used"):
        monkeypatch.setattr(import_path, name, [])
    monkeypatch.setattr(import_path, "_typed_names", set())


def test_retriever_with_three_methods_builds_an_index_that_names_it_and_opens(folder, tmp_path):
    write(folder, "mine.py", RETRIEVER)
    import_path.look_in(folder)
    manifest = build_index([Passage("p", '"T"\ntext')], tmp_path / "index", "mine:First")
    assert manifest.retriever == "mine:First"
    assert manifest.retriever_version == f"mine {manager.find('retriever', 'mine:First').version}"
    ((hit,),) = open_index(tmp_path / "index").search(["anything"], 3)
    assert hit.passage.contents == '"T"\ntext'


def test_a_plugin_may_load_another_from_its_directory(folder):
    write(
        folder,
        "mine.py",
        f"""{RETRIEVER}
    class Outer(First):
        def __init__(self):
            from srl.index import load_retriever

            self.inner = load_retriever("mine:First")
    """,
    )
    import_path.look_in(folder)
    assert manager.load("retriever", "mine:Outer").inner


def test_an_index_does_not_choose_what_a_configuration_imports(folder, tmp_path, monkeypatch):
    """The user's directory is searched for what the configuration names, and another index names more."""
    write(folder, "mine.py", RETRIEVER)
    write(folder, "my_rewards.py", REWARD)
    import_path.look_in(folder)
    index = tmp_path / "index"
    build_index([Passage("p", '"T"\ntext')], index, "mine:First")
    forget(monkeypatch)
    sets = [f"search.index={index}", "reward.weights={'my_rewards:Brevity': 1}"]
    for given in (None, sets):
        if given:
            load_config(sets=given)
        with pytest.raises(UserError, match=r"mine:First.*PYTHONPATH="):
            open_index(index)
    assert "mine" not in sys.modules
    load_config(sets=[*sets, "retriever.name=mine:First"])
    assert len(open_index(index)) == 1


WRONG = {
    "nowhere:A": ("nowhere", "{here}"),
    "my_rewards.sub:A": ("my_rewards.sub",),
    "my_rewards:Brevty": ("'Brevity'",),
    "my_rewards:Options": ("'score'",),
    "./my_rewards.py:Brevity": ("MODULE:CLASS",),
    "my_rewards.py:Brevity": ("MODULE:CLASS",),
    "my_broken:A": ("ZeroDivisionError", "{here}/my_broken.py:1"),
    "my_unread:A": ("SyntaxError", "{here}/my_unread.py:2"),
    "my_needy:A": ("'needed'",),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_an_import_path_is_one_line_that_names_it(folder, name):
    write(folder, "my_rewards.py", REWARD)
    write(folder, "my_broken.py", "1 / 0")
    write(folder, "my_unread.py", "\nx y")
    write(folder, "my_needy.py", "class A:\n    def __init__(self, needed): ...\n    def score(self, t): ...")
    with pytest.raises(UserError) as caught:
        load_config(sets=[f"reward.weights={{'{name}': 1}}"])
    for word in (name, *WRONG[name]):
        assert word.format(here=folder) in str(caught.value)
