"""`srl data demonstrations`: right episodes to fine-tune on, a teacher's, or made from the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from srl.cli import output
from srl.cli.options import (
    IndexToSearch,
    Json,
    Overwrite,
    QuestionFiles,
    ServerUrl,
    Sets,
    Temperature,
    TemplateName,
    check_new,
)
from srl.errors import UserError

if TYPE_CHECKING:
    from srl.config import Config
    from srl.train.made_demonstrations import DemonstrationsMade
    from srl.train.write_demonstrations import Acceptance
    from srl.workspace import Workspace


def demonstrations(
    data: QuestionFiles,
    out: Annotated[Path, typer.Option(help="Output file, JSON lines for sft.train_files.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="The teacher; with --from facts or passages the model to fine-tune. A model directory, or "
            "a run.",
        ),
    ] = None,
    source: Annotated[
        Literal["teacher", "facts", "passages"],
        typer.Option(
            "--from",
            help="A teacher's right answers, the questions' supporting facts, or passages that the question "
            "itself retrieves.",
        ),
    ] = "teacher",
    index: IndexToSearch = None,
    url: ServerUrl = None,
    attempts: Annotated[
        int | None,
        typer.Option(min=1, help="Ask a teacher at most so often until it is enough; default: 1."),
    ] = None,
    min_reward: Annotated[
        float | None,
        typer.Option(help="Accept a teacher's episodes of this reward (reward.weights); default: EM = 1."),
    ] = None,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Accept only episodes that saw all gold passages.")
    ] = False,
    per_question: Annotated[
        int | None,
        typer.Option(min=1, help="A teacher's episodes of a question, with different queries; default: 1."),
    ] = None,
    temperature: Temperature = None,
    recovery: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of the questions in which a search from facts that misses is kept; default: 0.2.",
        ),
    ] = None,
    thoughts: Annotated[
        Literal["full", "brief"] | None,
        typer.Option(
            help="Thoughts from facts: full ones quote the passage of the answer, brief ones name it."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the wordings from facts.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            help="Ask a random sample of so many questions, in all or of a data source by name "
            "(SOURCE=NUMBER, repeatable)."
        ),
    ] = None,
    template: TemplateName = None,
    preset: Annotated[str | None, typer.Option(help="Preset of the training that follows.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of the training that follows.")] = None,
    sets: Sets = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write right episodes for fine-tuning: a teacher's, or made from supporting facts or passages.

    The teacher is MODEL, or with --set rollout.engine=openai the model of a server. If the command is
    interrupted, type it again: what was answered is kept beside the output. Give the --preset or --config of
    the training: it decides what of a search is shown, and how long a turn may be.

    With --from facts no model runs. Evidence triples, decompositions and gold titles become searches, which
    are made in the index; one that does not bring its passage is reworded, or the question is left out.

    With --from passages no model runs either. The question is the search, and the answer names the passage
    that has it; other questions are left out. A small model learns to read from these. With --template rag
    the passages are in the prompt, and nothing is searched for.

    \b
    Example:
      srl data demonstrations --data q.parquet --index my-index --out shown.jsonl --set rollout.engine=openai
      srl data demonstrations my-model --from facts --data train.parquet --index my-index --out facts.jsonl
      srl data demonstrations my-model --from passages --data train.parquet --index my-index --out read.jsonl
    """
    from srl.cli.eval.shared import check_inputs, check_search, read_model
    from srl.data.splits import parse_limit

    most = parse_limit(limit or [])
    check_new(out, overwrite, inputs=[*data, model, index, config, template])
    teacher_only = {
        "--attempts": attempts, "--temperature": temperature, "--min-reward": min_reward,
        "--evidence": evidence or None, "--per-question": per_question,
    }  # fmt: skip
    facts_only = {"--recovery": recovery, "--thoughts": thoughts, "--seed": seed}
    _check_options(source, {"teacher": teacher_only, "facts": facts_only})
    check_inputs(data, index, url, [template] if template else [])
    directory, workspace = read_model(model)
    flags = {
        "search.index": index,
        "search.url": url,
        "eval.temperature": temperature,
        "data.template": template,
        "trainer.seed": seed,
    }
    output.show_counted()
    with output.progress("starting", passing=True):
        from srl.train.evaluate_model import local_settings
    kind: Literal["teacher", "made"] = "teacher" if source == "teacher" else "made"
    settings = local_settings(directory, preset, config, flags, sets or [], workspace, output.note, kind)
    check_search(settings)
    files = [str(path) for path in data]
    if source == "teacher":
        from srl.train.write_demonstrations import Acceptance

        accepted = Acceptance(min_reward, evidence, per_question or 1)
        tries = attempts or per_question or 1
        _write_from_teacher(settings, files, out, workspace, accepted, tries, most, json)
        return
    from srl.train.fact_chains import RECOVERY
    from srl.train.made_demonstrations import write_fact_demonstrations, write_passage_demonstrations

    if source == "facts":
        made = write_fact_demonstrations(
            settings, files, out, workspace, recovery=RECOVERY if recovery is None else recovery,
            brief=thoughts == "brief", limit=most, note=output.note,
        )  # fmt: skip
    else:
        made = write_passage_demonstrations(settings, files, out, workspace, limit=most, note=output.note)
    if json:
        output.print_json(made)
    else:
        _print_made(made, ("reworded", "recovered", "mean_searches") if source == "facts" else ())


