"""`srl eval suite`: evaluate a model on the question sets of a manifest, in one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli.eval.shared import check_baselines, check_inputs, check_search, read_model, tell_indexes
from srl.cli.options import (
    Backend,
    Baselines,
    Budget,
    EpisodesEach,
    Examples,
    Fresh,
    IndexToSearch,
    Json,
    OwnConfig,
    OwnPreset,
    ServerUrl,
    Sets,
    Temperature,
    TemplateName,
)

if TYPE_CHECKING:
    from srl.data.suite import Rows, Suite
    from srl.evaluate.budget import SampleEstimate
    from srl.evaluate.suite_table import Row
    from srl.train.evaluate_model import ModelReport
    from srl.workspace import Workspace


def suite(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Model directory, ORG/NAME of the Hugging Face hub, GGUF file, or run. A server's model "
            "needs none.",
        ),
    ] = None,
    index: IndexToSearch = None,
    url: ServerUrl = None,
    manifest: Annotated[
        str, typer.Option(help="The suite: search-r1 (its seven test sets), or a manifest file (YAML).")
    ] = "search-r1",
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Directory of the sets' files; default: worlds/SUITE in the workspace."),
    ] = None,
    budget: Budget = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Evaluate on rows that are not those of the manifest.")
    ] = False,
    n: EpisodesEach = 1,
    temperature: Temperature = None,
    template: TemplateName = None,
    baseline: Baselines = None,
    examples: Examples = None,
    preset: OwnPreset = None,
    config: OwnConfig = None,
    fresh: Fresh = False,
    backend: Backend = "local",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on the sets of a suite: EM, F1 and cover-EM of each, and their means, with intervals.

    A suite is a manifest of question sets with their splits, row counts and digests. A set whose rows are not
    those of the manifest, or not those of its first use, is an error. --budget draws the same number of
    questions from each set, the same each time, and estimates the figures of the full sets.

    \b
    Example:
      srl eval suite last --index my-index --budget 400
      srl eval suite last --index my-index --manifest my-suite.yaml
    """
    from srl.cli.output import note, progress, show_counted
    from srl.data.suite import read_suite

    check_inputs((), index, url, [template] if template else [])
    directory, workspace = read_model(model)
    known = read_suite(manifest)
    rows = _checked(known, folder or workspace.worlds / known.name, workspace, accept_changes)
    flags = {
        "search.index": index,
        "search.url": url,
        "eval.temperature": temperature,
        "data.template": template,
        "data.examples": examples,
    }
    show_counted()
    with progress("starting", passing=True):
        from srl.evaluate.budget import Selection
        from srl.train.evaluate_model import check_failures, evaluate_model, local_settings, preset_name
    chosen = check_baselines(baseline or [], examples, template)
    set_of = {question.id: name for name, found in rows.items() for question in found.questions}
    selection = Selection(budget, set_of, {"suite": known.name, "sets": _about(rows)})
    questions = [question for found in rows.values() for question in found.questions]
    selection.draw(questions)  # refuses a budget that is too small before the model is loaded
    settings = local_settings(directory, preset, config, flags, sets or [], workspace, note, backend=backend)
    check_search(settings, chosen)
    report = evaluate_model(
        settings, [str(found.file) for found in rows.values()], workspace, n=n, questions=questions,
        baselines=chosen, selection=selection, preset=preset_name(directory, preset, config), fresh=fresh,
        backend=backend, note=note,
    )  # fmt: skip
    _show(report, known.name, as_json)
    check_failures(report, settings.eval.max_failed)


