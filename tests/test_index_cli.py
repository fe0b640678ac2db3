"""`srl index` as it is typed."""

import io
import json
import re
from pathlib import Path

import pytest
from tests.plugin_site import Site, site  # noqa: F401
from tests.test_index_seams import PLUGIN

from srl.cli import main


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": "p0", "contents": '"Lighthouse"\nThe lighthouse of Genoa\nis tall.'},
        {"id": "p1", "contents": '"Genoa"\nGenoa is a port in Italy.'},
    ]
    Path("corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_build_says_what_was_built_and_progress_goes_to_stderr(corpus, capsys):
    arguments = ["index", "build", "--corpus", "corpus.jsonl", "--out", "i", "--set", "k1=.8", "--set"]
    assert main([*arguments, "retriever.bm25.stemmer=none", "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["options"] == {"k1": 0.8, "b": 0.4, "stopwords": "english", "stemmer": "none"}
    assert (facts["passages"], facts["retriever"], facts["directory"]) == (2, "bm25", "i")
    assert "indexing passages: 2 of 2" in err


def test_search_reads_queries_from_standard_input(corpus, capsys, monkeypatch):
    assert main(["index", "build", "--corpus", "corpus.jsonl", "--out", "i"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("genoa\n\nunicorn\n"))
    assert main(["index", "search", "i", "-", "-k", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["query"] for one in found] == ["genoa", "unicorn"]
    assert [[hit["id"] for hit in one["hits"]] for one in found] == [["p1"], []]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["index", "search", "i", "-"]) == 2


def test_a_live_index_is_searched_and_measured_and_its_faults_are_said(corpus, site, capsys):  # noqa: F811
    site.install("srl-search-shards", PLUGIN)
    assert main(["index", "build", "--retriever", "live", "--out", "o"]) == 0
    assert main(["index", "search", "o", "port"]) == 0
    assert main(["index", "search", "o", "port", "slow"]) == 2
    assert "'slow': too slow" in capsys.readouterr().err
    pytest.importorskip("ir_measures")
    Path("q.jsonl").write_text('{"question": "which port", "answer": "port"}\n')
    Path("q.qrels").write_text("0 0 u 1\n")
    command = ["index", "eval", "o", "--questions", "q.jsonl", "-k", "1"]
    assert main(command) == main([*command, "--qrels", "q.qrels"]) == 0
    assert re.search(r"^recall@1 +1\.0000 ", capsys.readouterr().out, re.M)
