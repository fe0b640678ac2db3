"""`srl eval run`: evaluate a model on questions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli.eval.shared import (
    check_baselines,
    check_inputs,
    check_search,
    read_model,
    tell_indexes,
    usage_line,
)
from srl.cli.eval.suite import sets_as_json, show_sets
from srl.cli.options import (
    Backend,
    Baselines,
    Budget,
    EpisodesEach,
    Examples,
    Fresh,
    IndexToSearch,
    Json,
    ModelToRun,
    OwnConfig,
    OwnPreset,
    QuestionFiles,
    ServerUrl,
    Sets,
    Temperature,
    TemplateName,
    exclude,
)

if TYPE_CHECKING:
    from srl.evaluate import Interval
    from srl.train.evaluate_model import Evaluation, ModelReport

_HEADS = {"search": "with search", "no_search": "without search"}
_ROWS = {
    "EM, mean over sources": "em_macro",
    "EM of answerable": "em_answerable",
    "answerable from the corpus": "answerable",
    "gold passages in the corpus": "gold_in_corpus",
    "answer in the corpus": "answer_in_corpus",
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
    data: QuestionFiles,
    model: ModelToRun = None,
    index: IndexToSearch = None,
    url: ServerUrl = None,
    n: EpisodesEach = 1,
    temperature: Temperature = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate a random sample of this many questions.")
    ] = None,
    budget: Budget = None,
    no_search_too: Annotated[
        bool, typer.Option("--no-search-too", help="Also evaluate the model without search.")
    ] = False,
    template: TemplateName = None,
    no_search_template: Annotated[
        str | None, typer.Option(help="Prompt template without search; default r1 for search-r1.")
    ] = None,
    baseline: Baselines = None,
    examples: Examples = None,
    preset: OwnPreset = None,
    config: OwnConfig = None,
    fresh: Fresh = False,
    backend: Backend = "local",
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on questions: EM, F1, search behaviour, and the same without search and as baselines.

    An evaluation is a run: every answer is in its log while it goes. The same command again, also after an
    interruption, generates only what the log lacks.

    The settings of the model's run apply if it comes from one. Exit code 1 if more than eval.max_failed (1%)
    of the questions were lost to faults. With --set rollout.engine=openai a server generates, at
    rollout.openai.url; MODEL then gives settings and tokenizer only.

    \b
    Example:
      srl eval run last --data test.parquet --index my-index --no-search-too
      srl eval run best --data test.parquet --index my-index
      srl eval run Qwen/Qwen2.5-0.5B-Instruct --data test.parquet --index my-index --baseline all
    """
    from srl.cli.output import progress, show_counted
    from srl.errors import UserError

    check_inputs(data, index, url, [name for name in (template, no_search_template) if name])
    both = {"--budget": budget is not None, "--limit": limit is not None}
    exclude(both, "both say how many questions are drawn")
    if no_search_template and not no_search_too:
        raise UserError("--no-search-template is for --no-search-too; add that, or leave it out")
    directory, workspace = read_model(model)
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
    settings = local_settings(directory, preset, config, flags, sets or [], workspace, _note, backend=backend)
    check_search(settings, chosen, index or url)
    report = evaluate_model(
        settings, [str(path) for path in data], workspace, n=n, limit=limit, no_search_too=no_search_too,
        no_search_template=no_search_template, baselines=chosen,
        preset=preset_name(directory, preset, config), fresh=fresh, backend=backend,
        selection=None if budget is None else Selection(budget), note=_note,
    )  # fmt: skip
    _show(report, as_json)
    check_failures(report, settings.eval.max_failed)


def _note(text: str) -> None:
    from srl.cli.output import note

    note(text)


