"""The small base model: its words are the world's, and what the command makes is what is packaged."""

import json
import shutil

import pytest
from bench.base import SPELLED, clean_episodes, hermes_tokenizer, new_base, stages, world_tokenizer

from srl.config.sections import Model
from srl.data.demonstrations import CLEAN, demonstrations
from srl.data.world import make_world, questions
from srl.models.load import count_parameters, load_model, load_tokenizer
from srl.rollout.codec import Codec
from srl.train.load_protocol import load_codec
from srl.train.make_missing import BASE_MODELS, HERMES


@pytest.fixture(params=BASE_MODELS)
def base(request):
    """Each base model that comes with the package."""
    return BASE_MODELS[request.param]


def test_the_packaged_tokenizer_is_the_one_that_the_command_makes(base):
    packaged, _ = load_tokenizer(base)
    assert packaged.get_vocab() == world_tokenizer().get_vocab()


def test_only_a_model_of_ones_own_is_said_to_lack_a_chat_template(base, tmp_path):
    notes: list[str] = []
    load_codec(Model(path=str(base)), None, notes.append)
    assert notes == []
    shutil.copytree(base, tmp_path / "mine")
    load_codec(Model(path=str(tmp_path / "mine")), None, notes.append)
    assert len(notes) == 1


def test_the_packaged_model_has_the_shape_that_the_command_makes(base):
    card = json.loads((base / "card.json").read_text())
    made = new_base(card["vocabulary"], seed=0)
    packaged = load_model(base, device="cpu")
    assert {name: tensor.shape for name, tensor in packaged.state_dict().items()} == {
        name: tensor.shape for name, tensor in made.state_dict().items()
    }
    assert count_parameters(packaged) == card["parameters"]
    assert {stage.name: stage.steps for stage in stages(0)} == {
        name: stage["steps"] for name, stage in card["stages"].items()
    }


def test_the_tokenizer_for_calls_has_the_ids_of_the_bases_and_is_the_one_that_the_command_makes():
    packaged, _ = load_tokenizer(HERMES)
    made, base = hermes_tokenizer(), world_tokenizer()
    assert (packaged.get_vocab(), packaged.chat_template) == (made.get_vocab(), made.chat_template)
    spelled = {SPELLED.get(token, token): number for token, number in base.get_vocab().items()}
    assert packaged.get_vocab() == spelled


def test_every_word_of_the_world_is_one_token():
    tokenizer = world_tokenizer()
    world = make_world("test", 0)
    asked = questions(world, "test", 0, 200)
    texts = [page.contents for page in world.passages()] + [item.text for item in asked]
    texts += [turn for item in demonstrations(asked, world, CLEAN, 0) for turn in item.metadata["turns"]]
    unknown = tokenizer.unk_token_id
    assert not any(unknown in tokenizer.encode(text, add_special_tokens=False) for text in texts)


def test_clean_episodes_are_answered_right_against_a_real_index():
    (batch,) = clean_episodes(Codec(world_tokenizer()), steps=1, seed=5)
    assert len(batch) == 32
    assert all(item.end == "answered" and item.answer == item.question.golden_answers[0] for item in batch)
    assert all(item.searches[0].hits[0].passage.title == item.searches[0].query for item in batch)


def test_the_hard_base_saw_no_second_hop_and_answers_right_after_useless_searches():
    (batch,) = clean_episodes(Codec(world_tokenizer()), steps=1, seed=5, kind="tiny-hard")
    assert all(item.question.metadata["hops"] == 1 for item in batch)
    assert all(item.end == "answered" and item.answer == item.question.golden_answers[0] for item in batch)
    assert {len(item.searches) for item in batch} == {1, 2}


@pytest.mark.parametrize("text", ["<search> Badran Badril </search>", "</answer>"])
def test_tags_are_tokens_of_their_own(text):
    tokenizer = world_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.split())