def _check_options(source: str, options: dict[str, dict[str, Any]]) -> None:
    """Raises UserError for an option that another source has."""
    for other, values in options.items():
        typed = next((name for name, value in values.items() if value is not None), None)
        if other != source and typed is not None:
            raise UserError(f"{typed} goes with --from {other}, not with --from {source}")


def _write_from_teacher(
    settings: Config, files: list[str], out: Path, workspace: Workspace, acceptance: Acceptance,
    attempts: int, limit: int | dict[str, int] | None, json: bool,
) -> None:  # fmt: skip
    from srl.cli.eval.shared import usage_line
    from srl.train.evaluate_model import check_samples
    from srl.train.write_demonstrations import write_accepted_episodes

    check_samples(attempts, settings.eval.temperature)
    if attempts < acceptance.per_question:
        raise UserError(f"--per-question {acceptance.per_question} needs as many --attempts, not {attempts}")
    written = write_accepted_episodes(
        settings, files, out, workspace, acceptance=acceptance, attempts=attempts, limit=limit,
        note=output.note,
    )  # fmt: skip
    if json:
        output.print_json(written)
        return
    output.line(f"{out}  {written.demonstrations:,} demonstrations of {written.questions:,} questions")
    output.note(f"teacher: {written.teacher}, {written.tokens:,} tokens")
    if written.rejected:
        rows = [(f"{count:,}", reason) for reason, count in written.rejected.items()]
        output.table(("episodes not accepted", "reason"), rows)
    if written.usage:
        output.note(usage_line(written.usage))


def _print_made(made: DemonstrationsMade, counted: Sequence[str]) -> None:
    """What was written, the counts of each data source, and why questions were left out."""
    output.line(f"{made.file}  {made.demonstrations:,} demonstrations of {made.questions:,} questions")
    rows = [
        (each.source, each.questions, each.demonstrations, *(getattr(each, name) for name in counted))
        for each in made.sources
    ]
    heads = ("source", "questions", "written", *(name.removeprefix("mean_") for name in counted))
    output.table(heads, [tuple(map(_number, row)) for row in rows])
    reasons = [
        (each.source, f"{count:,}", reason)
        for each in made.sources
        for reason, count in each.dropped.most_common()
    ]
    if reasons:
        output.line()
        output.table(("source", "left out", "reason"), reasons)


def _number(value: object) -> str:
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)
    )
