"""Tables on a terminal are as wide as it is, and say what they leave out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from srl.cli import output
from srl.cli.layout import cut, fitted, prose, snippet, wrapped

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
    assert missing == "cells truncated"


def test_numbers_are_never_cut():
    rows = [["text", "value"], ["x" * 90, "-1234567890.123456"]]
    lines, _ = fitted(rows, 40)
    assert lines[1].endswith("… " + " -1234567890.123456")


def test_columns_go_the_least_first_and_are_named():
    rows = [["id", "hops", "source", "question"], ["0123456789ab", "2", "hotpotqa", "where was it? " * 5]]
    assert fitted(rows, 80, ["hops", "source"])[1] == "cells truncated"
    lines, missing = fitted(rows, 45, ["hops", "source"])
    assert lines[0].split() == ["id", "source", "question"]
    assert missing == "columns omitted: hops; cells truncated"
    many = [[f"column {place}" for place in range(9)], ["x" * 40] * 9]
    assert fitted(many, 12)[1] == "columns omitted: column 1, column 2, column 3 and 5 more; cells truncated"
    assert fitted(rows, 36, ["hops", "source"])[0][0].split() == ["id", "question"]


@given(
    st.integers(1, 8).flatmap(
        lambda columns: st.lists(
            st.lists(st.text("a 1語é", max_size=60), min_size=columns, max_size=columns),
            min_size=2,
            max_size=5,
        )
    ),
    st.integers(20, 120),
)
def test_no_line_is_wider_than_the_terminal(rows, width):
    rows = [[f"column {place}" for place, _ in enumerate(rows[0])], *rows]
    lines, _ = fitted(rows, max(width, max(cell_len(row[0]) for row in rows)))
    assert len(lines) == len(rows)
    assert all(cell_len(line) <= max(width, max(cell_len(row[0]) for row in rows)) for line in lines)


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


def test_columns_line_up_beside_wide_characters():
    assert fitted([["name", "step"], ["東京タワー", "1"]], 40)[0] == ["name        step", "東京タワー  1"]


@given(st.text("ab 語", max_size=80), st.integers(2, 30))
def test_cut_text_fits_its_cells(text, width):
    assert all(cell_len(cut(text, width, by_end)) <= width for by_end in (False, True))


def test_text_without_spaces_wraps_beside_wide_characters():
    assert prose("bm25 東京タワーは高い", 10) == ["bm25 東京", "タワーは高", "い"]
    shown = snippet("1  0.5  東京タワーは日本の東京都港区にある電波塔である https://example.org/a-page", 20)
    assert shown.splitlines() == ["1  0.5  東京タワーは", "    日本の東京都港区", "    にある電波塔で …"]
    assert snippet("x" * 50, 20).splitlines() == ["x" * 16, "    " + "x" * 16, "    " + "x" * 15 + "…"]


@given(st.text("ab 語", max_size=200), st.integers(8, 40))
def test_no_line_of_a_hit_is_wider_than_the_terminal(text, width):
    lines = snippet(text, width).splitlines()
    assert len(lines) <= 3
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize("wide", [False, True])
def test_a_cut_table_says_how_to_see_all_of_it(capsys, monkeypatch, wide):
    monkeypatch.setattr(output, "terminal_width", lambda: 46)
    output.table(RUNS[0], RUNS[1:], one_line=True, wide=wide)
    out, err = capsys.readouterr()
    assert (RUNS[2][0] in out) == wide
    assert err == ("" if wide else "46 characters wide: cells truncated; --wide or a pipe shows all\n")
