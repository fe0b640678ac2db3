"""Named retrievers and cassettes in the configuration: how they are given, and what is said of a mistake."""

import pytest

from srl.config import load_config
from srl.errors import UserError

WEB = "search.retrievers.web"


def test_named_retrievers_are_put_over_each_other_key_by_key(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "search:\n  retrievers:\n    web: {retriever: bm25, description: live pages}\n    wiki: {index: w}\n"
    )
    resolved = load_config(
        file=file, sets=[f"{WEB}.options.k1=1.5", "search.retrievers.papers.url=http://h/"]
    )
    named = resolved.config.search.retrievers
    assert list(named) == ["web", "wiki", "papers"]
    assert (named["web"].description, named["web"].options["k1"]) == ("live pages", 1.5)
    assert (named["wiki"].index, named["papers"].url) == ("w", ("http://h/",))
    assert resolved.origins["search.retrievers.wiki.index"] == f"{file}:4"
    assert resolved.origins[f"{WEB}.options.k1"] == "--set"
    assert load_config(file=file, sets=["search.retrievers={}"]).config.search.retrievers == {}


@pytest.mark.parametrize(
    ("sets", "setting"),
    [
        (["search.retrievers=3"], "search.retrievers"),
        ([f"{WEB}=3"], WEB),
        ([f"{WEB}.topk=0"], f"{WEB}.topk"),
        ([f"{WEB}.ulr=http://h/"], "search.retrievers.<name>.url"),
        ([f"{WEB}.description='a <b>'", f"{WEB}.index=i"], f"{WEB}.description"),
        ([f"{WEB}={{}}"], WEB),
        ([f"{WEB}.topk=2"], WEB),
        ([f"{WEB}.url=http://h/", f"{WEB}.index=i"], WEB),
        (["search.retrievers.My Web.index=i"], "search.retrievers"),
        ([f"{WEB}.url=https://me:secret@h/"], f"{WEB}.url"),
        ([f"{WEB}.url=https://h/?api_key=secret"], f"{WEB}.url"),
        ([f"{WEB}.retriever=nope"], "nope"),
        ([f"{WEB}.retriever=bm25", f"{WEB}.options.k2=1"], f"{WEB}.options.k2"),
        (["search.cassette=cassette.jsonl"], "search.cassette"),
        (["search.cassette=record"], "search.cassette"),
        (["search.digest=abc"], "search.digest"),
    ],
)
def test_retrievers_and_cassettes_that_cannot_be_are_refused_by_their_name(sets, setting):
    with pytest.raises(UserError) as refused:
        load_config(sets=sets)
    assert setting in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_cassette_is_recorded_or_replayed():
    search = load_config(sets=["search.cassette=record my cassette.jsonl"]).config.search
    assert (search.cassette_use, search.replays) == (("record", "my cassette.jsonl"), False)
    absent = ["retriever.name=elsewhere", f"{WEB}.retriever=elsewhere", f"{WEB}.options.key=1"]
    search = load_config(sets=["search.cassette=replay cassette.jsonl", *absent]).config.search
    assert (search.cassette_use, search.replays) == (("replay", "cassette.jsonl"), True)
    assert load_config().config.search.cassette_use is None
