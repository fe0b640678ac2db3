"""`srl index eval`: labels from every kind of file, what the command says, bad input."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn
from tests.shared_data import shared_data

from srl.cli import main
from srl.data.relevance import LabelledQuestions, read_labelled_questions
from srl.data.trec import read_qrels, read_topics
from srl.evaluate.index_eval import evaluate_index
from srl.index import Fault, build_index, open_index
from srl.serve.server import bind, create_app, url_of
from srl.trajectory import Hit, Passage, Question

pytest.importorskip("ir_measures")

PASSAGES = [
    Passage("p0", '"Lighthouse"\nThe lighthouse of Genoa is tall.'),
    Passage("p1", '"Genoa"\nGenoa is a port in Italy.'),
    Passage("p2", '"Turin"\nTurin has a chocolate fair.'),
    Passage("p3", '"Fair"\nA fair is a market.'),
]


class Scripted:
    """An index that answers what it is told to."""

    passages = None

    def __init__(self, answers: dict[str, list[str] | Exception]) -> None:
        self._answers = answers

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Exception]:
        return [self._outcome(self._answers[query], k) for query in queries]

    def _outcome(self, found: list[str] | Exception, k: int) -> list[Hit] | Exception:
        if isinstance(found, Exception):
            return found
        return [Hit(Passage(name, name), -float(rank)) for rank, name in enumerate(found[:k])]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    build_index(PASSAGES, "i")
    return tmp_path


def write(name: str, *lines: str) -> Path:
    Path(name).write_text("".join(line + "\n" for line in lines))
    return Path(name)


# What is asked, and what is known of it


def test_trec_topics_and_judgements_are_read_as_they_are_published():
    data = shared_data("cranfield")
    topics, judged = dict(read_topics(data / "cran.qry.xml")), read_qrels(data / "cranqrel.trec.txt")
    assert len(topics) == len(judged) == 225
    assert topics["4"].startswith("what problems of heat conduction in composite slabs")
    assert judged["1"]["184"] == 1
    assert judged["1"]["486"] == 0


def test_qrels_that_count_the_questions_are_taken_by_place():
    data = shared_data("cranfield")
    found = read_labelled_questions(data / "cran.qry.xml", data / "cranqrel.trec.txt")
    judged = read_qrels(data / "cranqrel.trec.txt")
    assert found.judged["4"] == judged["3"]
    assert found.judged["365"] == judged["225"]
    assert "matched by position" in found.notes[0]


def test_qrels_that_name_the_questions_are_taken_by_name(here):
    write("q.tsv", "1\tone", "2\ttwo", "4\tthree")
    write("count.qrels", "1 0 a 1", "2 0 b 1", "3 0 c 1")
    write("name.qrels", "1 0 a 1", "2 0 b 1", "4 0 c 1")
    for qrels in ("count.qrels", "name.qrels"):
        found = read_labelled_questions(Path("q.tsv"), Path(qrels))
        assert found.judged == {"1": {"a": 1}, "2": {"b": 1}, "4": {"c": 1}}
        assert bool(found.notes) == (qrels == "count.qrels")
    write("some.qrels", "1 0 a 1", "2 0 b 1")
    assert read_labelled_questions(Path("q.tsv"), Path("some.qrels")).judged == {"1": {"a": 1}, "2": {"b": 1}}


def test_topics_of_the_old_form_have_open_tags(tmp_path):
    path = tmp_path / "topics"
    path.write_text(
        "<top>\n<num> Number: 301\n<title> Topic: Organized  Crime &amp; more\n\n<desc> Narrow:\nx\n</top>\n"
    )
    assert list(read_topics(path)) == [("301", "Organized Crime & more")]


def test_questions_of_every_kind_meet_their_judgements(here):
    write("q.qrels", "a 0 p1 1", "b 0 p2 1", "gone 0 p1 1")
    rows = [{"_id": "a", "text": "port of Italy"}, {"_id": "b", "text": "chocolate"}]
    write("q.tsv", "query-id\ttext", "a\tport of Italy", "b\tchocolate")
    write("q.jsonl", *map(json.dumps, rows))
    own = [{"id": row["_id"], "question": row["text"], "golden_answers": ["x"]} for row in rows]
    write("own.jsonl", *map(json.dumps, own))
    write("beir.tsv", "query-id\tcorpus-id\tscore", "a\tp1\t1", "b\tp2\t1")
    pq.write_table(pa.table({"id": ["a", "b"], "question": ["port of Italy", "chocolate"]}), "q.parquet")
    for name in ("q.tsv", "q.jsonl", "own.jsonl", "q.parquet"):
        for qrels in ("q.qrels", "beir.tsv"):
            found = read_labelled_questions(Path(name), Path(qrels))
            assert list(found.judged.values()) == [{"p1": 1}, {"p2": 1}], (name, qrels)
    assert read_labelled_questions(Path("q.tsv"), Path("q.qrels")).notes == (
        "1 of the 3 questions in q.qrels are not in q.tsv",
    )


def test_questions_name_their_own_passages_in_json_and_in_parquet(here):
    row = {"id": "a", "question": "port?", "supporting_ids": ["p1"]}
    write("a.jsonl", json.dumps(row))
    write("b.jsonl", json.dumps({"question": "port?", "metadata": {"supporting_ids": ["p1"]}}))
    pq.write_table(pa.Table.from_pylist([row]), "c.parquet")
    for name in ("a.jsonl", "b.jsonl", "c.parquet"):
        assert list(read_labelled_questions(Path(name)).judged.values()) == [{"p1": 1}], name


# The command


def test_cranfield_by_bm25_is_as_good_as_it_should_be(tmp_path, capsys):
    data = shared_data("cranfield")
    build_index(data / "cran.all.1400.xml", tmp_path / "i")
    asked = ["--questions", str(data / "cran.qry.xml"), "--qrels", str(data / "cranqrel.trec.txt")]
    assert main(["index", "eval", str(tmp_path / "i"), *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["questions"], found["measured"], found["labels"]) == (225, 225, "judgements")
    assert found["metrics"]["nDCG@10"]["mean"] == pytest.approx(0.366, abs=0.01)
    assert found["metrics"]["MAP"]["mean"] == pytest.approx(0.282, abs=0.01)
    assert found["metrics"]["MAP"]["low"] < 0.282 < found["metrics"]["MAP"]["high"]


def test_squad_paragraphs_are_the_passages_of_their_questions(tmp_path, capsys):
    data = shared_data("squad/super-bowl-50.v1.1.json")
    prepared = ["data", "prepare", "squad:test", "--file", str(data), "--out", str(tmp_path / "d")]
    assert main(prepared) == 0
    build_index(tmp_path / "d/corpus.jsonl", tmp_path / "i")
    found = []
    for questions in (data, tmp_path / "d/test.parquet"):
        capsys.readouterr()
        assert main(["index", "eval", str(tmp_path / "i"), "--questions", str(questions), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["metrics"] == found[1]["metrics"]
    assert found[0]["measured"] == 810
    assert found[0]["metrics"]["recall@3"]["mean"] > 0.8


def test_table_and_figures_of_each_question(here, capsys):
    write("q.tsv", "a\tport of Italy", "b\tchocolate fair", "c\tunjudged")
    write("q.qrels", "a 0 p1 1", "b 0 p3 1", "b 0 p2 2")
    command = ["index", "eval", "i", "--questions", "q.tsv", "--qrels", "q.qrels", "-k", "1,2"]
    assert main([*command, "--per-question", "each.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "i (bm25, 4 passages): 2 questions, the first 10 hits, by the passages judged relevant"
    )
    assert "recall@1  0.7500" in out
    assert "1 questions left out: without a relevant passage" in err
    each = [json.loads(line) for line in Path("each.jsonl").read_text().splitlines()]
    assert [row["id"] for row in each] == ["a", "b"]
    assert each[1]["metrics"]["recall@1"] == 1 / 2
    assert each[1]["ranking"] == ["p2", "p3"]


def test_answers_are_looked_for_where_no_passage_is_known(here, capsys):
    rows = [
        {"question": "which port is in Italy", "answer": ["Genoa"]},
        {"question": "which fair has Turin", "answer": "strawberry"},
        {"question": "is it tall", "answer": "yes"},
    ]
    write("q.jsonl", *map(json.dumps, rows))
    assert main(["index", "eval", "i", "--questions", "q.jsonl", "-k", "1"]) == 0
    out, err = capsys.readouterr()
    assert "answer recall@1  0.5000" in out
    assert "by the passages that contain an answer" in out
    assert "\nrecall@" not in out
    assert "1 questions left out: without an answer that a passage could contain" in err


def test_relevant_passages_that_the_index_lacks_count_as_not_found_and_are_said(here, capsys):
    write("q.tsv", "a\tport of Italy")
    write("q.qrels", "a 0 p1 1", "a 0 elsewhere 1")
    assert main(["index", "eval", "i", "--questions", "q.tsv", "--qrels", "q.qrels", "-k", "3"]) == 0
    out, err = capsys.readouterr()
    assert "recall@3  0.5000" in out
    assert "1 of 2 relevant passages are not in the index (elsewhere)" in err


def test_failed_searches_count_as_nothing_found_and_are_said():
    asked = [Question(str(n), str(n), ("x",)) for n in range(3)]
    index = Scripted({"0": ["a"], "1": Fault("timed_out", "too slow"), "2": ["a"]})
    found = evaluate_index(index, LabelledQuestions(asked, {str(n): {"a": 1} for n in range(3)}), (1,))
    assert found.metrics["recall@1"].mean == pytest.approx(2 / 3)
    assert (found.failed, found.measured) == (1, 3)
    assert found.notes == ["1 searches failed and count as empty results: too slow"]


def test_too_many_failed_searches_are_exit_code_1(here, capsys, monkeypatch):
    write("q.tsv", "a\tport of Italy")
    write("q.qrels", "a 0 p1 1")
    monkeypatch.setattr("srl.index.Index.outcomes", lambda self, queries, k: [Fault("failed", "down")])
    assert main(["index", "eval", "i", "--questions", "q.tsv", "--qrels", "q.qrels"]) == 1
    assert "1 of 1 searches failed" in capsys.readouterr().err


@contextmanager
def served(directory: str) -> Iterator[str]:
    """The URL of a real server of an index."""
    with bind(port=0) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(open_index(directory)), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        listener.listen()
        thread.start()
        yield url_of(listener)
        server.should_exit = True
        thread.join(60)


def test_a_server_is_measured_as_its_index_is(here, capsys):
    write("q.tsv", "a\tport of Italy", "b\tchocolate fair")
    write("q.qrels", "a 0 p1 1", "b 0 p3 1")
    asked, found = ["--questions", "q.tsv", "--qrels", "q.qrels", "--json"], []
    with served("i") as url:
        for where in (["--url", url], ["i"]):
            assert main(["index", "eval", *where, *asked]) == 0
            found.append(json.loads(capsys.readouterr().out))
    assert found[0]["metrics"] == found[1]["metrics"]
    assert found[0]["index"] == {"url": url, "digest": found[1]["index"]["digest"]}
    assert main(["index", "eval", "--url", url, *asked]) == 2
    assert main(["index", "eval", *asked]) == 2
    assert "expected either a directory or a server" in capsys.readouterr().err


def test_a_server_is_asked_long_questions_as_its_index_is(here, capsys):
    """A policy's queries are limited to 1,000 characters, those of a test collection are not."""
    write("q.tsv", f"a\tport of Italy {'and so on ' * 200}")
    write("q.qrels", "a 0 p1 1")
    asked = ["--questions", "q.tsv", "--qrels", "q.qrels", "--json"]
    with served("i") as url:
        assert main(["index", "eval", "--url", url, *asked]) == 0
    there = json.loads(capsys.readouterr().out)
    assert main(["index", "eval", "i", *asked]) == 0
    assert there["metrics"] == json.loads(capsys.readouterr().out)["metrics"]


