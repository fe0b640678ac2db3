"""What is said while something long goes on."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from tests.cli_mistakes import evaluate, fine_tune, place, shell, train

from srl import progress
from srl.cli import output
from srl.cli.output import Pace, duration

__all__ = ["place", "shell"]


def test_the_time_left_is_that_of_the_work_since_the_start():
    pace = Pace(1000)
    assert pace.told(600, 50.0) == ""  # 600 were there when the work began
    assert pace.told(610, 59.0) == ""
    assert pace.told(700, 150.0) == "700 of 1,000, 5 min left"
    assert pace.told(701, 151.0) == ""


def test_without_a_total_or_a_step_nothing_is_promised():
    pace = Pace(None)
    pace.told(0, 0.0)
    assert pace.told(5000, 31.0) == "5,000"
    stuck = Pace(10)
    stuck.told(3, 0.0)
    assert stuck.told(3, 31.0) == "3 of 10"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (5000, "83 min"), (11_100, "3 h 05 min")]
)
def test_durations_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("total", "shown"), [(None, " 6,228 "), (7000, "6228/7000")])
def test_a_bar_without_a_total_is_a_count(monkeypatch, total, shown):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with output.progress("reading passages", total) as count:
        count(6228)
    assert shown in terminal.getvalue()
    assert "?" not in terminal.getvalue().replace("\x1b[?25", "")


def test_without_a_terminal_the_end_is_one_line(capsys):
    with output.progress("indexing passages", 3) as count:
        for done in (1, 2, 3):
            count(done)
    assert capsys.readouterr().err == "indexing passages: 3 of 3\n"


def test_a_part_of_a_work_is_told_every_ten_seconds_and_not_at_its_end(capsys, monkeypatch):
    times = iter([0.0, 4.0, 11.0, 14.0])
    monkeypatch.setattr(output, "monotonic", lambda: next(times))
    with output.progress("val episodes", 300, passing=True) as count:
        for done in (50, 100, 200):
            count(done)
    assert capsys.readouterr().err == "val episodes: 100 of 300, 22 s left\n"


def test_what_was_done_before_does_not_count_as_speed(capsys, monkeypatch):
    times = iter([0.0, 5.0, 40.0])
    monkeypatch.setattr(output, "monotonic", lambda: next(times))
    with output.progress("fine-tuning steps", 80, 40, passing=True) as count:
        for done in (41, 42):
            count(done)
    assert capsys.readouterr().err == "fine-tuning steps: 42 of 80, 13 min left\n"


NOTES_UNDER_A_BAR = """
import logging, sys
from srl.cli import output
from srl.train.report import Terminal
from srl.cli.train import _terminal

output.set_verbosity(0)
terminal = _terminal()
with output.progress("episodes", 10, passing=True) as count:
    count(3)
    terminal.note("step 1/2  reward 0.5")
    output.note("a note")
    logging.warning("a warning")
    with output.progress("inside", 5, passing=True) as inner:
        inner(1)
    count(10)
print("result")
"""


def in_a_terminal(code: str, columns: int = 100) -> tuple[str, list[str]]:
    """What a process wrote on a terminal, and the lines of it that no bar is on."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    raw = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not read:
            break
        raw += read
    assert process.wait() == 0
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode())
    return text, [line for line in re.split(r"[\r\n]+", text) if line and "━" not in line]


def test_what_is_said_while_a_bar_is_shown_stands_on_lines_of_its_own():
    text, lines = in_a_terminal(NOTES_UNDER_A_BAR)
    assert [line.rstrip() for line in lines] == [
        "step 1/2  reward 0.5",
        "a note",
        "WARNING root: a warning",
        "result",
    ]
    assert "10/10" in text
    assert "inside" not in text


LONG_LINES = """
from srl.cli import output
from srl.train.report import Terminal

Terminal().note("step 1/2  reward 0.500  searches 1.000  |  equal groups 12%")
output.paragraph("A: my-index (bm25 stopwords=english, 4 passages)")
"""


def test_a_terminal_wraps_what_is_said_between_words():
    _, lines = in_a_terminal(LONG_LINES, 30)
    assert [line.rstrip() for line in lines if "…" not in line] == [
        "step 1/2  reward 0.500",
        "searches 1.000  |  equal",
        "groups 12%",
        "A: my-index (bm25",
        "stopwords=english, 4 passages)",
    ]


def test_without_a_terminal_a_note_of_training_is_one_line(capsys, monkeypatch):
    from srl.train.report import Terminal

    monkeypatch.setenv("FORCE_COLOR", "1")
    Terminal().note("word " * 60)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def works(monkeypatch) -> dict[str, list[int]]:
    """What is counted while a command runs: the counts by the name of the work."""
    found: dict[str, list[int]] = {}

    @contextmanager
    def show(what, total, start):
        counts = found.setdefault(f"{what} of {total}", [])
        yield lambda done, so_far="": counts.append(done)

    monkeypatch.setattr(output, "show_counted", lambda: progress.show_with(show))
    yield found
    progress.show_with(None)


def test_a_training_run_counts_its_episodes_and_prompts(shell, place, works):
    assert shell.typed(*train(place, "--steps", 1))[0] == 0
    assert works["train episodes of 8"] == list(range(1, 9))
    assert works["val episodes of 3"] == [1, 2, 3] * 2
    assert works["test episodes of 2"] == [1, 2] * 2
    assert works["reading prompts of 8"] == list(range(1, 9))


def test_a_fine_tuning_counts_demonstrations_and_steps(shell, place, works):
    code, _, err = shell.typed(*fine_tune(place, "--steps", 2))
    assert code == 0, err
    assert works["fine-tuning steps of 2"] == [1, 2]
    (name,) = (name for name in works if name.startswith("demonstrations of "))
    assert works[name] == list(range(1, int(name.rpartition(" ")[2]) + 1))


def test_an_evaluation_counts_its_episodes(shell, place, works):
    assert shell.typed(*evaluate(place, "--data", place / "test.parquet"))[0] == 0
    counts = works["episodes with search of 2"]
    assert (counts[0], counts[-1], counts) == (0, 2, sorted(counts))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("nope", "--data", "q.jsonl"), "no model directory nope"),
        (("model", "--data", "nope.parquet"), "nope.parquet: no such file"),
        (("model", "--index", "nope", "--data", "q.jsonl"), "nope is not a directory of kind 'index'"),
        (("model", "--index", "nope", "--data", "nope.jsonl"), "nope.jsonl: no such file"),
        (("model", "--template", "nope", "--data", "q.jsonl"), "no template 'nope'"),
    ],
)
def test_inputs_that_are_not_there_are_told_before_torch_is_imported(tmp_path, given, said):
    (tmp_path / "model").mkdir()
    (tmp_path / "q.jsonl").write_text("{}")
    code = (
        "import sys; from srl.cli import main; code = main(['eval', 'run', *sys.argv[1:]]); "
        "print(code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *given]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, said in done.stderr) == ("2 False\n", True), done.stderr


def test_counting_that_nobody_shows_is_silent(capsys):
    with progress.counted("episodes", 3) as count:
        count(3)
    assert capsys.readouterr() == ("", "")


def test_models_load_without_the_libraries_bars_on_a_terminal_too(monkeypatch):
    from transformers.utils import logging

    from srl.model import quietly

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(logging, "_tqdm_active", True)  # whatever another test's library has set
    with quietly():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled()
