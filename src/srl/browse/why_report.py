"""A diagnosis as a written report: plain text, Markdown, or one HTML file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Any, Literal

from srl.browse.curve import Series
from srl.browse.falls import level
from srl.browse.formatting import number
from srl.browse.svg import Band, band
from srl.browse.why import RULE, Diagnosis, Finding
from srl.safe import one_line

Format = Literal["text", "markdown", "html"]

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 24
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~!$])")
_EXCERPT = 80


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, lines of text below it, and a table with its headings in the first row."""

    title: str
    lines: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()


def report(found: Diagnosis, form: Format = "text") -> str:
    """The report in one of the formats; text of models in it is made safe for each."""
    made = sections(found)
    if form == "html":
        return _html(found, made)
    return _markdown(made) if form == "markdown" else _text(made)


def sections(found: Diagnosis) -> list[Section]:
    """The parts of the report, with plain text."""
    cause = found.cause
    made = [Section(f"Why: {found.run_id}", (f"{found.outcome}.",))]
    if cause:
        made.append(Section(f"Likeliest cause: {cause.name}", _said(cause)))
    else:
        made.append(Section("Likeliest cause: none found", ("No rule fits this run.",)))
    made += [Section(f"Also: {other.name}", _said(other)) for other in found.others]
    made.append(Section("Curves", (), _curves(found)))
    if found.watches:
        made.append(Section("Watches that fired", (), _watched(found.watches)))
    if found.examples:
        made.append(Section("Trajectories", (f"Chosen: {RULE}.",), _examples(found.examples)))
    return [*made, Section("To look further", _next(found))]


def _said(finding: Finding) -> tuple[str, ...]:
    return (finding.sentence, *(f"- {line}" for line in finding.evidence))


def _curves(found: Diagnosis) -> tuple[tuple[str, ...], ...]:
    heads = ("curve", "over the steps", "first", "last", "before", "since")
    rows: list[tuple[str, ...]] = [heads]
    for name, series in found.series.items():
        values = [value for _, value in sorted(series.items())]
        split = found.since
        sides = [] if split is None else [
            [step for step in series if step < split], [step for step in series if step >= split]
        ]  # fmt: skip
        levels = [level(dict(series), side) for side in sides] or [None, None]
        cells = [values[0], values[-1], *levels]
        rows.append((name, _spark(values), *(_figure(value) for value in cells)))
    return tuple(rows)


def _figure(value: float | None) -> str:
    return "" if value is None else number(value) if isfinite(value) else "not finite"


def _spark(values: Sequence[float]) -> str:
    """The values as a line of bars, each the mean of a stretch of steps."""
    known = [value for value in values if isfinite(value)]
    if not known:
        return ""
    count = min(_WIDTH, len(known))
    cuts = [round(n * len(known) / count) for n in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[int((mean - low) / span * 7.999) if span else 0] for mean in means)


def _watched(fired: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    names = ("step", "watch", "metric", "value", "bound", "since", "action")

    def cell(value: Any) -> str:
        return _figure(value) if value is None or isinstance(value, float) else one_line(str(value))

    return (names, *(tuple(cell(row[name]) for name in names) for row in fired))


def _examples(found: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    rows = [
        (
            row["shows"], str(row["id"]), str(row["step"]), number(row["em"]), _figure(row["reward"]),
            str(row["searches"]), str(row["verdict"]),
            one_line(row["answer"] or "(none)", _EXCERPT), one_line(row["question"], _EXCERPT),
        )
        for row in found
    ]  # fmt: skip
    return (("shows", "id", "step", "em", "reward", "searches", "verdict", "answer", "question"), *rows)


def _next(found: Diagnosis) -> tuple[str, ...]:
    """What to type to see more."""
    run, lines = found.run_id, []
    if found.examples:
        first = found.examples[0]["id"]
        lines += [f"srl inspect show {first} --run {run}", f"srl inspect group {first} --run {run}"]
    validated = sorted(found.series.get("validation EM", {}))
    if len(validated) > 1:
        best = max(validated, key=lambda step: found.series["validation EM"][step])
        if best != validated[-1]:
            lines.append(f"srl inspect diff {run}@{best} {run}@{validated[-1]} --phase val")
    return (*lines, f"srl inspect searches {run} --phase train")


def _text(made: Sequence[Section]) -> str:
    return "\n\n".join("\n".join([one.title, *one.lines, *_aligned(one.table)]) for one in made) + "\n"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    return [line(row) for row in table]


def _markdown(made: Sequence[Section]) -> str:
    parts = []
    for place, one in enumerate(made):
        lines = [f"{'##' if place else '#'} {_plain(one.title)}", ""]
        lines += [
            f"- {_plain(line[2:])}" if line.startswith("- ") else f"{_plain(line)}\n" for line in one.lines
        ]
        if one.table:
            head, *rows = [f"| {' | '.join(map(_plain, row))} |" for row in one.table]
            lines += ["", head, "|" + " --- |" * len(one.table[0]), *rows]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def _html(found: Diagnosis, made: Sequence[Section]) -> str:
    from srl.browse.web.parts import charts
    from srl.browse.web.rendering import standalone

    panels = {name: _bands(found, name) for name in found.series}
    return "".join(standalone("why.html", {"sections": made, "panels": charts(panels)}))


def _bands(found: Diagnosis, name: str) -> list[Band]:
    known = {step: value for step, value in sorted(found.series[name].items()) if isfinite(value)}
    series = Series(found.run_id, "train", name, name, tuple(known), tuple(known.values()))
    return [band(name, [series])] if known else []
