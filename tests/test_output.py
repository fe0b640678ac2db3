"""What commands print: tables, progress and notes, on a terminal and in a pipe."""

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.cli_mistakes import place, shell

from srl.cli import output

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
