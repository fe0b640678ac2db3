"""Every published question format: what a good file gives, and what a broken one is told."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from srl.data.sources import SOURCES
from srl.errors import UserError
from srl.trajectory import Question

FIXTURES = Path(__file__).parent / "fixtures" / "data"
FILES = {
    "nq": "nq-open.train.jsonl", "hotpotqa": "hotpot_dev_full.json", "2wikimultihopqa": "2wiki_dev.json",
    "musique": "musique_full_dev.jsonl", "triviaqa": "triviaqa-dev.json", "popqa": "popqa.tsv",
    "bamboogle": "bamboogle.csv", "asearcher": "asearcher.jsonl", "squad": "squad-train.json",
    "questions": "flashrag-train.jsonl",
}  # fmt: skip


def complaint(name: str, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        list(SOURCES[name].questions(path, "train"))
    message = str(caught.value)
    assert "\n" not in message
    return message


READ: dict[str, list[tuple[str, tuple[str, ...], dict]]] = {
    "nq": [("0", ("Maud Ashby",), {"hops": 1}), ("1", ("1871", "4 May 1871"), {"hops": 1}), ("2", (), {})],
    "hotpotqa": [
        ("aa01", (),
         {"type": "comparison", "level": "hard", "supporting_titles": ["Thorne Mill", "Osk Mill"]}),
        ("", (), {"hops": 2, "supporting_titles": ["Lower Thorne", "Maud Ashby"]}),
    ],
    "2wikimultihopqa": [
        ("", (), {"type": "compositional", "hops": 2}),
        ("", (), {"type": "bridge_comparison", "hops": 4}),
    ],
    "musique": [
        ("", ("Norland", "the Norland", "Nordland"),
         {"hops": 2, "type": "2hop", "supporting_titles": ["Thorne Mill", "Ashby"]}),
        ("3hop1__7_8_9", (), {"hops": 3}),
    ],
    "triviaqa": [
        ("", ("Rye", "Rye grain", "Secale"), {"hops": 1, "supporting_titles": ["Rye"]}),
        ("", ("Grey", "Gray", "silver grey"), {}),
    ],
    "popqa": [
        ("501", ("Osk", "Osk (town)"),
         {"hops": 1, "prop": "place of birth", "s_pop": "120", "supporting_titles": ["Ana Reuss"]}),
        ("502", ("film director", "director"), {}),
    ],
    "bamboogle": [("0", (), {"hops": 2}), ("1", ("1640",), {})],
    "asearcher": [("q-9", ("The Salt Road", "Salt Road"), {}), ("17", (), {}), ("z", (), {})],
    "squad": [
        ("", ("Osk", "river Osk"), {"hops": 1, "supporting_titles": ["Osk (town)"]}), *[("", (), {})] * 3
    ],
}  # fmt: skip
"""What the questions of a published file have: own id, answers, some metadata; empty if not compared."""


@pytest.mark.parametrize("name", READ)
def test_a_published_file_gives_its_questions(name):
    questions = list(SOURCES[name].questions(FIXTURES / FILES[name], "train", None))
    assert len(questions) == len(READ[name])
    for question, (own, answers, metadata) in zip(questions, READ[name], strict=True):
        assert question.id.startswith(f"{name}/train/")
        assert question.id.endswith(own)
        assert question.golden_answers == (answers or question.golden_answers)
        assert question.metadata.items() >= metadata.items()
        assert (question.data_source, question.split) == (name, "train")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_cut_or_of_another_format_is_named(name, tmp_path):
    path = tmp_path / FILES[name]
    assert complaint(name, path).startswith(f"{path}: ")
    content = (FIXTURES / FILES[name]).read_bytes()
    path.write_bytes(content[: int(len(content) * 0.9)].rstrip(b"\n}]"))
    assert complaint(name, path).startswith(f"{path}:")
    shutil.copy(FIXTURES / ("nq-open.train.jsonl" if name == "popqa" else "popqa.tsv"), path)
    assert complaint(name, path).startswith(f"{path}:")


ODD_VALUES = (None, 1, "", "x", [], [1], [[]], [["x", "y"]], {"x": 1})


def places(value: object, at: tuple = ()) -> list[tuple]:
    """The path to every value inside `value`."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, inner in inside for place in places(inner, (*at, key)))]


