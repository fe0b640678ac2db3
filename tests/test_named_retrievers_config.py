"""Search engines and cassettes in the configuration: how they are given, and what is said of a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from srl.config import describe, load_config, load_saved, save_config
from srl.errors import UserError
from srl.protocol import list_engines

WEB = "search.engines.web"


def refused(sets: list[str]) -> str:
    """The one line that `load_config` refuses `sets` with."""
    with pytest.raises(UserError) as caught:
        load_config(sets=sets)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_engines_are_put_over_each_other_key_by_key(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "search:\n  engines:\n    web: {retriever: bm25, description: live pages}\n    wiki: {index: w}\n",
    )
    resolved = load_config(file=file, sets=[f"{WEB}.options.k1=1.5", "search.engines.papers.url=http://h/"])
    engines = resolved.config.search.engines
    assert list(engines) == ["web", "wiki", "papers"]
    assert (engines["web"].description, engines["web"].options["k1"]) == ("live pages", 1.5)
    assert (engines["wiki"].index, engines["papers"].url) == ("w", ("http://h/",))
    assert resolved.origins["search.engines.wiki.index"] == f"{file}:4"
    assert resolved.origins[f"{WEB}.options.k1"] == "--set"
    assert load_config(file=file, sets=["search.engines={}"]).config.search.engines == {}


def test_every_key_of_an_engine_is_resolved_and_saved(tmp_path):
    resolved = load_config(sets=[f"{WEB}.retriever=bm25"])
    rows = {key: (value, where) for key, value, where in describe(resolved)}
    assert rows[f"{WEB}.options.k1"] == (0.9, "default")
    assert rows[f"{WEB}.topk"] == (None, "default")
    save_config(tmp_path, resolved.config)
    assert load_saved(tmp_path) == resolved.config


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["search.engines=3"], "search.engines is 3, expected mapping of names to sections"),
        ([f"{WEB}=3"], "search.engines.web is 3, expected keys under it"),
        ([f"{WEB}.topk=0"], "search.engines.web.topk is 0, expected integer ≥ 1 or null"),
        ([f"{WEB}.ulr=http://h/"], "did you mean 'search.engines.<name>.url'?"),
        ([f"{WEB}.description='a <b>'", f"{WEB}.index=i"], "search.engines.web.description is 'a <b>'"),
        ([f"{WEB}.topk=2"], "search.engines.web has none of url, index and retriever; give one"),
        ([f"{WEB}.url=http://h/", f"{WEB}.index=i"], "search.engines.web has url and index of"),
        (["search.engines.My Web.index=i"], "the name of an engine is of a-z, 0-9, - and _"),
        ([f"{WEB}.url=https://me:secret@h/"], "search.engines.web.url for h holds a password"),
        ([f"{WEB}.url=https://h/?api_key=secret"], "alone, and the server's key in the environment: export"),
        ([f"{WEB}.retriever=nope"], "no retriever 'nope': installed are "),
        ([f"{WEB}.retriever=bm25", f"{WEB}.options.k2=1"], "no option search.engines.web.options.k2"),
        (["search.cassette=cassette.jsonl"], "search.cassette is 'cassette.jsonl', expected text like"),
        (["search.cassette=record"], "search.cassette is 'record', expected text like"),
        (["search.digest=abc"], "search.digest is 'abc', expected text like"),
    ],
)
def test_engines_and_cassettes_that_cannot_be_are__refused(sets, message):
    said = refused(sets)
    assert message in said
    assert "secret" not in said


def test_a_cassette_is_recorded_or_replayed():
    search = load_config(sets=["search.cassette=record my cassette.jsonl"]).config.search
    assert (search.cassette_use, search.replays) == (("record", "my cassette.jsonl"), False)
    absent = ["retriever.name=elsewhere", f"{WEB}.retriever=elsewhere", f"{WEB}.options.key=1"]
    search = load_config(sets=["search.cassette=replay cassette.jsonl", *absent]).config.search
    assert (search.cassette_use, search.replays) == (("replay", "cassette.jsonl"), True)
    assert load_config().config.search.cassette_use is None


def test_an_option_that_a_plugin_reads_from_a_file_stays_what_was_given(tmp_path):
    pytest.importorskip("srl_web")
    file = tmp_path / "api.yaml"
    file.write_text("url: https://example.org/search\nparams: {q: '{query}'}\nresults: results\n")
    sets = [f"{WEB}.retriever=web", f"{WEB}.options.api={file}"]
    resolved = load_config(sets=sets)
    assert resolved.config.search.engines["web"].options["api"] == str(file)
    assert resolved.config.search.engines["web"].options["attempts"] == 3


def test_the_example_of_the_page_is_a_configuration(tmp_path):
    pytest.importorskip("srl_web")
    page = Path(__file__).parent.parent / "docs" / "several-retrievers.md"
    example = tmp_path / "example.yaml"
    example.write_text(page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0])
    search = load_config(file=example).config.search
    assert list(search.engines) == ["papers", "web"]
    said = page.read_text(encoding="utf-8").replace("\n", " ")
    descriptions = {name: engine.description for name, engine in search.engines.items()}
    assert list_engines(descriptions) in said, "the page shows the sentence that a prompt gets"
