"""Metrics over steps: the data, the plot in a terminal, the picture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store_builder import new_log, write_step

import srl.store
from srl.browse.curve import Series, curve
from srl.browse.plot import plot, save_figure
from srl.errors import UserError


def test_curve_has_a_series_for_each_run_and_phase(tmp_path):
    for name in ("20250101T000000Z-tiny-grpo-s1-00aa", "20250101T000000Z-tiny-ppo-s1-00ab"):
        log = new_log(tmp_path / name)
        for step in (2, 1):
            write_step(log, step, "val", **{"response_length/mean": 10.0 * step, "bad": float("nan")})
        write_step(log, 3, **{"response_length/mean": 5.0})
    with srl.store.open(tmp_path) as connection:
        first, second = curve(connection)
        assert (first.metric, first.label, first.steps, first.values) == (
            "val/em", "tiny-grpo-s1-00aa", (1, 2), (0.05, 0.1),
        )  # fmt: skip
        assert second.label == "tiny-ppo-s1-00ab"
        labels = [one.label for one in curve(connection, "response_length/mean")]
        assert labels[:2] == ["tiny-grpo-s1-00aa train", "tiny-grpo-s1-00aa val"]
        with pytest.raises(UserError, match=r"no metric 'val/en': there are .*; did you mean 'val/em'"):
            curve(connection, "val/en")
        with pytest.raises(
            UserError, match=r"^'bad' has no finite value to draw: it is nan at all 4 of its steps$"
        ):
            curve(connection, "bad")


def test_curve_of_a_run_without_steps_says_so(tmp_path):
    new_log(tmp_path)
    with (
        srl.store.open(tmp_path) as connection,
        pytest.raises(UserError, match="no step with metrics has been written"),
    ):
        curve(connection)


def line(values, steps=None, label="r") -> Series:
    steps = range(len(values)) if steps is None else steps
    return Series(label, "val", "val/em", label, tuple(steps), tuple(values))


PLOT = """\
     val/em
1.0 ┤           ·○···      ···●
    │        ···     ······
0.5 ┤     ···  ······      ···○
    │  ········
0.0 ┤○···
    └┬───────────┬────────────┬
     0           1            2 step
     ● a: 1 at step 2, highest 1 at step 2
     ○ b: 0.5 at step 2, highest 1 at step 1"""


def test_plot_draws_points_lines_axes_and_legend():
    drawn = plot([line([0.0, 1.0], [0, 2], "a"), line([0.0, 1.0, 0.5], label="b")], width=36, height=7)
    assert drawn == PLOT


@given(
    st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200),
    st.integers(20, 120),
    st.integers(6, 30),
    st.booleans(),
)
def test_plot_fits_its_width_and_draws_every_series(values, width, height, ascii_only):
    drawn = plot([line(values)], width, height, ascii_only)
    *grid, legend = drawn.splitlines()
    assert len(grid) == height + 1
    assert any(("*" if ascii_only else "●") in row for row in grid)
    assert legend.endswith("step 0") or "highest" in legend
    if width >= 40:
        assert max(map(len, grid)) <= width
    assert not ascii_only or drawn.isascii()


def test_points_that_share_a_column_are_drawn_as_their_mean():
    rows = plot([line([0.0, 1.0] * 500)], width=40, height=9).splitlines()
    assert sum("●" in row for row in rows[:-1]) == 1


@pytest.mark.parametrize(("name", "start"), [("c.png", b"\x89PNG"), ("c.SVG", b"<?xml"), ("c.pdf", b"%PDF")])
def test_figure_is_a_picture_in_the_format_of_its_name(tmp_path, name, start):
    save_figure([[line([0.1, 0.5], label="_$a$"), line([0.2, 0.1])], [line([1.0])]], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_figure_is_the_same_bytes_for_the_same_curves(tmp_path):
    for name in ("a.svg", "b.svg"):
        save_figure([[line([0.1, 0.5])]], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert "val/em" in text
    assert "step" in text


def test_figure_of_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected a name that ends in \.png, \.svg, \.pdf"):
        save_figure([[line([0.1])]], tmp_path / "c.gif")


def test_figure_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"\[plot\]'"):
        save_figure([[line([0.1])]], tmp_path / "c.png")
    assert list(tmp_path.iterdir()) == []