def replaced(value: object, at: tuple, new: object) -> object:
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if not file.endswith(("csv", "tsv"))])
def test_whatever_stands_in_a_field_the_worst_is_a_users_mistake(name, tmp_path):
    text = (FIXTURES / FILES[name]).read_text()
    is_lines = FILES[name].endswith(".jsonl")
    rows = [json.loads(text.splitlines()[-1])] if is_lines else json.loads(text)
    path = tmp_path / "file.json"
    for place in places(rows[:1] if isinstance(rows, list) else rows):
        for value in ODD_VALUES:
            path.write_text(json.dumps(replaced(rows, place, value)))
            for read_it in (SOURCES[name].passages, lambda file: SOURCES[name].questions(file, "train")):
                assert worst(read_it, path) in (None, UserError), (place, value)


def worst(read_it: Callable[[Path], Iterable[object]], path: Path) -> type[BaseException] | None:
    try:
        list(read_it(path))
    except Exception as error:
        return type(error)
    return None


HUB: dict[str, tuple[dict, Question]] = {
    "hotpotqa": (
        {
            "id": "5a7a", "question": "Who?", "answer": "Ada", "type": "bridge", "level": "hard",
            "supporting_facts": {"title": ["Ada", "Bo"], "sent_id": [0, 1]},
            "context": {"title": ["Ada", "Bo"], "sentences": [["Ada is."], ["Bo is.", " Bo was."]]},
        },
        Question("hotpotqa/train/5a7a", "Who?", ("Ada",), "hotpotqa"),
    ),
    "triviaqa": (
        {
            "question": "Who?", "question_id": "tc_1", "question_source": "x",
            "entity_pages": {"doc_source": ["TagMe"], "filename": ["Ada.txt"], "title": ["Ada"],
                             "wiki_context": [""]},
            "search_results": {"title": ["y"], "rank": [1]},
            "answer": {
                "aliases": ["Ada", "Ada B."], "normalized_aliases": ["ada"], "matched_wiki_entity_name": "",
                "normalized_value": "ada", "type": "WikipediaEntity", "value": "Ada",
            },
        },
        Question("triviaqa/train/tc_1", "Who?", ("Ada", "Ada B."), "triviaqa"),
    ),
    "squad": (
        {"id": "5", "title": "Ada_B", "context": "Ada is.", "question": "Who?",
         "answers": {"text": ["Ada", "Ada", "her"], "answer_start": [0, 0, 3]}},
        Question("squad/train/5", "Who?", ("Ada", "her"), "squad"),
    ),
    "popqa": (
        {"id": 7, "question": "Who?", "possible_answers": '["Ada", "A"]', "s_wiki_title": "Ada", "s_pop": 3},
        Question("popqa/train/7", "Who?", ("Ada", "A"), "popqa"),
    ),
    "musique": (
        {"id": "2hop__1_2", "question": "Who?", "answer": "Ada", "answer_aliases": ["A"], "answerable": True,
         "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "Ada is.", "is_supporting": True}],
         "question_decomposition": [{"id": 1, "question": "q", "answer": "a", "paragraph_support_idx": 0}]},
        Question("musique/train/2hop__1_2", "Who?", ("Ada", "A"), "musique"),
    ),
    "questions": (
        {"id": "q1", "question": "Who?", "golden_answers": ["Ada"], "metadata": {"hops": 2}},
        Question("train-0/train/q1", "Who?", ("Ada",), "train-0", metadata={"hops": 2}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HUB))
def test_the_parquet_of_the_hub_is_read_as_the_published_file_is(name, tmp_path):
    row, expected = HUB[name]
    path = tmp_path / "train-0.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    (question,) = SOURCES[name].questions(path, "train")
    assert replace(question, metadata={}) == replace(expected, metadata={})
    assert question.metadata.items() >= expected.metadata.items()
    passages = {passage.id for passage in SOURCES[name].passages(path)}
    assert set(question.metadata.get("supporting_ids", ())) == passages
    if name in ("hotpotqa", "squad", "musique"):
        assert passages
        assert question.metadata["supporting_titles"]
