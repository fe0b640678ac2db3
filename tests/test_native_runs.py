"""Runs of a model that calls tools in its own way: which protocol a run has, and what it leaves behind."""

import json
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.native_models import family_codec
from tests.native_models import native as native_turns
from tests.scripts import TableSearch
from tests.store_builder import log_rows
from tests.tiny_models import tiny_model
from tests.training import config, only_run, train, write_setting

from srl.config import Config
from srl.config.sections import Model
from srl.errors import UserError
from srl.protocol import TEMPLATES
from srl.rollout.codec import TextCodec
from srl.train.baselines import BASELINES, baseline_config
from srl.train.dry_run import plan_run
from srl.train.export import export
from srl.train.load_protocol import (
    declared_tools,
    load_native,
    load_template,
    model_card,
    takes_written_prompts,
    template_kwargs,
    with_day,
    with_protocol,
    write_card,
)
from srl.train.model_settings import settings_of

DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions and passages, and a model of random weights whose template declares tools."""
    place = tmp_path_factory.mktemp("native")
    write_setting(place)
    codec = family_codec("qwen2.5")
    model = tiny_model(vocab_size=len(codec.tokenizer), max_length=1024)
    for each in (model.config, model.generation_config):
        each.eos_token_id = codec.tokenizer.eos_token_id
    model.save_pretrained(place / "chat")
    codec.tokenizer.save_pretrained(place / "chat")
    return place


def native(folder: Path, protocol: str = "native", **settings: Any) -> Config:
    room = {"data__max_prompt_length": 500, "data__max_response_length": 200, "data__template": None}
    given = {"model__path": str(folder / "chat"), "rollout__protocol": protocol, **room, **settings}
    return config(folder, **given)


def test_a_run_logs_its_protocol_and_its_checkpoint_says_it(folder, tmp_path):
    kwargs = {"enable_thinking": False}
    first = {"trainer__total_training_steps": 1, "model__chat_template_kwargs": kwargs}
    train(native(folder, "auto", **first), tmp_path)
    run = only_run(tmp_path)
    assert log_rows(run, "SELECT DISTINCT protocol FROM trajectories") == [("hermes",)]
    names = {name for (name,) in log_rows(run, "SELECT DISTINCT name FROM metrics")}
    assert {"env/malformed_calls", "env/calls_per_turn"} <= names
    (checkpoint,) = (run / "checkpoints").glob("step-*1")
    card = json.loads((checkpoint / "srl.json").read_text())
    assert (card["protocol"], card["template"], card["search"]) == ("native", "tools", True)
    moved, rounded = (export(run, tmp_path / f"{dtype}", dtype=dtype) for dtype in (None, "bfloat16"))
    for model in (checkpoint, moved.directory, rounded.directory):
        again = settings_of(model, None, None, {}, [])
        assert (again.rollout.protocol, load_template(again).name) == ("native", "tools")
        assert again.model.chat_template_kwargs == kwargs
        assert "stop_strings" not in json.loads((model / "generation_config.json").read_text())


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3, thinking off"])
def test_another_chat_template_than_in_training_is_said_in_a_line(folder, tmp_path, family):
    trained = native_turns(family_codec("qwen2.5"))
    write_card(tmp_path / "srl.json", model_card(trained, Model()))
    said = list[str]()
    chosen = native(folder, model__path=str(tmp_path))
    load_native(chosen, family_codec(family), TableSearch(), said.append)
    assert len(said) == (family != "qwen2.5")
    assert all("\n" not in line and "model.chat_template_kwargs" in line for line in said)


def test_a_dry_run_says_how_calls_are_made_and_what_a_start_refuses(folder):
    assert any("hermes" in note and "<|im_end|>" in note for note in plan_run(native(folder)).notes)
    refused = plan_run(native(folder, rollout__call_format="pythonic"))
    assert any("chat template" in line for line in refused.warnings)


@pytest.mark.parametrize(
    ("text", "answer"),
    [("Use the tools.\n{question}", "Rome"), ("Put it in <answer> tags.\n{question}", None)],
)
def test_a_prompt_of_ones_own_has_the_final_message_as_its_answer_unless_it_asks_for_tags(
    folder, tmp_path, text, answer
):
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    template = load_template(native(folder, data__template=str(file)))
    assert template.untagged_answer("Rome") == answer


AUTO = {
    "a chat model": ({}, "native"),
    "a prompt with tags": ({"data__template": "search-r1"}, "tags"),
    "a prompt for calls": ({"data__template": "tools-tagged"}, "native"),
    "passages in the prompt": ({"data__template": "rag"}, "tags"),
    "another format": ({"rollout__call_format": "pythonic"}, "tags"),
    "no search": ({"rollout__search": False}, "tags"),
}


@pytest.mark.parametrize("name", AUTO)
def test_an_open_protocol_is_settled_and_said(folder, name):
    settings, protocol = AUTO[name]
    said = list[str]()
    assert with_protocol(native(folder, "auto", **settings), said.append).rollout.protocol == protocol
    assert [protocol in line for line in said] == [True]


def test_a_model_that_was_trained_with_tags_keeps_them(folder, tmp_path):
    for file in (folder / "chat").iterdir():
        (tmp_path / file.name).symlink_to(file)
    write_card(tmp_path / "srl.json", {"template": None, "search": True})
    chosen = native(folder, "auto", model__path=str(tmp_path))
    assert with_protocol(chosen, lambda text: None).rollout.protocol == "tags"


@pytest.mark.parametrize("template", ["search-r1", "rag", "few-shot"])
def test_a_prompt_that_is_not_for_calls_is_refused(folder, template):
    with pytest.raises(UserError) as refused:
        load_template(native(folder, data__template=template))
    assert refused.value.key == "data.template"


def test_prompts_in_files_are_for_tags(folder):
    assert not takes_written_prompts(native(folder))
    assert takes_written_prompts(native(folder, "tags"))


def test_baselines_talk_by_tags(folder):
    for name in BASELINES:
        changed = baseline_config(native(folder), name)
        assert changed.rollout.protocol == "tags"
        load_template(changed)


def test_a_server_that_returns_text_is_refused(folder):
    chosen = native(folder)
    for codec, engine in ((TextCodec(), None), (family_codec("qwen2.5"), SimpleNamespace(token_ids=False))):
        with pytest.raises(UserError) as refused:
            load_native(chosen, codec, TableSearch(), lambda text: None, engine)
        assert refused.value.key == "rollout.protocol"


def test_named_retrievers_are_choices_of_the_declared_tool(folder):
    named = {"web": {"url": ["http://127.0.0.1:1"]}, "papers": {"url": ["http://127.0.0.1:1"]}}
    (tool,) = declared_tools(native(folder, search__retrievers=named))
    assert tool["function"]["parameters"]["properties"]["retriever"]["enum"] == ["web", "papers"]


def test_the_day_in_a_prompt_is_that_of_the_start(folder, tmp_path):
    codec = family_codec("qwen2.5")
    codec.tokenizer.chat_template = DATED + codec.tokenizer.chat_template
    codec.tokenizer.save_pretrained(tmp_path)
    chosen = with_day(native(folder, model__path=str(tmp_path)))
    assert chosen.model.chat_template_kwargs == {"strftime_now": date.today().isoformat()}
    assert with_day(native(folder)).model.chat_template_kwargs == {}
    of_start = native(folder, model__chat_template_kwargs={"strftime_now": "2026-05-17"}).model
    codec.template_kwargs = template_kwargs(of_start)
    assert codec.render(TEMPLATES["tools"].messages("Who?")).startswith("17 May 2026")
    with pytest.raises(UserError):
        template_kwargs(of_start.model_copy(update={"chat_template_kwargs": {"strftime_now": "May"}}))