def _checked(known: Suite, folder: Path, workspace: Workspace, accept_changes: bool) -> dict[str, Rows]:
    """The rows of each set, as the manifest has them; their digests are recorded. Raises UserError."""
    from srl.cli.output import note
    from srl.data.suite import changes, read_recorded, read_sets, record
    from srl.errors import UserError

    path = workspace.root / "suites" / f"{known.name}.json"
    rows, recorded = read_sets(known, folder), read_recorded(path)
    changed = changes(known, rows, recorded)
    told = "; ".join(f"{name}: {what}" for name, what in changed.items())
    if changed and not accept_changes:
        raise UserError(
            f"the rows of {len(changed)} of the {len(rows)} sets of {known.name} have changed: {told}; "
            "to evaluate on them nevertheless, add --accept-changes"
        )
    if changed:
        note(f"warning: these are not the rows of the suite {known.name}: {told}")
    if new := [one.name for one in known.sets if not one.digest and one.name not in recorded]:
        note(f"first use of {', '.join(new)}: the digests of the rows are recorded in {path}")
    record(path, rows, recorded)
    return rows


def _about(rows: Mapping[str, Rows]) -> dict[str, Any]:
    return {
        name: {"file": str(found.file), "rows": len(found.questions), "digest": found.digest}
        for name, found in rows.items()
    }


def _show(report: ModelReport, name: str, as_json: bool) -> None:
    from srl.cli.output import print_json

    if as_json:
        print_json({"suite": name, "model": report.model, "n": report.samples, **sets_as_json(report)})
        return
    tell_indexes(report)
    show_sets(report)


def sets_as_json(report: ModelReport) -> dict[str, Any]:
    """The rows of each setting, and where the questions used are."""
    return {
        name: {"run": report.settings[name].run.name, "questions_file": str(file), "sets": rows}
        for name, file, rows in _settings(report)
    }


def show_sets(report: ModelReport) -> None:
    """Print a table for each setting: a row for each set, and their means."""
    from srl.cli.output import note, table

    for name, file, rows in _settings(report):
        note(f"{report.model}, {name.replace('_', ' ')}: {report.settings[name].run.name}")
        table(*_table(rows))
        for text in (*_draw_notes(rows), f"the questions used: {file}"):
            note(text)


def _settings(report: ModelReport) -> Iterator[tuple[str, Path, list[Row]]]:
    """The name of each setting, the file of the questions used, and its rows."""
    from srl.evaluate.suite_table import suite_rows

    assert report.sample is not None
    for name, found in report.settings.items():
        rows = suite_rows(found.results, report.sample, found.coverage and found.coverage.found)
        yield name, report.sample.file_in(found.run), rows


def _table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells: questions used of all, each measure with its 95% interval, the error of the draw."""
    from srl.evaluate.suite_table import MEASURES

    drawn = any(row.used < row.size for row in rows)
    known = any(row.answerable is not None for row in rows)
    headers = ["", "questions", *MEASURES.values(), *(["± of the draw"] if drawn else [])]
    headers += ["answerable", "EM of answerable"] if known else []
    cells = []
    for row in rows:
        found = [row.measures[measure] for measure in MEASURES]
        error = [f"{row.measures['em'].draw_error:.3f}"] if drawn else []
        asked = f"{row.used:,} of {row.size:,}"
        part = [_cell(row.answerable), _cell(row.em_answerable)] if known else []
        cells.append([row.name, asked, *map(_with_interval, found), *error, *part])
    return headers, cells


def _cell(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _with_interval(found: SampleEstimate) -> str:
    if found.interval is None:
        return f"{found.mean:.3f} (too few documents)"
    return f"{found.mean:.3f} ({found.interval.low:.3f} to {found.interval.high:.3f})"


def _draw_notes(rows: list[Row]) -> list[str]:
    """What the full sets' EM is, from the questions drawn; nothing where all were asked."""
    from srl.evaluate.suite_table import MEANS

    means = [row for row in rows if row.name in MEANS] or rows
    return [
        f"{row.used:,} of {row.size:,} questions drawn: the EM of all of them, {row.name}, is "
        f"{row.measures['em'].mean:.3f} ± {row.measures['em'].draw_error:.3f} (95%)"
        for row in means
        if row.used < row.size
    ]
