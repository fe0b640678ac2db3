"""`srl data prepare --passage-words`: long passages in parts, and the part that a question is about."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from srl.cli.app import app
from srl.data.corpus import read_corpus
from srl.data.parquet import read_questions
from srl.data.split_passages import Splitter, name_parts
from srl.files import read_manifest
from srl.trajectory import Passage, Question

BIRTH = "Ana Lund was born in Osk on 3 May 1901 to a family of weavers."
WORK = "She made the film Rye with her brother in the summer of 1930."
DEATH = "In 1960 she died in Vale, where a street is named after Ana Lund."
ANA = Passage("ana", f'"Ana Lund"\n{BIRTH} {WORK} {DEATH}')
PARTS = {"ana": Splitter(15).split(ANA)}


def question(*golds: str, **metadata: Any) -> Question:
    known = {"supporting_ids": ["ana"], "supporting_titles": ["Ana Lund"], **metadata}
    return Question(id="q", text="Who?", golden_answers=golds, data_source="d", metadata=known)


def test_a_long_passage_is_split_at_the_ends_of_sentences_and_keeps_its_title():
    assert [part.id for part in PARTS["ana"]] == ["ana#1", "ana#2", "ana#3"]
    assert [part.contents for part in PARTS["ana"]] == [
        f'"Ana Lund"\n{text}' for text in (BIRTH, WORK, DEATH)
    ]


@given(st.text(st.sampled_from("ab .?!\n“”é本。"), max_size=400), st.integers(1, 12))
def test_parts_have_all_words_in_order_and_none_has_too_many(text, most):
    parts = Splitter(most).split(Passage("p", f'"T"\n{text}'))
    assert "".join("".join(part.text.split()) for part in parts) == "".join(text.split())
    assert all(len(part.text.split()) <= most for part in parts)
    assert len({part.id for part in parts}) == len(parts)


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        (question("a weaver's daughter"), "ana#1"),
        (question("Vale"), "ana#3"),
        (question("yes"), "ana#1"),
        (question("Vale", supporting_titles=["Ana Lund", "Rye"]), "ana#2"),
        (question("Rye", evidences=[["Ana Lund", "place of death", "Vale"]]), "ana#3"),
        (question("Rye", question_decomposition=[{"question": "?", "answer": "Vale", "id": "ana"}]), "ana#3"),
        (question("Vale", supporting_facts=[{"title": "Ana Lund", "id": "ana", "text": WORK}]), "ana#2"),
        (question("Osk", supporting_facts=[{"title": "Ana Lund", "id": "ana"}]), "ana#1"),
        (question("Vale", evidences=["not", {"a": "triple"}, []], question_decomposition="none"), "ana#3"),
    ],
    ids=["nothing stated", "answer", "yes or no", "other title", "evidence", "decomposition", "sentence",
         "no sentence", "other forms"],
)  # fmt: skip
def test_a_question_names_the_part_that_has_most_of_what_its_metadata_state(asked, part):
    named = name_parts(asked, PARTS).metadata
    assert named["supporting_ids"] == [part]
    for key in ("supporting_facts", "question_decomposition"):
        rows = named.get(key, [])
        assert not isinstance(rows, list) or all(row["id"] == part for row in rows)


def squad(folder: Path) -> Path:
    """A long paragraph that two articles of one title have, and a short one."""
    answers = [{"text": "Vale", "answer_start": 0}]
    long, short = (
        {"context": text, "qas": [{"id": name, "question": f"{name}?", "answers": answers}]}
        for name, text in (("long", ANA.text), ("short", "A short one."))
    )
    again = {
        **long,
        "context": f"{ANA.text} ",
        "qas": [{**long["qas"][0], "id": "again", "question": "again?"}],
    }
    file = folder / "squad-train.json"
    articles = [{"title": "Ana_Lund", "paragraphs": paragraphs} for paragraphs in ([long, short], [again])]
    file.write_text(json.dumps({"data": articles}))
    return file


def test_the_command_splits_after_merging_and_questions_name_a_part_of_the_corpus(tmp_path):
    out = tmp_path / "out"
    ran = CliRunner().invoke(
        app, ["data", "prepare", f"squad={squad(tmp_path)}", "--passage-words", "15", "--out", str(out)]
    )
    assert ran.exit_code == 0, ran.output
    corpus = {passage.id: passage for passage in read_corpus(out / "corpus.jsonl")}
    questions = read_questions(out / "train.parquet")
    gold = {Path(asked.id).name: asked.metadata["supporting_ids"] for asked in questions}
    assert {name: [corpus[one].text for one in ids] for name, ids in gold.items()} == {
        "long": [DEATH], "again": [DEATH], "short": ["A short one."],
    }  # fmt: skip
    manifest = read_manifest(out, "data")
    assert (manifest["passage_words"], manifest["split"], manifest["passages"]) == (15, 1, 4)
