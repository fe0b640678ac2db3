"""`srl ask`: what is shown of an episode while it grows, what a program gets, and how a conversation ends."""

import asyncio
import io
import json
import os
import re
import signal
import sys

import pytest
from tests.cli_mistakes import place, shell
from tests.scripts import QUESTION, RecordingEngine, TableSearch
from tests.tiny_models import byte_level_tokenizer

import srl.train.ask
from srl.cli.episode_view import EpisodeView
from srl.protocol import TEMPLATES
from srl.rollout.codec import Codec
from srl.rollout.engine import EngineFault, ScriptedEngine
from srl.rollout.episode import EpisodeOptions, run_episode
from srl.rollout.protocol import SearchCall
from srl.rollout.tags import Tags
from srl.train.load_components import Generation
from srl.trajectory import Passage

__all__ = ["place", "shell"]

CODEC = Codec(byte_level_tokenizer())
TURNS = (
    "<think> I look it up: a < b. </think>\n<search> lighthouse Velmar </search>.",
    "<think> Doc 1 says so. </think> <answer> Ossa Trell </answer>",
)
SHOWN = """\
think   I look it up: a < b.
search  lighthouse Velmar
        1    1.000  Velmar  The lighthouse of Velmar was built by Ossa Trell.
think   Doc 1 says so.
answer  Ossa Trell
"""


class TellingEngine(RecordingEngine):
    """A scripted engine that tells every token of a turn."""

    async def generate(self, request_id, token_ids, sampling):
        completion = await super().generate(request_id, token_ids, sampling)
        for end in range(len(completion.token_ids) if sampling.on_tokens else 0):
            sampling.on_tokens(completion.token_ids[: end + 1])
        return completion


def shown(capsys, turns=TURNS, search=None, engine=RecordingEngine, full=False, **options):
    """What is printed of an episode that says `turns`."""
    view = EpisodeView(CODEC, full)
    found = asyncio.run(
        run_episode(
            QUESTION, engine(CODEC, turns), on_progress=view,
            protocol=Tags(CODEC, TEMPLATES["search-r1"], {"search": SearchCall(search or TableSearch())}),
            options=EpisodeOptions(**{"max_turn_tokens": 200, **options}),
        )
    )  # fmt: skip
    view.finish(found)
    return capsys.readouterr().out


@pytest.mark.parametrize("engine", [RecordingEngine, TellingEngine])
def test_an_episode_is_shown_the_same_by_turns_and_by_tokens(capsys, engine):
    assert shown(capsys, engine=engine) == SHOWN


ATTACK = "[bold]x[/bold] \x1b[31mred \x07\u202e"


@pytest.mark.parametrize("engine", [RecordingEngine, TellingEngine])
@pytest.mark.parametrize("full", [False, True])
def test_what_a_model_or_a_passage_says_cannot_control_the_terminal(capsys, monkeypatch, engine, full):
    monkeypatch.setenv("FORCE_COLOR", "1")
    page = Passage("p", f'"{ATTACK}"\n{ATTACK}')
    turns = (f"<think> {ATTACK} </think> <search> {ATTACK} </search>", f"<answer> {ATTACK} </answer>")
    out = shown(capsys, turns, TableSearch([page]), engine, full)
    ours = re.sub(r"\x1b\[(?:0|1|2|36|1;32)m", "", out)
    assert not set(ours) & {"\x1b", "\x07", "\u202e"}
    assert ours.count("[bold]x[/bold] \\x1b[31mred \\x07\\u202e") == 5


def scripted(monkeypatch, turns=TURNS, engine=None):
    """Have `srl ask` generate with a script."""
    talks = engine or ScriptedEngine(CODEC, lambda request, turn: turns[turn])
    monkeypatch.setattr(srl.train.ask, "load_generation", lambda config, note: Generation(talks, CODEC, "it"))


def ask(shell, place, *arguments):
    return shell.typed("ask", place / "model", "--index", place / "index", *arguments)


def test_question_is_answered_with_plain_text_in_a_pipe(shell, place, monkeypatch):
    scripted(monkeypatch)
    code, out, err = ask(shell, place, "Who built it?")
    assert code == 0
    assert out.splitlines()[0] == "think   I look it up: a < b."
    assert out.splitlines()[-1] == "answer  Ossa Trell"
    assert "\x1b" not in out
    assert "searches 1, turns 2" in err


def test_program_gets_a_line_of_json(shell, place, monkeypatch):
    scripted(monkeypatch, ("<search> velmar </search>", "<answer> red </answer>"))
    code, out, _ = ask(shell, place, "What flag?", "--json", "--set", "search.topk=2")
    found = json.loads(out)
    assert (code, out.count("\n")) == (0, 1)
    assert (found["question"], found["answer"], found["end"], found["turns"]) == (
        "What flag?", "red", "answered", 2,
    )  # fmt: skip
    [search] = found["searches"]
    assert (search["query"], search["hits"][0]["id"]) == ("velmar", "velmar")
    assert found["tokens"] > 4


def test_each_line_of_stdin_is_a_question_and_one_that_fails_ends_nothing(shell, place, monkeypatch):
    class Failing(ScriptedEngine):
        async def generate(self, request_id, token_ids, sampling):
            if "Fail" in self.codec.decode(token_ids):
                raise EngineFault("the server is away")
            return await super().generate(request_id, token_ids, sampling)

    scripted(monkeypatch, engine=Failing(CODEC, lambda request, turn: "<answer> red </answer>"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("One?\n\nFail?\n" + "long " * 9000 + "?\nTwo?"))
    code, out, err = ask(shell, place, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [(item["question"], item["answer"]) for item in found] == [
        ("One?", "red"), ("Fail?", None), ("Two?", "red"),
    ]  # fmt: skip
    assert code == 1
    assert "the server is away" in err
    assert "data.max_prompt_length" in err
    assert "2 questions" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "rollout.engine=openai"),
        (("a", "Who", "built"), "built"),
        (("{place}/model", "Who?"), "--index"),
        (("{place}/model", "caf\udce9?", "--index", "{place}/index"), "UTF-8"),
        (("{place}/model", " ", "--index", "{place}/index"), "empty"),
    ],
)
def test_mistakes_are_one_line_that_names_them(shell, place, arguments, named):
    assert named in shell.refused("ask", *(part.format(place=place) for part in arguments))


class Terminal(io.StringIO):
    """Lines that are typed, then Ctrl-D."""

    def isatty(self) -> bool:
        return True


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_conversation(shell, place, monkeypatch):
    class Stopped(ScriptedEngine):
        async def generate(self, request_id, token_ids, sampling):
            if "brusk" in self.codec.decode(token_ids):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            return await super().generate(request_id, token_ids, sampling)

    scripted(monkeypatch, engine=Stopped(CODEC, lambda request, turn: "<answer> red </answer>"))
    monkeypatch.setattr(sys, "stdin", Terminal("what flag has brusk\nwhat flag has velmar\n"))
    code, out, err = ask(shell, place)
    assert code == 0
    assert out.count("answer  red") == 1
    assert "stopped" in err
