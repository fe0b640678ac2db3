"""`srl data` as a user types it: results on stdout, notes on stderr, exit codes, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from srl.cli import main
from srl.data.parquet import read_questions
from srl.data.sources import SOURCES

FIXTURES = Path(__file__).parent / "fixtures" / "data"
NQ = f"nq={FIXTURES / 'nq-open.train.jsonl'}"
NO_SEARCH = ("--set", "rollout.search=false")


@pytest.fixture
def srl(capsys, monkeypatch, tmp_path):
    """Runs `srl` in an empty directory; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SRL_WORKSPACE", str(tmp_path / "work"))

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_list_names_every_source_for_people_and_for_programs(srl):
    code, out, _ = srl("data", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(SOURCES)
    rows = json.loads(srl("data", "list", "--json")[1])
    assert {row["name"]: row["hub_files"] for row in rows}["bamboogle"] == {"test": "bamboogle/test.jsonl"}


def test_prepare_merges_sources_with_their_files(srl, tmp_path):
    squad, wiki, own = (FIXTURES / name for name in ("squad-train.json", "2wiki_corpus.json", "corpus.jsonl"))
    sources = (f"squad={squad}", NQ.replace("nq", "nq:test", 1), f"2wiki-corpus={wiki}", f"corpus={own}")
    command = ("data", "prepare", *sources, "--out", "out", "--template", "tiny", "--val", 1)
    code, out, err = srl(*command)
    assert (code, "squad-train.json: 1 rows left out" in err) == (0, True)
    places = [line.split()[0] for line in out.splitlines()]
    names = ("train.parquet", "validation.parquet", "test.parquet", "corpus.jsonl")
    assert places == [*(f"out/{name}" for name in names), "gold"]
    prompt = read_questions(tmp_path / "out" / "test.parquet")[0].prompt[0]["content"]
    assert prompt.startswith("Question : who")
    assert srl(*command)[0] == 2
    made = json.loads(srl(*command, "--overwrite", "--json")[1])
    assert (made["questions"]["test"], made["passages"], made["merged"]) == (3, 8, 1)
    assert made["gold"] == {"text": 4, "unnamed": 3}


@pytest.mark.parametrize("extra", [(), ("--overwrite",)])
def test_current_directory_is_no_place_to_prepare_into(srl, tmp_path, extra):
    (tmp_path / "thesis.tex").write_text("years of work")
    code, out, err = srl("data", "prepare", NQ, "--out", ".", *extra)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_is_said_of_a_missing_train_file_works_when_it_is_typed(srl, tmp_path):
    code, _, err = srl("train", "--set", "data.train_files=train.parquet", *NO_SEARCH)
    assert code == 2
    hint = err.partition("`")[2].partition("`")[0].split()
    assert hint[:4] == ["srl", "data", "prepare", "SOURCE"]
    assert srl("data", "prepare", NQ, *hint[6:])[0] == 0
    assert (tmp_path / hint[-1] / "train.parquet").is_file()


def test_show_prints_questions_passages_and_prompts(srl):
    code, out, _ = srl("data", "show", FIXTURES / "flashrag-train.jsonl", "-n", 1)
    assert code == 0
    assert "question: which river runs past the lantern works\nanswers: the Osk | River Osk" in out
    code, out, _ = srl("data", "show", FIXTURES / "corpus.jsonl", "-n", 2, "--json")
    assert [row["id"] for row in json.loads(out)] == ["0", "1"]
    srl("data", "prepare", NQ, "--out", "out")
    code, out, _ = srl("data", "show", "out/train.parquet", "-n", 2)
    assert (code, out.count("user: Answer the given question.")) == (0, 2)


def test_tokenizer_is_trained_and_saved(srl, tmp_path):
    arguments = ("--corpus", FIXTURES / "corpus.jsonl", "--vocab-size", 300, "--out", "tokenizer")
    code, out, _ = srl("data", "tokenizer", *arguments)
    assert (code, out) == (0, "tokenizer  300 tokens\n")
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
    assert srl("data", "tokenizer", *arguments)[0] == 2
    assert srl("data", "tokenizer", *arguments, "--overwrite")[0] == 0


def test_a_command_does_not_overwrite_what_it_reads(srl, tmp_path):
    asked = {"id": "q", "question": "what flag", "golden_answers": ["red"]}
    Path("q.jsonl").write_text(json.dumps(asked) + "\n")
    Path("c.jsonl").write_text('{"id": "a", "contents": "\\"A\\"\\nred"}\n')
    assert srl("data", "prepare", "questions:train=q.jsonl", "corpus=c.jsonl", "--out", "own")[0] == 0
    assert srl("index", "build", "--corpus", "c.jsonl", "--out", "index")[0] == 0
    Path("link.parquet").symlink_to("own/train.parquet")
    shown = ("data", "demonstrations", "--from", "facts", "--data", "own/train.parquet", "--index", "index")
    typed = [
        (*shown, "--out", "own/train.parquet"),
        (*shown, "--out", "link.parquet"),
        (*shown, "--out", "index/manifest.json"),
        ("data", "prepare", "questions:train=own/train.parquet", "--out", "own"),
        ("data", "tokenizer", "--corpus", "own/corpus.jsonl", "--vocab-size", 258, "--out", "own"),
        ("index", "build", "--corpus", "index/passages.jsonl", "--out", "index"),
    ]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    for command in typed:
        code, _, err = srl(*command, "--overwrite")
        assert (code, err.count("\n")) == (2, 1), command
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
