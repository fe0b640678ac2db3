"""What a start refuses, a dry run says: the same faults, each in one line."""

import copy
from textwrap import dedent

import pytest
from tests.plugin_site import forget_modules
from tests.training import config, tokenizer, train, write_setting

from srl.errors import CheckFailed, UserError
from srl.index import build_index
from srl.train.dry_run import plan_run, startup_errors


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The setting, and beside it what is none of what it is taken for."""
    folder = tmp_path_factory.mktemp("towns")
    write_setting(folder)
    (folder / "folder").mkdir()
    special = copy.deepcopy(tokenizer())
    special.add_special_tokens({"additional_special_tokens": ["<search>", "</search>"]})
    special.save_pretrained(folder / "special")
    (folder / "words.jsonl").write_text("{")
    (folder / "words.cassette").write_text("")
    build_index(folder / "corpus.jsonl", folder / "damaged", "bm25")
    data = folder / "damaged" / "bm25" / "data.npy"
    data.write_bytes(data.read_bytes()[:-1])
    return folder


FAULTS = {
    "a folder as questions": ({"data.train_files": "folder"}, "folder"),
    "no JSON": ({"data.test_files": "words.jsonl"}, "words.jsonl:1"),
    "no corpus": ({"data.corpus": "nowhere.jsonl"}, "nowhere.jsonl"),
    "no web address": ({"data.corpus": None, "search.url": "file:///tmp"}, "file:///tmp"),
    "a cassette that is not there": ({"search.cassette": "replay nowhere.cassette"}, "nowhere.cassette"),
    "a retriever without an index": (
        {"search.retrievers": {"other": {"index": "/nowhere"}}, "data.max_prompt_length": 128}, "nowhere"
    ),
    "no tokenizer": ({"model.tokenizer": "nowhere"}, "nowhere"),
    "tags as special tokens": ({"model.tokenizer": "special"}, "</search>"),
    "an empty reference": ({"ref.path": "folder", "actor.use_kl_loss": True}, "folder"),
    "no demonstrations": ({"model.path": None, "sft.train_files": "nowhere.jsonl"}, "nowhere.jsonl"),
    "a damaged index": ({"data.corpus": None, "search.index": "damaged"}, "damaged"),
    "a mix without a share": ({"data.mix": {"1": 1.0}}, "data.mix"),
    "a template for no search": ({"data.template": "tiny-r1"}, "data.template"),
}  # fmt: skip


def configured(place, changes):
    names = ["damaged", "folder", "special", "words.jsonl", "nowhere", "nowhere.jsonl"]
    values = {key: str(place / value) if value in names else value for key, value in changes.items()}
    return config(place, **{key.replace(".", "__"): value for key, value in values.items()})


@pytest.mark.parametrize(("changes", "message"), FAULTS.values(), ids=FAULTS)
def test_a_dry_run_says_what_a_start_refuses(place, tmp_path, changes, message):
    chosen = configured(place, changes)
    (said,) = startup_errors(chosen)
    assert message in said
    assert "\n" not in said
    with pytest.raises((UserError, CheckFailed)) as refused:
        train(chosen, tmp_path)
    assert message in str(refused.value)
    assert not (tmp_path / "runs").exists()


RAISES = """
    class Raises:
        def __init__(self): raise ValueError("no weights")
        def score(self, trajectories): ...
        def search(self, queries, k): ...
"""


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("reward", {"reward.weights.raising:Raises": 1}),
        ("retriever", {"retriever.name": "raising:Raises"}),
    ],
)
def test_a_plugin_that_cannot_be_made_is_refused(place, tmp_path, monkeypatch, kind, changes):
    (tmp_path / "raising.py").write_text(dedent(RAISES))
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        chosen = config(place, sets=[f"{key}={value}" for key, value in changes.items()])
        (said,) = startup_errors(chosen)
        assert said.startswith(kind)
        assert f"{tmp_path / 'raising.py'}:3" in said
        with pytest.raises(UserError, match="no weights"):
            train(chosen, tmp_path)
    finally:
        forget_modules(tmp_path)


def test_nothing_is_said_of_what_can_start_and_a_plan_warns_of_what_cannot(place):
    served = configured(place, {"data.corpus": None, "search.url": "http://127.0.0.1:9"})
    for chosen in (configured(place, {}), served):
        assert startup_errors(chosen) == []
        assert plan_run(chosen).warnings == ()
    assert len(plan_run(configured(place, {"data.train_files": "folder"})).warnings) == 1
