"""Tables on a terminal are as wide as it is, and say what they leave out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srl.cli import output
from srl.cli.layout import fitted, wrapped

RUNS = [
    ["run", "status", "step", "val em"],
    ["20250102T030405Z-tiny-grpo-s1-00aa", "finished", "300", "0.412"],
    ["20250103T030405Z-search-r1-v0.3-ppo-s1-01ab", "interrupted", "5", ""],
]


def test_a_table_with_room_for_everything_is_whole():
    lines, missing = fitted(RUNS, 80)
    assert lines[1].split() == RUNS[1]
    assert missing == ""


def test_a_run_that_is_cut_keeps_the_end_that_is_typed():
    lines, missing = fitted(RUNS, 46, by_end=["run"])
    assert [line.split()[0][-4:] for line in lines[1:]] == ["00aa", "01ab"]
    assert lines[1].startswith("…")
    assert missing == "cells are cut"


def test_numbers_are_never_cut():
    rows = [["text", "value"], ["x" * 90, "-1234567890.123456"]]
    lines, _ = fitted(rows, 40)
    assert lines[1].endswith("… " + " -1234567890.123456")


def test_columns_go_the_least_first_and_are_named():
    rows = [["id", "hops", "source", "question"], ["0123456789ab", "2", "hotpotqa", "where was it? " * 5]]
    assert fitted(rows, 80, ["hops", "source"])[1] == "cells are cut"
    lines, missing = fitted(rows, 45, ["hops", "source"])
    assert lines[0].split() == ["id", "source", "question"]
    assert missing == "no room for: hops; cells are cut"
    assert fitted(rows, 36, ["hops", "source"])[0][0].split() == ["id", "question"]


@given(
    st.integers(1, 8).flatmap(
        lambda columns: st.lists(
            st.lists(st.text("ab 1", max_size=60), min_size=columns, max_size=columns), min_size=2, max_size=5
        )
    ),
    st.integers(20, 120),
)
def test_no_line_is_wider_than_the_terminal(rows, width):
    rows = [[f"column {place}" for place, _ in enumerate(rows[0])], *rows]
    lines, _ = fitted(rows, max(width, max(len(row[0]) for row in rows)))
    assert len(lines) == len(rows)
    assert all(len(line) <= max(width, max(len(row[0]) for row in rows)) for line in lines)


def test_prose_wraps_between_words_beside_the_other_columns():
    rows = [["name", "what"], ["bm25", "exact lexical search over the words of a corpus"]]
    assert wrapped(rows, 41) == [
        "name  what",
        "bm25  exact lexical search over the words",
        "      of a corpus",
    ]


def test_prose_without_room_goes_below_and_breaks_no_word():
    rows = [
        ["kind", "package", "summary"],
        ["algorithm", "srl-search-reinforce-plus-plus", "see https://example.org/a-page/of/many-words now"],
    ]
    assert wrapped(rows, 44) == [
        "kind       package",
        "    summary",
        "algorithm  srl-search-reinforce-plus-plus",
        "    see",
        "    https://example.org/a-page/of/many-words",
        "    now",
    ]


@pytest.mark.parametrize("wide", [False, True])
def test_a_cut_table_says_how_to_see_all_of_it(capsys, monkeypatch, wide):
    monkeypatch.setattr(output, "terminal_width", lambda: 46)
    output.table(RUNS[0], RUNS[1:], one_line=True, wide=wide)
    out, err = capsys.readouterr()
    assert (RUNS[2][0] in out) == wide
    assert err == ("" if wide else "46 columns: cells are cut; --wide or a pipe shows all\n")
