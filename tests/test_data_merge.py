"""Several corpora become one: what is the same, and which passage is gold for which question."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from srl.data.corpus import passage_of, read_corpus
from srl.data.merge import passage_key
from srl.data.parquet import read_questions
from srl.data.prepare import Prepared, parse_input, prepare
from srl.trajectory import Passage, Question

FIXTURES = Path(__file__).parent / "fixtures" / "data"


def rows(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def prepared(folder: Path, *inputs: str, **options: Any) -> Prepared:
    return prepare([parse_input(text) for text in inputs], folder / "out", **options)


def corpus(made: Prepared) -> dict[str, Passage]:
    return {passage.id: passage for passage in read_corpus(made.directory / "corpus.jsonl")}


def asked(made: Prepared, split: str = "train") -> list[Question]:
    return read_questions(made.directory / f"{split}.parquet")


def hotpot(
    name: str, texts: Sequence[tuple[str, list[str]]], facts: object, **more: object
) -> dict[str, Any]:
    row = {"_id": name, "question": f"{name}?", "answer": "x", "type": "bridge"}
    return {**row, "context": [list(text) for text in texts], "supporting_facts": facts, **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("A comedy- drama film.", "A comedy-drama\nfilm."),
        ("It was “red”.", 'It was "red".'),
        ("It was ``red''.", 'It was "red".'),
        ("Anna’s hut", "Anna's hut"),
        ("K\u00f6hler", "Ko\u0308hler"),
    ],
)
def test_white_space_quotation_marks_and_composed_letters_make_no_difference(one, other):
    assert passage_key(passage_of("T", one)) == passage_key(passage_of(" T", other, "nq"))


def test_gold_passage_that_another_file_had_first_is_named_by_its_id_there(tmp_path):
    text = ["Osk is old.", "It lies on a river."]
    first = rows(tmp_path / "a.jsonl", {"id": "17", "contents": '"Osk"\nOsk is old . It lies on a river .'})
    row = hotpot("a", [("Osk", text), ("Rye", ["A grass.", "It is high."])], [["Osk", 1], ["Rye", 0]])
    made = prepared(tmp_path, f"corpus={first}", f"hotpotqa:train={rows(tmp_path / 'h.jsonl', row)}")
    [question] = asked(made)
    rye = passage_of("Rye", "A grass. It is high.", "hotpotqa").id
    assert (made.passages, made.merged) == (2, 1)
    assert question.metadata["supporting_ids"] == ["17", rye]
    assert question.metadata["supporting_facts"] == [
        {"title": "Osk", "id": "17", "text": "It lies on a river."},
        {"title": "Rye", "id": rye, "text": "A grass."},
    ]  # fmt: skip
    assert set(question.metadata["supporting_ids"]) == set(corpus(made))


def test_gold_passage_is_the_one_with_its_text_where_a_title_has_two(tmp_path):
    other = rows(tmp_path / "c.jsonl", {"title": "Osk", "text": "Osk is a river."})
    row = hotpot("a", [("Osk", ["Osk is a town.", "It is old."])], [["Osk", 0]])
    made = prepared(tmp_path, f"hotpotqa-corpus={other}", f"hotpotqa:train={rows(tmp_path / 'h.jsonl', row)}")
    [question] = asked(made)
    [gold] = question.metadata["supporting_ids"]
    assert corpus(made)[gold].text == "Osk is a town. It is old."


def test_titles_become_ids_where_one_passage_has_them_or_one_of_the_same_data_set(tmp_path):
    wiki = rows(
        tmp_path / "w.json", {"title": "Osk", "text": "A town."}, {"title": "Rye", "text": "A grass."}
    )
    other = rows(tmp_path / "o.json", {"title": "Osk", "text": "A river."}, {"title": "Elm", "text": "One."},
                 {"title": "Elm", "text": "Two."})  # fmt: skip
    questions = [
        {"question": f"q{number}?", "answer": "x", "supporting_titles": titles}
        for number, titles in enumerate((["Osk", "Rye"], ["Elm", "Rye"], ["Nowhere", "Rye"]))
    ]
    asked_of = rows(tmp_path / "h.jsonl", *questions)
    made = prepared(tmp_path, f"corpus={other}", f"hotpotqa-corpus={wiki}", f"hotpotqa:train={asked_of}")
    first, *others = asked(made)
    assert [corpus(made)[name].text for name in first.metadata["supporting_ids"]] == ["A town.", "A grass."]
    assert all("supporting_ids" not in question.metadata for question in others)


def test_subjects_of_evidence_stand_in_for_titles(tmp_path):
    wiki = rows(
        tmp_path / "w.json", {"title": "The Salt Road", "text": "A film."}, {"title": "Ana", "text": "Born."}
    )
    triples = [["The Salt Road", "director", "Ana"], ["Ana", "place of birth", "Osk"]]
    row = {"_id": "a", "question": "Where?", "answer": "Osk", "type": "compositional"}
    alias = {"_id": "b", "question": "Who?", "evidences": [["The salt road", "director", "Ana"]]}
    file = rows(tmp_path / "t.jsonl", {**row, "evidences": triples}, {**row, **alias})
    made = prepared(tmp_path, f"2wiki-corpus={wiki}", f"2wikimultihopqa:train={file}")
    known, unknown = asked(made)
    assert known.metadata["supporting_titles"] == ["The Salt Road", "Ana"]
    assert [corpus(made)[name].title for name in known.metadata["supporting_ids"]] == ["The Salt Road", "Ana"]
    assert (known.metadata["hops"], known.metadata["evidences"]) == (2, triples)
    assert unknown.metadata.keys() == {"type", "hops", "evidences"}


def test_ids_of_ones_own_corpus_follow_a_passage_that_was_merged(tmp_path):
    mine = rows(
        tmp_path / "c.jsonl",
        {"id": "a", "contents": '"Osk"\nA town.'},
        {"id": "b", "contents": '"Osk"\nA  town.'},
    )
    question = {"id": "1", "question": "Who?", "golden_answers": ["x"], "metadata": {"supporting_ids": ["b"]}}
    made = prepared(tmp_path, f"questions={rows(tmp_path / 'q.jsonl', question)}", f"corpus={mine}")
    assert asked(made)[0].metadata["supporting_ids"] == ["a"]
    assert (list(corpus(made)), made.merged) == (["a"], 1)


def test_paragraphs_of_nq_become_passages_and_gold(tmp_path):
    row = {
        "id": "5",
        "question": "who made rye",
        "answer": ["Ana"],
        "title": "Rye",
        "paragraph": "Ana made rye .",
    }
    made = prepared(tmp_path, f"nq:test={rows(tmp_path / 'nq.jsonl', row)}")
    [question] = asked(made, "test")
    assert [corpus(made)[name].contents for name in question.metadata["supporting_ids"]] == [
        '"Rye"\nAna made rye .'
    ]
    assert (question.metadata["supporting_titles"], question.metadata["hops"]) == (["Rye"], 1)


def test_steps_of_musique_name_the_passage_of_each(tmp_path):
    made = prepared(tmp_path, f"musique:train={FIXTURES / 'musique_full_dev.jsonl'}")
    first = asked(made)[0].metadata["question_decomposition"]
    titles = [corpus(made)[step.pop("id")].title for step in first]
    assert titles == ["Thorne Mill", "Ashby"]
    assert first == [
        {"question": "Who owns Thorne Mill?", "answer": "Ashby"},
        {"question": "Where does the #1 family come from?", "answer": "Norland"},
    ]
