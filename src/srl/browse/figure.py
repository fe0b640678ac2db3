"""Curves as a picture, PNG or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from srl.browse.curve import Series
from srl.errors import UserError
from srl.files import atomic_file

FORMATS = (".png", ".svg", ".pdf")
_MANY = 60


def save_figure(panels: Sequence[Sequence[Series]], path: Path) -> None:
    """Draw one panel for each metric and write the picture; its format is the end of the name."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--out {path}: expected a name that ends in {', '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib; type: pip install 'srl-search[plot]'") from error
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "srl", "font.size": 10}):
        figure = Figure(figsize=(7.2, 3.4 * len(panels)), dpi=150, layout="constrained")
        for axes, series in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            _panel(axes, series)
        with atomic_file(path, "wb") as file:
            figure.savefig(file, format=path.suffix[1:].lower(), metadata=_metadata(path))


def _panel(axes, series: Sequence[Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    for one in series:
        mark = "o" if len(one.steps) <= _MANY else None
        axes.plot(one.steps, one.values, marker=mark, markersize=3.5, linewidth=1.6, label=_plain(one.label))
    axes.set_xlabel("step")
    axes.set_ylabel(_plain(series[0].metric))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="small")


def _plain(text: str) -> str:
    """A name as matplotlib shall show it: a dollar sign would begin a formula, `_` first hides a label."""
    return text.replace("$", r"\$").lstrip("_") or text


def _metadata(path: Path) -> dict[str, None]:
    """No date in the file: the same curves give the same bytes."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
