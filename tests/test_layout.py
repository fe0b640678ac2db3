"""Tables: whole and aligned in a pipe, as wide as the terminal on one, and no text controls it."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from srl.cli import output
from srl.safe import safe

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
