"""What commands print: tables, progress and notes, on a terminal and in a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.cli_mistakes import evaluate, fine_tune, place, shell, train

from srl import progress
from srl.cli import output
from srl.safe import safe

__all__ = ["place", "shell"]

ROWS = st.integers(1, 7).flatmap(
    lambda count: st.lists(
        st.lists(st.text("a 1語é\x1b\n", max_size=40), min_size=count, max_size=count), min_size=1, max_size=4
    )
)


class Screen(io.StringIO):
    """A terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def printed(monkeypatch, width: int, columns, rows, **how) -> list[str]:
    screen = Screen()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", io.StringIO())
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm")
        output.table(columns, rows, **how)
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()


def test_a_pipe_gets_every_cell_whole_and_aligned(capsys):
    output.table(["name", "step", "text"], [["東京タワー", 1, "w " * 200 + "\x1b[2J\nend"], ["b", None, 0.5]])
    head, first, second = capsys.readouterr().out.splitlines()
    assert head == "name        step  text"
    assert first == f"東京タワー  1     {'w ' * 200}\\x1b[2J end"
    assert second == "b                 0.5"


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@given(ROWS, st.integers(20, 120), st.booleans())
def test_no_line_is_wider_than_the_terminal_and_none_controls_it(patch, rows, width, one_line):
    lines = printed(
        patch, width, [f"column {place}" for place, _ in enumerate(rows[0])], rows, one_line=one_line
    )
    assert all(cell_len(line) <= width for line in lines)
    assert "\x1b" not in "".join(lines)
    assert not one_line or len(lines) == len(rows) + 1


def test_names_and_numbers_are_whole_where_texts_are_cut(monkeypatch):
    run = "20250102T030405Z-tiny-grpo-s1-00aa"
    lines = printed(monkeypatch, 70, ["run", "text", "em"], [[run, "x " * 90, "-1234567.123"]], one_line=True)
    assert run in lines[1]
    assert "-1234567.123" in lines[1]
    assert "…" in lines[1]


def test_columns_without_room_are_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    columns = ["name", "hops", "source", "question"]
    rows = [["0123456789ab", 2, "hotpotqa", "where was it? " * 5]]
    for least, kept in (((), "hotpotqa"), (("source", "hops"), "where")):
        output.table(columns, rows, one_line=True, least=least)
        out, err = capsys.readouterr()
        assert kept in out
        assert all((name in err) != (name in out) for name in columns)


@given(st.text("ab 語", max_size=200))
def test_text_wraps_and_nothing_of_it_is_lost(patch, text):
    (_, *lines) = printed(patch, 40, ["a", "text"], [["x", text]])
    assert "".join("".join(lines).split())[1:] == "".join(safe(text).split())


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


@pytest.mark.parametrize(
    ("times", "total", "start", "counts", "lines"),
    [
        ([0, 4, 11, 14], 300, 0, [50, 100, 200], ["w: 100 of 300, 22s left", "w: 200 of 300"]),
        ([0, 5, 40], 80, 40, [41, 42], ["w: 42 of 80, 12m 40s left", "w: 42 of 80"]),
        ([0, 31], None, 0, [5000], ["w: 5,000", "w: 5,000"]),
        ([0, 31], 10, 3, [3], ["w: 3 of 10", "w: 3 of 10"]),
    ],
)
def test_without_a_terminal_progress_is_a_line_every_ten_seconds_and_one_at_the_end(
    capsys, monkeypatch, times, total, start, counts, lines
):
    """The time left is that of the work since the start: what was done before does not count as speed."""
    for passing in (False, True):
        clock = iter(map(float, times))
        monkeypatch.setattr(output, "monotonic", lambda clock=clock: next(clock))
        with output.progress("w", total, start, passing=passing) as count:
            for done in counts:
                count(done)
        assert capsys.readouterr().err.splitlines() == lines[: -1 if passing else None]


def test_a_quiet_command_says_neither_notes_nor_progress(capsys):
    output.set_verbosity(-1)
    output.note("done")
    with output.progress("indexing", 1200) as update:
        update(1200)
    output.warn("careful")
    assert capsys.readouterr() == ("", "careful\n")
    output.set_verbosity(0)


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
"""


def test_a_terminal_wraps_what_is_said_between_words():
    _, lines = in_a_terminal(LONG_LINES, 30)
    assert [line.rstrip() for line in lines if "…" not in line] == [
        "step 1/2  reward 0.500",
        "searches 1.000  |  equal",
        "groups 12%",
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
    "arguments",
    [
        ("nope", "--data", "q.jsonl"),
        ("model", "--data", "nope.parquet"),
        ("model", "--index", "nope", "--data", "q.jsonl"),
        ("model", "--template", "nope", "--data", "q.jsonl"),
    ],
)
def test_inputs_that_are_not_there_are_told_before_torch_is_imported(tmp_path, arguments):
    (tmp_path / "model").mkdir()
    (tmp_path / "q.jsonl").write_text("{}")
    code = (
        "import sys; from srl.cli import main; code = main(['eval', 'run', *sys.argv[1:]]); "
        "print(code, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, "nope" in done.stderr) == ("2 False\n", True), done.stderr


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
