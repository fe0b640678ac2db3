"""`srl eval run`: evaluate a model on questions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.browse.formatting import counted
from srl.cli.eval.shared import (
    check_inputs,
    check_search,
    read_model,
    tell_changed_indexes,
)
from srl.cli.options import (
    IndexToSearch,
    Json,
    ModelToRun,
    ServerUrl,
    Sets,
    Temperature,
    TemplateName,
)

if TYPE_CHECKING:
    from srl.evaluate.question_sets import Row
    from srl.train.eval_run import Evaluation, ModelReport

_HEADS = {"search": "with search", "no_search": "without search"}
_ROWS = {
    "EM, mean over sources": "em_macro",
    "EM of completed": "em_completed",
    "F1": "f1",
    "cover-EM": "cover_em",
    "gold passages shown": "evidence_recall",
    "EM where all were shown": "em_evidence_shown",
    "golden answer shown": "answer_shown",
    "EM where it was shown": "em_answer_shown",
    "searches per question": "env/number_of_valid_search",
    "valid actions": "env/ratio_of_valid_action",
    "tokens written per question": "response_length/mean",
    "finish ratio": "env/finish_ratio",
    "truncated": "env/truncated_share",
    "lost to faults": "failed_share",
}
_LOST = {"em_completed", "failed_share"}
"""Shown only if a search or the engine failed."""


def run(
    model: ModelToRun = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Questions, Parquet or JSON lines (repeatable).")
    ] = None,
    index: IndexToSearch = None,
    url: ServerUrl = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Episodes per question.")] = 1,
    temperature: Temperature = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate a sample of this many questions, of each set as many."),
    ] = None,
    template: TemplateName = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also evaluate it as a baseline: closed-book, cot, rag, few-shot, r1, or all (repeatable).",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="Preset, instead of the settings of the model's run, or else the defaults."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file, instead of the settings of the model's run.")
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Continue this evaluation: its log's answers are not generated again (repeatable).",
        ),
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="K/N", help="Evaluate the K-th of N parts of the questions.")
    ] = "1/1",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on questions: EM, F1, search behaviour, and the same as baselines.

    An evaluation is a run: every answer is in its log while it goes. The same command with --run, after an
    interruption or for more samples, generates only what the log lacks. On N GPUs, type --shard 1/N to N/N,
    then name all their runs. Of several data sources a second table has a row for each, and the mean over
    them. --limit draws the same number of questions from each, the same each time; the table estimates the
    figures of the full sets.

    The settings of the model's run apply if it comes from one. Exit code 1 if more than eval.max_failed
    of the questions were lost to faults. With --set rollout.engine=openai a server generates, at
    rollout.openai.url; MODEL then gives settings and tokenizer only.

    \b
    Example:
      srl eval run last --data test.parquet --index my-index --baseline r1
      srl eval run best --data test.parquet --index my-index --limit 400
      srl eval run Qwen/Qwen2.5-0.5B-Instruct --data test.parquet --index my-index --baseline all
    """
    from srl.cli.output import note, progress, show_counted
    from srl.errors import UserError

    if not data:
        raise UserError("nothing to ask: give --data FILE", key="data")
    parts = _shard(shard)
    check_inputs(data, index, url, [template] if template else [])
    directory, workspace = read_model(model)
    show_counted()
    with progress("starting", passing=True):
        from srl.train.baselines import chosen_baselines
        from srl.train.eval_run import evaluate_model
        from srl.train.model_settings import local_settings, preset_name
    flags = {
        "search.index": index,
        "search.url": url,
        "eval.temperature": temperature,
        "data.template": template,
    }
    baselines = chosen_baselines(baseline or [])
    settings = local_settings(directory, preset, config, flags, sets or [], note)
    check_search(settings, baselines, index or url)
    report = evaluate_model(
        settings, [str(path) for path in data], workspace, n=n, limit=limit,
        baselines=baselines, preset=preset_name(directory, preset, config), shard=parts,
        runs=[workspace.find_run(name) for name in runs or ()], note=note,
    )  # fmt: skip
    _show(report, as_json)
    report.check_failures(settings.eval.max_failed)


def _shard(text: str) -> tuple[int, int]:
    """`K/N` as numbers. Raises UserError."""
    from srl.errors import UserError

    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard {text}: expected K/N, such as 1/4", key="shard")
    return int(match[1]), int(match[2])


