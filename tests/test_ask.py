"""`srl ask`: what is shown of an episode while it grows, what a program gets, and how a conversation ends."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

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
            QUESTION, engine(CODEC, turns), search or TableSearch(), codec=CODEC, on_progress=view,
            template=TEMPLATES["search-r1"], options=EpisodeOptions(**{"max_turn_tokens": 200, **options}),
        )
    )  # fmt: skip
    view.finish(found)
    return capsys.readouterr().out


@pytest.mark.parametrize("engine", [RecordingEngine, TellingEngine])
def test_an_episode_is_shown_the_same_by_turns_and_by_tokens(capsys, engine):
    assert shown(capsys, engine=engine) == SHOWN


def test_what_is_written_is_shown_before_the_turn_has_ended(capsys):
    seen: list[str] = []

    class Listening(TellingEngine):
        async def generate(self, request_id, token_ids, sampling):
            on_tokens = sampling.on_tokens

            def listen(ids):
                on_tokens(ids)
                seen.append(capsys.readouterr().out)

            object.__setattr__(sampling, "on_tokens", listen)
            return await super().generate(request_id, token_ids, sampling)

    shown(capsys, engine=Listening)
    assert len([text for text in seen if text]) > 8
    assert "".join(seen).startswith("think   I look it up")


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
        (("absent", "Who?"), "absent"),
        (("{place}/model", "Who?"), "--index"),
        (("{place}/model", "Who?", "--index", "absent"), "absent"),
        (("{place}/model", "caf\udce9?", "--index", "{place}/index"), "UTF-8"),
        (("{place}/model", " ", "--index", "{place}/index"), "empty"),
    ],
)
def test_mistakes_are_one_line_that_names_them(shell, place, arguments, named):
    assert named in shell.refused("ask", *(part.format(place=place) for part in arguments))


def test_a_line_that_is_not_text_ends_nothing(shell, place, monkeypatch):
    scripted(monkeypatch, engine=ScriptedEngine(CODEC, lambda request, turn: "<answer> red </answer>"))
    bad = "caf\udce9?\nTwo?"
    strict = io.TextIOWrapper(io.BytesIO(bad.encode(errors="surrogateescape")), "utf-8", "strict")
    for given in (io.StringIO(bad), strict):
        monkeypatch.setattr(sys, "stdin", given)
        code, out, err = ask(shell, place, "--json")
        assert (code, json.loads(out)["question"]) == (1, "Two?")
        assert "is not UTF-8" in err


CHILD = """
import asyncio, sys
import srl.train.ask
from srl.cli import main
from srl.rollout.codec import Codec
from srl.rollout.engine import ScriptedEngine
from srl.models.load import load_tokenizer
from srl.train.load_components import Generation

CODEC = Codec(load_tokenizer(sys.argv[2])[0])

class Halting(ScriptedEngine):
    "Halts in the middle of the first turn of its first question."
    async def generate(self, request_id, token_ids, sampling):
        if "brusk" in CODEC.decode(token_ids):
            sampling.on_tokens(CODEC.encode_text("<think> I think the flag is blue"))
            await asyncio.Event().wait()
        return await super().generate(request_id, token_ids, sampling)

engine = Halting(CODEC, lambda request, turn: "<answer> red </answer>")
srl.train.ask.load_generation = lambda config, note: Generation(engine, CODEC, "it")
sys.exit(main(sys.argv[1:]))
"""


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, arguments)], stdin=theirs, stdout=theirs, stderr=theirs,
            cwd=folder, env={**environment, "PYTHONPATH": str(Path(__file__).parent.parent)},
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.raw = self.text = ""
        self.read = 0  # characters that `until` has forgotten, without the escapes of colours

    def until(self, expected: str, insist: str = "") -> None:
        """Read until `expected` is there, which is forgotten with all before it.

        The key `insist` is typed again after five seconds without output: Python notices a signal that comes
        between a prompt and its wait for input only with the next key.
        """
        left = 24
        while expected not in self.text:
            if not select.select([self.ours], [], [], 5)[0]:
                left -= 1
                assert left, self.text
                self.type(insist)
                continue
            try:
                self.raw += os.read(self.ours, 65536).decode()
            except OSError:
                raise AssertionError(f"it ended before {expected!r}: {self.text}") from None
            whole = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)
            self.text = whole[self.read :]
        self.read += self.text.index(expected) + len(expected)
        self.text = self.text.partition(expected)[2]

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_ctrl_d_the_conversation(place, tmp_path):
    sets = "--set", "data.template=tiny"
    terminal = Terminal(tmp_path, "ask", place / "model", "--index", place / "index", *sets)
    try:
        terminal.until("question: ")
        terminal.type("what flag has brusk\n")
        terminal.until("I think the flag is")
        terminal.type("\x03")
        terminal.until("stopped")
        terminal.until("question: ")
        terminal.type("\x03")
        terminal.until("question: ", insist="\x03")
        terminal.type("what flag has velmar\n")
        terminal.until("answer")
        terminal.until("red")
        terminal.until("question: ")
        terminal.type("\x04")
        assert terminal.process.wait(120) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.ours)
