"""The made-up world: held-out means entities, every question has its way, and a seed is a world."""

import random
from itertools import combinations, pairwise

import pytest

from srl.data.corpus import read_corpus
from srl.data.demonstrations import CLEAN, Noise, demonstrate, demonstrations
from srl.data.parquet import read_questions
from srl.data.world import ROLES, make_world, questions, way_of
from srl.data.write_world import write_world
from srl.protocol import parse_action

SMALL = {"person": 40, "company": 12, "city": 12, "country": 6}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("worlds") / "world"
    write_world(path, seed=0)
    return path


def test_no_name_belongs_to_two_parts():
    names = {role: set(make_world(role, 0).facts) for role in set(ROLES)}
    for one, other in combinations(names, 2):
        assert not names[one] & names[other]


def test_test_questions_are_about_entities_that_training_has_not(directory):
    held_out = read_questions(directory / "test.parquet") + read_questions(directory / "validation.parquet")
    seen = set(make_world("train", 0).facts) | set(make_world("cold-start", 0).facts)
    assert len(held_out) == 2048
    assert not any(hop.entity in seen or hop.value in seen for item in held_out for hop in way_of(item))


def test_every_way_can_be_read_off_the_corpus_and_ends_at_the_answer(directory):
    pages = {page.title: page.text for page in read_corpus(directory / "corpus.jsonl")}
    for item in read_questions(directory / "train.parquet"):
        way = way_of(item)
        assert all(hop.sentence in pages[hop.entity] for hop in way)
        assert item.golden_answers == (way[-1].value,)
        assert all(one.value == other.entity for one, other in pairwise(way))


def test_the_same_seed_writes_the_same_files_and_another_seed_others(directory, tmp_path):
    write_world(tmp_path / "again", seed=0)
    write_world(tmp_path / "other", seed=1)
    for name in ("corpus.jsonl", "cold-start.jsonl", "test.parquet"):
        assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (directory / name).read_bytes()


def test_a_clean_demonstration_follows_the_way():
    world = make_world("base", 3, SMALL)
    for item in questions(world, "base", 3, 60):
        way = way_of(item)
        turns = demonstrate(item, world, CLEAN, random.Random(0))
        actions = [parse_action(turn) for turn in turns]
        assert [action.content for action in actions] == [hop.entity for hop in way] + [way[-1].value]
        assert [action.kind for action in actions] == ["search"] * len(way) + ["answer"]


def test_noise_is_in_decisions_and_every_name_said_stands_in_question_or_world():
    world = make_world("cold-start", 0, SMALL)
    asked = questions(world, "cold-start", 0, 200)
    shown = demonstrations(asked, world, Noise(), seed=0)
    right = [parse_action(item.metadata["turns"][-1]).content == item.golden_answers[0] for item in shown]
    assert 0.05 < sum(right) / len(right) < 0.35
    for item in shown:
        answer = parse_action(item.metadata["turns"][-1]).content
        assert answer in world.facts
