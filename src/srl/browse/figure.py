"""Curves as a picture file (PNG, SVG, PDF), and as bars of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from srl.browse.curve import Series
from srl.errors import UserError
from srl.files import atomic_file
from srl.install import pip_install

FORMATS = (".png", ".svg", ".pdf")
_BARS = "▁▂▃▄▅▆▇█"
_MANY = 60
"""Points of a line beyond which they have no marks."""


def bars(values: Sequence[float], width: int = 40) -> str:
    """The values as at most `width` bars between the lowest and the highest, each the mean of a stretch."""
    count = min(width, len(values))
    cuts = [round(n * len(values) / count) for n in range(count + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    heights = [int((mean - low) / span * 7.999) if span else 0 for mean in means]
    return "".join(_BARS[height] for height in heights)


def save_figure(panels: Sequence[Sequence[Series]], path: Path) -> None:
    """Draw one panel for each metric and write the picture; the file's suffix is its format.

    Raises UserError for another suffix and without matplotlib.
    """
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--out {path}: expected a name that ends in {', '.join(FORMATS)}", key="--out")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib", hint=f"type: {pip_install('plot')}") from error
    with rc_context({"svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(7.2, 3.4 * len(panels)), dpi=150, layout="constrained")
        for axes, series in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            _panel(axes, series)
        with atomic_file(path, "wb") as file:
            figure.savefig(file, format=path.suffix[1:].lower())


def _panel(axes, series: Sequence[Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in series:
        mark = "o" if len(line.steps) <= _MANY else None
        axes.plot(
            line.steps, line.values, marker=mark, markersize=3.5, linewidth=1.6, label=_plain(line.label)
        )
    for step in {step for line in series for step, _ in line.marks}:
        axes.axvline(step, color="0.5", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel=_plain(series[0].metric))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="small")


def _plain(text: str) -> str:
    """A name escaped for matplotlib: a dollar sign would begin a formula, a leading `_` hides a label."""
    return text.replace("$", r"\$").lstrip("_") or text