def _show(report: ModelReport, as_json: bool) -> None:
    from srl.cli.output import note, print_json, table
    from srl.evaluate import mean_seconds

    tell_indexes(report)
    if as_json:
        print_json(_as_json(report))
        return
    samples = f" × {report.samples} at temperature {report.temperature:g}" if report.samples > 1 else ""
    drawn = "" if report.sample is None else f" of {report.sample.size:,}"
    note(f"{report.model}: {report.questions:,} questions{drawn}{samples}")
    corner = "" if report.sample is None else "questions drawn"
    table([corner, *(_HEADS.get(name, name) for name in report.settings)], _rows(report))
    for name, found in report.settings.items():
        if (seconds := mean_seconds(found.results)) is not None:
            head = _HEADS.get(name, name)
            note(f"{head}: {seconds:.3g} s an episode, beside those that ran at the same time")
    if report.sample is not None:
        show_sets(report)
    if report.usage:
        note(usage_line(report.usage))


def _between(held: Interval | None) -> str:
    return "none: too few documents" if held is None else f"{held.low:.3f} to {held.high:.3f}"


def _rows(report: ModelReport) -> list[list[str]]:
    """EM with its interval, EM of subsets, pass@k, then the rest; redundant rows are left out."""
    columns = list(report.settings.values())
    intervals = [_between(column.em_interval) for column in columns]
    names = dict.fromkeys(name.removeprefix("eval/") for column in columns for name in column.metrics)
    parts = [name for name in names if name.startswith("em/") and ("hops=" in name or "em_macro" in names)]
    lost = any(column.metrics["eval/failed_share"] for column in columns)
    return [
        _row("EM", "em", columns),
        ["  95% interval", *intervals],
        *_gain_row(report),
        *(_row(f"  {name.removeprefix('em/')}", name, columns) for name in parts),
        *(_row(name, name, columns) for name in names if name.startswith(("mean@", "pass@"))),
        *(
            row
            for head, name in _ROWS.items()
            if name in names and (lost or name not in _LOST)
            for row in [_row(head, name, columns), *_retriever_rows(name, names, columns)]
        ),
    ]


def _gain_row(report: ModelReport) -> list[list[str]]:
    """The gain of each setting over the same model's closed-book EM, where that is one of the settings."""
    gains = [report.gain_over_closed_book(name) for name in report.settings]
    cells = ["" if gain is None else f"{gain:+.3f}" for gain in gains]
    return [["  gain over closed-book", *cells]] if any(cells) else []


def _retriever_rows(name: str, names: Iterable[str], columns: list[Evaluation]) -> list[list[str]]:
    """One row per named retriever: its searches per question."""
    start = f"{name}/retriever="
    found = sorted(one for one in names if one.startswith(start))
    return [_row(f"  by {one.removeprefix(start)}", one, columns) for one in found]


def _row(head: str, name: str, columns: list[Evaluation]) -> list[str]:
    values = (column.metrics.get(f"eval/{name}") for column in columns)
    return [head, *("" if value is None else f"{value:.3f}" for value in values)]


def _as_json(report: ModelReport) -> dict[str, Any]:
    from srl.evaluate import mean_seconds

    settings = {
        name: {
            "run": found.run.name,
            "generated": found.generated,
            "template": report.templates[name],
            "em_interval": found.em_interval and list(found.em_interval),
            "seconds": mean_seconds(found.results),
            "gain_over_closed_book": report.gain_over_closed_book(name),
            "metrics": {key.removeprefix("eval/"): value for key, value in found.metrics.items()},
        }
        for name, found in report.settings.items()
    }
    return {
        "model": report.model,
        "data": list(report.files),
        "questions": report.questions,
        "n": report.samples,
        "temperature": report.temperature,
        "index_digest": report.index_digest,
        "trained_with": report.trained_with,
        "retriever_digests": dict(report.retriever_digests),
        "other_indexes": [asdict(other) for other in report.changed_indexes],
        **({"usage": dict(report.usage)} if report.usage else {}),
        **({"full_sets": sets_as_json(report)} if report.sample else {}),
        **settings,
    }
