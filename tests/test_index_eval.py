"""`srl index eval`: labels of every kind, measures, servers, comparison with another index, bad input."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.live_server import running
from tests.shared_data import shared_data

from srl.cli import main
from srl.data.relevance import LabelledQuestions, read_labelled_questions
from srl.evaluate.index_eval import evaluate_index
from srl.index import Fault, build_index, open_index
from srl.serve.server import create_app
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


def evaluated(capsys, *arguments: str) -> dict:
    """What `srl index eval … --json` prints."""
    capsys.readouterr()
    assert main(["index", "eval", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_answers_are_looked_for_where_no_passage_is_known(here, capsys):
    rows = [
        {"question": "which port is in Italy", "answer": ["Genoa"]},
        {"question": "which fair has Turin", "answer": "strawberry"},
        {"question": "is it tall", "answer": "yes"},
    ]
    write("q.jsonl", *map(json.dumps, rows))
    found = evaluated(capsys, "i", "--questions", "q.jsonl", "-k", "1")
    assert (found["labels"], found["measured"]) == ("answers", 2)
    assert set(found["metrics"]) == {"answer recall@1", "answer MRR"}
    assert found["metrics"]["answer recall@1"]["mean"] == 0.5


def test_failed_searches_count_as_nothing_found_and_are_said():
    asked = [Question(str(n), str(n), ("x",)) for n in range(3)]
    index = Scripted({"0": ["a"], "1": Fault("timed_out", "too slow"), "2": ["a"]})
    found = evaluate_index(index, LabelledQuestions(asked, {str(n): {"a": 1} for n in range(3)}), (1,))
    assert found.metrics["recall@1"].mean == pytest.approx(2 / 3)
    assert (found.failed, found.measured) == (1, 3)
    assert "too slow" in found.notes[0]


def test_a_server_is_measured_as_its_index_is_with_long_questions_too(here, capsys):
    """A policy's queries are limited to 1,000 characters, those of a test collection are not."""
    write("q.tsv", f"a\tport of Italy {'and so on ' * 200}", "b\tchocolate fair")
    write("q.qrels", "a 0 p1 1", "b 0 p3 1")
    asked = ["--questions", "q.tsv", "--qrels", "q.qrels"]
    with running(create_app(open_index("i"))) as url:
        there, here_ = evaluated(capsys, url, *asked), evaluated(capsys, "i", *asked)
        both = evaluated(capsys, "i", "--against", url, *asked)
        assert main(["index", "eval", url, *asked, "--set", "k1=1"]) == 2
    assert there["metrics"] == here_["metrics"] == both["against"]["metrics"]
    assert there["index"] == {"url": url, "digest": here_["index"]["digest"]}
    assert all(each["test"]["difference"] == 0 for each in both["comparison"]["measures"].values())


@pytest.mark.parametrize(
    ("files", "arguments", "where"),
    [
        ({"q.qrels": "a 0 p1 high"}, [], "q.qrels:1:"),
        ({"q.qrels": "a 0 p1 1\na 0 p1 2"}, [], "q.qrels:2:"),
        ({"q.qrels": "a 0 other 1"}, [], "other"),
        ({"q.tsv": "a port"}, [], "q.tsv:1:"),
        ({"q.tsv": "<a>"}, [], "q.tsv:"),
        ({"q.tsv.gz": "a"}, ["--questions", "q.tsv.gz"], "q.tsv.gz:"),
        ({}, ["-k", "0,3"], "--k"),
        ({"e.jsonl": "{}"}, ["--questions", "e.jsonl"], "e.jsonl:1:"),
        ({}, ["--answers"], ""),
    ],
)
def test_a_mistake_is_one_line_that_names_the_place(here, capsys, files, arguments, where):
    write("q.tsv", "a\tport of Italy", "b\tchocolate")
    write("q.qrels", "a 0 p1 1")
    for name, text in files.items():
        Path(name).write_text(text, errors="surrogateescape")
    assert main(["index", "eval", "i", "--questions", "q.tsv", "--qrels", "q.qrels", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if line.startswith("srl:")] == err.splitlines()[-1:]
    assert where in err.splitlines()[-1]


def test_another_index_is_compared_on_the_same_questions(here, capsys):
    passages = [
        Passage("p0", '"Running"\nshe runs and runs'),
        Passage("p1", '"Runner"\na runner is running on grass'),
        Passage("p2", '"Port"\nthe port of Genoa'),
        Passage("p3", '"Ports"\nports and more ports are in Italy'),
    ]
    build_index(passages, "plain", options={"stemmer": "none"})
    build_index(passages, "stemmed")
    write("q.tsv", "1\tports", "2\trunning")
    write("q.qrels", "1 0 p2 1", "2 0 p1 1")
    command = ["stemmed", "--against", "plain", "--questions", "q.tsv", "--qrels", "q.qrels", "-k", "10"]
    found = evaluated(capsys, *command)
    recall = found["comparison"]["measures"]["recall@10"]
    assert (recall["a"]["mean"], recall["b"]["mean"], recall["test"]["difference"]) == (0.5, 1, 0.5)
    assert (found["index"]["directory"], found["against"]["index"]["directory"]) == ("stemmed", "plain")
    changed = found["comparison"]["changed"]
    assert [row[0] for row in changed] == ["1", "2"]
    assert (changed[0][1], changed[0][3]) == (0, 0.5)
    assert main(["index", "eval", *command]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^recall@10 +0\.5000 +1\.0000 +\+0\.5000 ", out, re.M)
    assert re.search(r"^1 .*ports$", out, re.M)
    same = evaluated(capsys, "plain", "--against", "./plain", *command[3:])
    assert same["comparison"]["overlap"]["mean"] == 1
    assert all(
        each["test"]["p"] == 1 and each["worse"] == 0 for each in same["comparison"]["measures"].values()
    )
