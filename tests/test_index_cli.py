"""`srl index` as it is typed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

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


@pytest.fixture
def built(corpus: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["index", "build", "--corpus", "corpus.jsonl", "--out", "i"]) == 0
    capsys.readouterr()
    return corpus


def test_build_says_what_was_built_and_progress_goes_to_stderr(corpus, capsys):
    arguments = ["index", "build", "--corpus", "corpus.jsonl", "--out", "i", "--set", "k1=.8", "--set"]
    assert main([*arguments, "retriever.bm25.stemmer=none", "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["options"] == {"k1": 0.8, "b": 0.4, "stopwords": "english", "stemmer": "none"}
    assert (facts["passages"], facts["retriever"], facts["directory"]) == (2, "bm25", "i")
    assert "indexing passages: 2 of 2" in err


def test_a_second_build_needs_force(built, capsys):
    arguments = ["index", "build", "--corpus", "corpus.jsonl", "--out", "i"]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("srl: i exists already")
    assert "--force" in err
    assert main([*arguments, "--force"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "k1"], "expected KEY=VALUE"),
        (["--set", "k2=3"], "did you mean 'k1'"),
        (["--set", "k1=many"], "retriever.bm25.k1"),
        (["--corpus", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(corpus, capsys, arguments, message):
    assert main(["index", "build", "--corpus", "corpus.jsonl", "--out", "i", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert not Path("i").exists()


def test_info_reads_the_manifest_and_checks_the_corpus(built, capsys):
    assert main(["index", "info", "i", "--corpus", "corpus.jsonl"]) == 0
    assert "passages          2" in capsys.readouterr().out
    Path("corpus.jsonl").write_text('{"id": "p9", "contents": "other"}\n')
    assert main(["index", "info", "i", "--corpus", "corpus.jsonl"]) == 1
    assert "was not built from corpus.jsonl" in capsys.readouterr().err


def test_info_of_what_is_no_index_is_exit_code_2(built, capsys):
    assert main(["index", "info", "nowhere"]) == 2
    Path("i/passages/text.bin").unlink()
    assert main(["index", "info", "i"]) == 2
    assert "text.bin is missing" in capsys.readouterr().err


def test_search_prints_one_line_a_hit(built, capsys):
    assert main(["index", "search", "i", "tall lighthouse"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("1  ")
    assert line.endswith("  p0  Lighthouse: The lighthouse of Genoa is tall.")


def test_search_reads_queries_from_standard_input(built, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("genoa\n\nunicorn\n"))
    assert main(["index", "search", "i", "-", "-k", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["query"] for one in found] == ["genoa", "unicorn"]
    assert [[hit["id"] for hit in one["hits"]] for one in found] == [["p1"], []]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["index", "search", "i", "-"]) == 2


def test_search_of_several_queries_names_each(built, capsys):
    assert main(["index", "search", "i", "genoa", "unicorn"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("?")] == ["? genoa", "? unicorn"]
    assert lines[-1] == "no hits"
