"""`srl data demonstrations`: right episodes to fine-tune on, made from the data, or those of a log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from srl.cli import output
from srl.cli.options import IndexToSearch, Json, Overwrite, ServerUrl, Sets, TemplateName, check_new
from srl.errors import UserError

if TYPE_CHECKING:
    from srl.data.demonstration_file import Demonstrations


def demonstrations(
    out: Annotated[Path, typer.Option(help="Output file, JSON lines for sft.train_files.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="The model to fine-tune, a directory or a run: it tells what is shown."
        ),
    ] = None,
    source: Annotated[
        Literal["facts", "passages"] | None,
        typer.Option(
            "--from", help="The questions' supporting facts, or passages that the question itself retrieves."
        ),
    ] = None,
    from_log: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Episodes of a run instead, such as a teacher's evaluation."),
    ] = None,
    where: Annotated[
        str,
        typer.Option(metavar="SQL", help="Which episodes of the log, by the columns of trajectories."),
    ] = "em = 1",
    per_question: Annotated[
        int, typer.Option(min=1, help="The most episodes of a question of the log, with different queries.")
    ] = 1,
    data: Annotated[
        list[Path] | None, typer.Option(help="Questions, Parquet or JSON lines (repeatable).")
    ] = None,
    index: IndexToSearch = None,
    url: ServerUrl = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take a random sample of so many questions.")
    ] = None,
    template: TemplateName = None,
    preset: Annotated[str | None, typer.Option(help="Preset of the training that follows.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of the training that follows.")] = None,
    sets: Sets = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write right episodes for fine-tuning: made from supporting facts or passages, or those of a log.

    With --from facts evidence triples, decompositions and gold titles become searches, which are made in the
    index; one that does not bring its passage is reworded, or the question is left out. With --from passages
    the question is the search, and the answer names the passage that has it; other questions are left out.
    No model runs. Give the --preset or --config of the training: it decides what of a search is shown, and
    how long a turn may be.

    With --from-log the episodes of a run are written: a teacher is a model that was evaluated on training
    questions. Each turn must be a search or the answer, and no query repeated.

    \b
    Example:
      srl data demonstrations my-model --from facts --data train.parquet --index my-index --out facts.jsonl
      srl data demonstrations my-model --from passages --data train.parquet --index my-index --out read.jsonl
      srl data demonstrations --from-log last --where "em=1" --out shown.jsonl
    """
    if (source is None) == (from_log is None):
        raise UserError("give one of --from facts, --from passages and --from-log RUN", key="from")
    check_new(out, overwrite, inputs=[*(data or []), model, index, config, template])
    if from_log is not None:
        from srl.train.logged_episodes import write_logged_demonstrations
        from srl.workspace import Workspace

        run = Workspace.resolve().find_run(from_log)
        _show(write_logged_demonstrations(run, out, where, per_question), json)
        return

    from srl.cli.eval.shared import check_inputs, check_search, read_model

    if not data or source is None:
        raise UserError("nothing to ask: give --data FILE", key="data")
    check_inputs(data, index, url, [template] if template else [])
    directory, workspace = read_model(model)
    flags = {"search.index": index, "search.url": url, "data.template": template}
    output.show_counted()
    with output.progress("starting", passing=True):
        from srl.train.demonstrations import make_demonstrations
        from srl.train.model_settings import local_settings
    settings = local_settings(directory, preset, config, flags, sets or [], output.note)
    check_search(settings)
    files = [str(path) for path in data]
    _show(
        make_demonstrations(settings, source, files, out, workspace, limit=limit, note=output.note),
        json,
    )


def _show(result: Demonstrations, json: bool) -> None:
    """What was written by data source, and why others were left out."""
    if json:
        output.print_json(result.as_json())
        return
    output.line(f"{result.file}  {result.written.total():,} demonstrations")
    rows = [(source, f"{count:,}", "written") for source, count in sorted(result.written.items())]
    rows += [(source, f"{count:,}", reason) for (source, reason), count in result.left_out.most_common()]
    output.table(("source", "number", ""), rows)
