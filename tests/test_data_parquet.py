"""Training parquet: verl's schema out, ours and everybody's in."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from srl.data.parquet import read_questions, write_questions
from srl.errors import UserError
from srl.protocol import TEMPLATES
from srl.trajectory import Question

FIXTURES = Path(__file__).parent / "fixtures" / "data"
SEARCH_R1 = TEMPLATES["search-r1"].messages

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.strip())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
QUESTIONS = st.builds(
    Question,
    id=TEXT,
    text=TEXT,
    golden_answers=st.lists(TEXT, min_size=1, max_size=4).map(tuple),
    data_source=TEXT.map(str.strip),
    split=TEXT,
    prompt=st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=3).map(tuple),
    metadata=st.dictionaries(TEXT, JSON, max_size=4),
)


def question(name: str = "nq/train/0", **fields) -> Question:
    return Question(name, fields.pop("text", "who rows?"), ("Ann",), "nq", "train", **fields)


def row(source: str, index: int, text: str, split: str = "train", **more) -> dict:
    return {
        "id": f"train_{index}",
        "data_source": source,
        "prompt": [dict(message) for message in SEARCH_R1(text)],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "Anna"]}},
        "extra_info": {"index": index, "split": split},
        **more,
    }


def save(path: Path, *rows: dict) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


@settings(deadline=None, max_examples=50)
@given(st.lists(QUESTIONS, min_size=1, max_size=5, unique_by=lambda q: q.id))
@example([Question("a", "who?", ("Ann",), data_source="searchR1_")])
def test_what_is_written_is_read_back(tmp_path_factory, questions):
    path = tmp_path_factory.mktemp("questions") / "train.parquet"
    assert write_questions(path, questions) == len(questions)
    assert read_questions(path) == questions


def test_the_columns_are_verls(tmp_path):
    path = tmp_path / "train.parquet"
    write_questions(
        path, [question(prompt=SEARCH_R1("who rows?"), metadata={"hops": 2}), question("nq/train/1")]
    )
    first, second = pq.read_table(path).to_pylist()
    assert list(first) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert first["ability"] == "fact-reasoning"
    assert first["reward_model"] == {"style": "rule", "ground_truth": {"target": ["Ann"]}}
    assert first["prompt"] == list(SEARCH_R1("who rows?"))
    extra = first["extra_info"]
    assert (extra["split"], extra["index"], extra["id"], extra["question"]) == (
        "train",
        0,
        "nq/train/0",
        "who rows?",
    )
    assert json.loads(extra["metadata"]) == {"hops": 2}
    assert second["extra_info"]["index"] == 1


def test_what_search_r1_publishes_reads_with_ids_unique_across_data_sets(tmp_path):
    path = save(tmp_path / "train.parquet", row("nq", 7, "who rows"), row("hotpotqa", 7, "Who sails?"))
    first, second = read_questions(path)
    assert (first.id, second.id) == ("nq/train/7", "hotpotqa/train/7")
    assert (first.text, second.text) == ("who rows?", "Who sails?")
    assert first.golden_answers == ("Ann", "Anna")
    assert first.prompt == SEARCH_R1("who rows")
    assert (first.data_source, first.split) == ("nq", "train")


def test_json_lines_of_questions_read_too(tmp_path):
    first, _, third = read_questions(FIXTURES / "flashrag-train.jsonl")
    assert (first.id, first.data_source) == ("flashrag-train/train/train_0", "flashrag-train")
    assert third.golden_answers == ("31 metres", "31 m")
    path = tmp_path / "mine.jsonl"
    own = {"id": "nq/test/4", "question": "a", "golden_answers": ["b"], "data_source": "nq", "split": "test"}
    path.write_text(json.dumps(own))
    assert read_questions(path) == [Question("nq/test/4", "a", ("b",), "nq", "test")]
    table = tmp_path / "mine.csv"
    table.write_text('id,question,golden_answers,metadata\n1,a,b,"{""supporting_ids"": [""p""]}"\n')
    assert read_questions(table)[0].metadata == {"supporting_ids": ["p"]}
    for text in ('{""a"": NaN}', "[" * 200_000):
        table.write_text(f'id,question,golden_answers,metadata\n1,a,b,"{text}"\n')
        with pytest.raises(UserError):
            read_questions(table)


@pytest.mark.parametrize(
    "change",
    [
        {"data_source": ""},
        {"prompt": [{"role": "user", "content": " "}]},
        {"prompt": [{"role": "user"}]},
        {"reward_model": {"ground_truth": {"target": []}}},
        {"reward_model": {"ground_truth": {"target": [" "]}}},
        {"reward_model": {"ground_truth": {"target": ["a ||| b"]}}},
        {"reward_model": None},
        {"extra_info": {"index": 0, "metadata": "{"}},
        {"extra_info": {"index": 0, "split": "train"}},
    ],
)
def test_a_broken_row_is_named(change, tmp_path):
    path = save(tmp_path / "train.parquet", row("nq", 0, "a?"), row("nq", 1, "b?") | change)
    with pytest.raises(UserError, match="row 1: "):
        read_questions(path)
