"""The published files themselves, where they are at hand: their counts, and that they fit together."""

from collections import Counter

import pytest
from tests.shared_data import shared_data

from srl.data.corpus import read_corpus
from srl.data.parquet import read_questions
from srl.data.prepare import Input, prepare
from srl.data.sources import SOURCES

SQUAD = ("squad/super-bowl-50.v1.1.json", "squad/university-of-notre-dame.v1.1.json")
NQ = "nq/NQ-open.dev.jsonl"
HOTPOT = "hotpotqa/hotpot_dev_v1_simplified.json"
WIKI = "2wiki/2wikimultihopqa_corpus.json"


def test_nq_open_has_its_3610_questions():
    questions = list(SOURCES["nq"].questions(shared_data(NQ), "validation"))
    assert len(questions) == 3610
    assert questions[0].golden_answers == ("14 December 1972 UTC", "December 1972")


def test_hotpotqa_has_its_7405_questions_of_two_types():
    questions = SOURCES["hotpotqa"].questions(shared_data(HOTPOT), "validation")
    assert Counter(question.metadata["type"] for question in questions) == {
        "bridge": 5918,
        "comparison": 1487,
    }


def test_2wiki_has_its_6119_passages():
    path = shared_data(WIKI)
    passages = list(SOURCES["2wiki-corpus"].passages(path))
    assert len({passage.id for passage in passages}) == 6119
    assert [p.contents for p in read_corpus(path)] == [p.contents for p in passages]


@pytest.mark.parametrize(("file", "paragraphs", "count"), [(SQUAD[0], 54, 810), (SQUAD[1], 55, 269)])
def test_squad_has_its_paragraphs_and_questions(file, paragraphs, count):
    path = shared_data(file)
    passages = {passage.id: passage for passage in SOURCES["squad"].passages(path)}
    questions = list(SOURCES["squad"].questions(path, "train"))
    assert (len(passages), len(questions)) == (paragraphs, count)
    for question in questions:
        (support,) = question.metadata["supporting_ids"]
        assert all(answer in passages[support].text for answer in question.golden_answers)


def test_squad_and_distractors_become_one_training_directory(tmp_path):
    squad = Input(SOURCES["squad"], tuple(shared_data(name) for name in SQUAD))
    wiki = Input(SOURCES["2wiki-corpus"], (shared_data(WIKI),))
    made = prepare([squad, wiki], tmp_path / "out", validation=0.1)
    assert (sum(made.questions.values()), made.passages) == (1079, 6119 + 54 + 55)
    corpus = {passage.id for passage in read_corpus(tmp_path / "out" / "corpus.jsonl")}
    train, held = (read_questions(tmp_path / "out" / f"{name}.parquet") for name in ("train", "validation"))
    paragraphs = [{question.metadata["supporting_ids"][0] for question in part} for part in (train, held)]
    assert paragraphs[0] | paragraphs[1] <= corpus
    assert not paragraphs[0] & paragraphs[1]
