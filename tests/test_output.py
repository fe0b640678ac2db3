"""What is said while something long goes on."""

from __future__ import annotations

import io
import sys

import pytest

from srl.cli import output
from srl.cli.output import Pace, duration


def test_the_time_left_is_that_of_the_work_since_the_start():
    pace = Pace(1000)
    assert pace.told(600, 50.0) == ""  # 600 were there when the work began
    assert pace.told(610, 60.0) == ""
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