def test_a_server_with_other_ids_is_not_taken_for_a_bad_one():
    index = Scripted({"q": ["x", "y"]})
    found = evaluate_index(index, LabelledQuestions([Question("q", "q", ())], {"q": {"a": 1}}), (1,))
    assert found.notes == [
        "no hit of any question was judged, relevant or not: are the ids those of the judgements?"
    ]


@pytest.mark.parametrize(
    ("files", "arguments", "message"),
    [
        (
            {"q.qrels": "a 0 p1 high"},
            [],
            "q.qrels:1: expected `question 0 passage grade`, found 'a 0 p1 high'",
        ),
        ({"q.qrels": "a 0 p1 1\nb p1"}, [], "q.qrels:2: expected `question 0 passage grade`"),
        ({"q.qrels": "a 0 p1 1\na 0 p1 2"}, [], "q.qrels:2: question a grades passage p1 2 here and 1"),
        ({"q.qrels": ""}, [], "q.qrels: expected judgements"),
        ({"q.qrels": "z 0 p1 1"}, [], "q.qrels judges none of the questions in q.tsv: its ids are z, …"),
        ({"q.qrels": "a 0 other 1"}, [], "none of the 1 relevant passages (other) is in the index"),
        ({"q.qrels": "a 0 p1 0"}, [], "none of the 2 questions can be measured"),
        ({"q.tsv": "a port"}, [], "q.tsv:1: expected ID <tab> QUESTION, found 'a port'"),
        ({"q.tsv": "\n\n"}, [], "q.tsv: expected questions, found none"),
        ({"q.tsv": "a\tx\na\ty"}, [], "q.tsv: two questions have the id 'a'"),
        ({"q.tsv": "<top>\n<num> 1\n</top>"}, [], "q.tsv: topic 1: expected <num> and <title>"),
        ({"q.tsv": "<a>"}, [], "q.tsv: expected topics, <top> … </top>, found none"),
        ({"q.tsv": "\udcff\udcfe"}, [], "q.tsv: expected text in UTF-8"),
        ({"q.qrels": "\udcff\udcfe"}, [], "q.qrels: expected text in UTF-8"),
        ({"q.gz": "a"}, ["--qrels", "q.gz"], "q.gz: broken gzip file"),
        ({"q.tsv.gz": "a"}, ["--questions", "q.tsv.gz"], "q.tsv.gz: broken gzip file"),
        ({}, ["-k", "0,3"], "--k 0,3: expected numbers from 1"),
        ({}, ["-k", "ten"], "--k ten: expected numbers from 1"),
        ({}, ["--qrels", "nowhere"], "nowhere: no such file"),
        ({}, ["--questions", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        ({}, ["--questions", "nowhere.parquet"], "nowhere.parquet: no such file"),
        ({"e.jsonl": ""}, ["--questions", "e.jsonl"], "e.jsonl: expected questions, found none"),
        ({"e.jsonl": "{}"}, ["--questions", "e.jsonl"], "e.jsonl:1: expected a field 'question'"),
        ({"e.parquet": "PAR"}, ["--questions", "e.parquet"], "e.parquet: expected a parquet file"),
        ({}, ["--answers"], "none of the 2 questions can be measured"),
    ],
)
def test_a_mistake_is_one_line(here, capsys, files, arguments, message):
    write("q.tsv", "a\tport of Italy", "b\tchocolate")
    write("q.qrels", "a 0 p1 1")
    for name, text in files.items():
        Path(name).write_text(text, errors="surrogateescape")
    assert main(["index", "eval", "i", "--questions", "q.tsv", "--qrels", "q.qrels", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert [line for line in err.splitlines() if line.startswith("srl:")] == err.splitlines()[-1:]


@pytest.mark.parametrize("library", ["ir_measures", "scipy.stats"])
def test_without_the_library_it_says_what_to_install(here, capsys, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    write("q.tsv", "a\tport of Italy", "b\tGenoa", "c\tfair")
    write("q.qrels", "a 0 p1 1", "b 0 p2 1", "b 0 p1 1", "b 0 p3 1", "c 0 p2 1")
    assert main(["index", "eval", "i", "--questions", "q.tsv", "--qrels", "q.qrels"]) == 2
    assert "[ir]'" in capsys.readouterr().err
