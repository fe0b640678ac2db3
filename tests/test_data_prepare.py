"""Composing a training directory: merging, splitting, templates, downloads, and nothing half-written."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.data.corpus import read_corpus
from srl.data.parquet import read_questions
from srl.data.prepare import Input, parse_input, prepare
from srl.data.sources import SOURCES
from srl.data.splits import guess_split, split_off
from srl.errors import UserError
from srl.trajectory import Question

FIXTURES = Path(__file__).parent / "fixtures" / "data"


def given_file(name: str, file: str) -> Input:
    return Input(SOURCES[name], (FIXTURES / file,))


def test_sources_are_merged_into_one_training_set_and_one_corpus(tmp_path):
    inputs = [given_file("squad", "squad-train.json"), given_file("2wiki-corpus", "2wiki_corpus.json")]
    made = prepare([*inputs, given_file("nq", "nq-open.train.jsonl")], tmp_path / "out")
    assert (made.questions, made.passages) == ({"train": 7}, 6)
    questions = read_questions(tmp_path / "out" / "train.parquet")
    assert [q.data_source for q in questions] == ["squad"] * 4 + ["nq"] * 3
    assert questions[0].prompt[0]["content"].endswith("Question: On which river is Osk?\n")
    corpus = {passage.id for passage in read_corpus(tmp_path / "out" / "corpus.jsonl")}
    assert {name for q in questions[:4] for name in q.metadata["supporting_ids"]} <= corpus


def test_a_training_question_that_the_test_asks_too_is_dropped_and_said(tmp_path):
    test = tmp_path / "test.jsonl"
    test.write_text('{"question": "Who founded the village of  Lower Thorne?", "answer": ["Maud Ashby"]}\n')
    made = prepare([given_file("nq", "nq-open.train.jsonl"), Input(SOURCES["nq"], (test,))], tmp_path / "out")
    assert made.questions == {"train": 2, "test": 1}
    assert len(made.notes) == 1


def test_no_question_of_the_test_is_held_out_for_validation(tmp_path):
    """The test set asks some of the training questions in other words, under the same ids."""
    words = {"train": [f"Who is number {n}?" for n in range(30)],
             "test": [f"Which one has the number {n}?" for n in range(20)]}  # fmt: skip
    for split, texts in words.items():
        rows = (asked(text, id=f"q{n}", data_source="own") for n, text in enumerate(texts))
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    inputs = [parse_input(f"questions:{split}={tmp_path / split}.jsonl") for split in words]
    made = prepare(inputs, tmp_path / "out", validation=5)
    assert made.questions == {"train": 5, "validation": 5, "test": 20}
    kept = [q for name in ("train", "validation") for q in read_questions(made.directory / f"{name}.parquet")]
    assert {q.id.rpartition("/")[2] for q in kept} == {f"q{n}" for n in range(20, 30)}


@pytest.mark.parametrize(
    "foreign", ["notes.txt", "sub/thesis.tex", "train.csv", "sub/manifest.json", "a link", "no manifest"]
)
def test_overwrite_replaces_what_prepare_wrote_and_nothing_else(tmp_path, foreign):
    inputs, out = [given_file("nq", "nq-open.train.jsonl")], tmp_path / "out"
    prepare(inputs, out)
    with pytest.raises(UserError):
        prepare(inputs, out)
    assert prepare(inputs, out, limit=1, overwrite=True).questions == {"train": 1}
    if foreign == "no manifest":
        (out / "manifest.json").unlink()
    elif foreign == "a link":
        (out / foreign).symlink_to(tmp_path)
    else:
        (out / foreign).parent.mkdir(exist_ok=True)
        (out / foreign).write_text("years of work")
    before = sorted(out.rglob("*"))
    with pytest.raises(UserError):
        prepare(inputs, out, overwrite=True)
    assert sorted(out.rglob("*")) == before


def own_files(folder: Path, questions: list[dict], passages: list[dict]) -> list[Input]:
    """A user's own questions and passages."""
    for name, rows in (("questions", questions), ("corpus", passages)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [Input(SOURCES[name], (folder / f"{name}.jsonl",)) for name in ("questions", "corpus")]


def asked(text: str, **fields) -> dict:
    return {"question": text, "golden_answers": ["red"], **fields}


def test_a_validation_set_shares_no_paragraph_where_long_passages_are_split(tmp_path):
    """Each paragraph has two parts, and the two questions about it are answered by different ones."""
    text = "The flag of A{0} is red{0} . Here. The flag of B{0} is blue{0} ."
    passages = [{"id": f"p{n}", "title": f"T{n}", "text": text.format(n)} for n in range(20)]
    questions = [
        asked(f"what is {colour}{n}", golden_answers=[f"{colour}{n}"], metadata={"supporting_ids": [f"p{n}"]})
        for n in range(20)
        for colour in ("red", "blue")
    ]
    prepare(own_files(tmp_path, questions, passages), tmp_path / "out", validation=7, passage_words=8)
    train, held = (read_questions(tmp_path / "out" / f"{name}.parquet") for name in ("train", "validation"))
    named = [{q.metadata["supporting_ids"][0] for q in part} for part in (train, held)]
    assert {name.partition("#")[2] for name in named[1]} == {"1", "2"}, "they name parts"
    pages = [{name.partition("#")[0] for name in part} for part in named]
    assert not pages[0] & pages[1]
    assert len(held) == 8, "whole paragraphs, so one more"


def test_a_row_says_its_split_in_any_usual_way_or_is_refused(tmp_path):
    rows = [asked(f"q{n}", split=split) for n, split in enumerate(["dev", "Test", "train", "VALIDATION"])]
    passages = [{"id": "p", "contents": "red"}]
    made = prepare(own_files(tmp_path, rows, passages), tmp_path / "out")
    assert made.questions == {"train": 1, "validation": 2, "test": 1}
    with pytest.raises(UserError):
        prepare(own_files(tmp_path, [asked("q9", split="held-out")], passages), tmp_path / "other")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 200)), min_size=20, max_size=80, unique_by=lambda p: p[1]
    )
)
def test_splitting_neither_loses_nor_shares(pairs):
    questions = [
        Question(f"q{n}", "?", ("x",), "nq", metadata={"supporting_ids": [f"p{p}"]}) for p, n in pairs
    ]
    try:
        rest, held = split_off(questions, 5)
    except UserError:
        return
    assert sorted(q.id for q in (*rest, *held)) == sorted(q.id for q in questions)
    shared = [{q.metadata["supporting_ids"][0] for q in part} for part in (rest, held)]
    assert not shared[0] & shared[1]
    assert len(held) >= 5


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 40))
def test_each_source_gives_its_part_within_one_question(sizes, amount):
    questions = [
        Question(f"s{number}/{n}", "?", ("x",), f"s{number}", metadata={"supporting_ids": [f"{number}-{n}"]})
        for number, size in enumerate(sizes)
        for n in range(size)
    ]
    if amount >= len(questions):
        return
    held = Counter(q.data_source for q in split_off(questions, amount)[1])
    assert held.total() == amount
    for number, size in enumerate(sizes):
        assert abs(held[f"s{number}"] - amount * size / len(questions)) < 1


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("hotpot_train_v1.1.json", "train"), ("NQ-open.dev.jsonl", "validation"),
        ("hotpot_dev_v1_simplified.json", "validation"), ("wikipedia-test-without-answers.json", "test"),
        ("validation.parquet", "validation"), ("training-notes.json", None), ("train-and-dev.json", None),
        ("popQA.tsv", None),
    ],
)  # fmt: skip
def test_the_split_is_what_the_files_name_says(name, split):
    assert guess_split(Path("dev") / name) == split