def _show(report: ModelReport, as_json: bool) -> None:
    from srl.cli.output import note, print_json, table
    from srl.evaluate import mean_seconds

    so = "the results are for a different index"
    tell_changed_indexes(report.indexes, report.trained_with, "evaluated with", so)
    if as_json:
        print_json(_as_json(report))
        return
    samples = f" × {report.samples} at temperature {report.temperature:g}" if report.samples > 1 else ""
    is_part = report.questions < report.sample.size
    suffix = f" of {report.sample.size:,}" if is_part else ""
    note(f"{report.model}: {counted(report.questions, 'question')}{suffix}{samples}")
    heads = [_HEADS.get(name, name) for name in report.settings]
    table(["questions drawn" if is_part else "", *heads], _rows(report))
    for head, evaluation in zip(heads, report.settings.values(), strict=True):
        if (seconds := mean_seconds(evaluation.results)) is not None:
            note(f"{head}: {seconds:.3g} s an episode, beside those that ran at the same time")
    for head, evaluation in zip(heads, report.settings.values(), strict=True):
        if is_part or len(report.sample.drawn) > 1:
            note(f"{report.model}, {head}: {evaluation.run.name}")
            table(*_sets_table(_sets(report, evaluation)))
    if usage := report.usage:
        failed = f" ({usage['failed_requests']:,.0f} failed)" if usage["failed_requests"] else ""
        tokens = f"{usage['prompt_tokens']:,.0f} tokens in, {usage['completion_tokens']:,.0f} out"
        note(f"{usage['requests']:,.0f} requests{failed}, {tokens}")


def _rows(report: ModelReport) -> list[list[str]]:
    """EM with its interval, EM of subsets, pass@k, then the rest; redundant rows are left out."""
    from srl.evaluate.intervals import in_words

    columns = list(report.settings.values())
    names = dict.fromkeys(name.removeprefix("eval/") for column in columns for name in column.metrics)
    lost = any(column.metrics["eval/failed_share"] for column in columns)
    gains = [report.gain_over_closed_book(name) for name in report.settings]
    rows = [_row("EM", "em", columns), ["  95% interval", *(in_words(each.em_interval) for each in columns)]]
    if any(gain is not None for gain in gains):
        rows.append(["  gain over closed-book", *("" if gain is None else f"{gain:+.3f}" for gain in gains)])
    for name in names:
        if name.startswith("em/") and ("hops=" in name or "em_macro" in names):
            rows.append(_row(f"  {name.removeprefix('em/')}", name, columns))
    rows += [_row(name, name, columns) for name in names if name.startswith(("mean@", "pass@"))]
    for head, name in _ROWS.items():
        if name in names and (lost or name not in _LOST):
            rows.append(_row(head, name, columns))
            start = f"{name}/retriever="
            by = sorted(metric for metric in names if metric.startswith(start))
            rows += [_row(f"  by {metric.removeprefix(start)}", metric, columns) for metric in by]
    return rows


def _row(head: str, name: str, columns: Sequence[Evaluation]) -> list[str]:
    values = (column.metrics.get(f"eval/{name}") for column in columns)
    return [head, *("" if value is None else f"{value:.3f}" for value in values)]


def _sets(report: ModelReport, evaluation: Evaluation) -> list[Row]:
    """A row for each set of questions, and the means, of one setting."""
    from srl.evaluate.question_sets import question_set_rows

    return question_set_rows(evaluation.results, report.sample)


def _sets_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells: questions used of all, each measure with its 95% interval, the error of the draw."""
    from srl.evaluate.intervals import in_words
    from srl.evaluate.question_sets import MEASURES

    is_part = any(row.used < row.size for row in rows)
    headers = ["", "questions", *MEASURES.values(), *(["EM ± of the draw"] if is_part else [])]
    cells = []
    for row in rows:
        estimates = [row.measures[measure] for measure in MEASURES]
        measures = [f"{estimate.mean:.3f} ({in_words(estimate.interval)})" for estimate in estimates]
        error = [f"{row.measures['em'].draw_error:.3f}"] if is_part else []
        cells.append([row.name, f"{row.used:,} of {row.size:,}", *measures, *error])
    return headers, cells


def _as_json(report: ModelReport) -> dict[str, Any]:
    from srl.evaluate import mean_seconds

    settings = {
        name: {
            "run": evaluation.run.name,
            "generated": evaluation.generated,
            "template": report.templates[name],
            "em_interval": evaluation.em_interval and list(evaluation.em_interval),
            "seconds": mean_seconds(evaluation.results),
            "gain_over_closed_book": report.gain_over_closed_book(name),
            "metrics": {key.removeprefix("eval/"): value for key, value in evaluation.metrics.items()},
            "sets": _sets(report, evaluation),
        }
        for name, evaluation in report.settings.items()
    }
    names = ("model", "questions", "temperature", "indexes", "trained_with")
    return {
        **{name: getattr(report, name) for name in names},
        "data": report.files,
        "n": report.samples,
        **({"usage": report.usage} if report.usage else {}),
        **settings,
    }
