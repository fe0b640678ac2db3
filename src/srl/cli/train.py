"""`srl train`: reinforcement learning or fine-tuning; exports checkpoints and imports other
configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from srl.cli import output
from srl.cli.options import Json, Sets, exclude
from srl.errors import UserError

if TYPE_CHECKING:
    from srl.workspace import Workspace

app = typer.Typer(invoke_without_command=True, no_args_is_help=False, subcommand_metavar="[COMMAND]")

SFT, RFT = "sft", "rft"


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
            help="The model to train: a Hugging Face directory, ORG/NAME of its hub, a GGUF file, or a "
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
    run: Annotated[str, typer.Option(help="The run to resume, or whose episodes --from-log takes.")] = "last",
    from_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILTER",
            help="With --algo sft: fine-tune on the training episodes of --run that satisfy this condition "
            'in SQL, such as "em = 1 and searches >= 1".',
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan, memory and time of the run, without starting it."),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print every key with its value and origin.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one line of JSON.")] = False,
) -> None:
    """Train a model to search.

    Without options it generates a small world, its index and a cold-started model, and trains that.

    \b
    Example:
      srl train --algo grpo --set trainer.total_training_steps=60
      srl train --preset one-gpu --model Qwen/Qwen2.5-0.5B-Instruct
    """
    if context.invoked_subcommand is not None:
        _refuse_before_command(context, context.invoked_subcommand)
        return
    if resume:
        _refuse_beside_resume(context)
        _resume(run, steps, sets or [], json)
        return
    exclude({"--dry-run": dry_run, "--print-config": print_config}, "one prints the plan, the other the keys")
    logged = _logged(algo, run, from_log, context)
    if dry_run and algo in (SFT, RFT) and not logged:
        only = " with --from-log only" if algo == SFT else ""
        raise UserError(f"--algo {algo} has {'a' if only else 'no'} --dry-run{only}; leave --dry-run out")
    chosen = "COMMANDLINE" in str(context.get_parameter_source("preset"))
    if logged and config is None and not chosen:
        config = _config_of_log(logged["sft.log"])
    resolved = _configured(algo, preset, config, model, seed, steps, sets or [], logged, backend)
    if dry_run and logged:
        _count_episodes(resolved.config, json)
    elif print_config:
        _print_config(resolved, json)
    elif dry_run:
        _dry_run(resolved, backend, json)
    else:
        _start(resolved, algo, backend, json)


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="Output directory; an existing one needs --overwrite.")],
    run: Annotated[
        str,
        typer.Argument(
            help="Run: its name, the beginning or end of it, or `last`; RUN@best is the best by validation."
        ),
    ] = "last",
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint; default: the newest.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Precision of the weights; default: as saved."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an exported model.")] = False,
    json: Json = False,
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
    from srl.workspace import Workspace

    workspace = Workspace.resolve()
    name, which = split_name(run)
    if which and step is not None:
        raise UserError(f"{run} and --step {step} both name a checkpoint; give one of them")
    found = workspace.find_run(name, trained=True)
    step = named_step(found, which, output.note) if which else step
    made = write(found, out, step=step, dtype=dtype, overwrite=overwrite, note=output.note)
    if json:
        output.print_json(asdict(made))
        return
    output.line(f"{made.directory}  step {made.step} of {made.run}, {made.dtype}")
    given = str(made.directory), "--config", str(found / "config.yaml"), "--data", "FILE"
    output.note(f"evaluate it: {workspace.command('eval', 'run', *given)}")


@app.command("import")
def import_config(
    file: Annotated[Path, typer.Argument(help="verl's YAML, a list of overrides, or a training script.")],
    out: Annotated[Path | None, typer.Option(help="Output file; default: stdout.")] = None,
    define: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Value of a shell variable in the script (repeatable)."),
    ] = None,
) -> None:
    """Convert verl's configuration or a training script of Search-R1 to ours, and report what changes.

    Scripts are parsed, not executed. The report goes to stderr and to the head of the file.

    \b
    Example:
      srl train import train_grpo.sh --out grpo.yaml
      srl train --config grpo.yaml --dry-run
    """
    from srl.train.importing import import_file

    made = import_file(file, _defined(define or []))
    if out is None:
        output.verbatim(made.text)
    else:
        _write(out, made.text)
    for line in made.report:
        output.note(line)


@app.command()
def init(
    tokenizer: Annotated[Path, typer.Option(help="Tokenizer directory, as from `srl data tokenizer`.")],
    out: Annotated[Path, typer.Option(help="Output directory; must not exist.")],
    kind: Annotated[Literal["qwen2", "llama"], typer.Option(help="Architecture.")] = "qwen2",
    layers: Annotated[int, typer.Option(min=1, help="Number of layers.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 128,
    heads: Annotated[int, typer.Option(min=1, help="Number of attention heads.")] = 4,
    ffn: Annotated[int, typer.Option(min=1, help="Size of the feed-forward layers.")] = 256,
    max_length: Annotated[int, typer.Option(min=1, help="Maximum sequence length, in tokens.")] = 4096,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the weights.")] = 0,
) -> None:
    """Create a small model with random weights for a tokenizer; train it with `--model`.

    \b
    Example:
      srl train init --tokenizer my-tokenizer --out my-model --layers 4 --width 128
    """
    from srl.train.new_model import Sizes, make_model

    sizes = Sizes(layers=layers, width=width, heads=heads, ffn=ffn, max_length=max_length)
    made = make_model(tokenizer, out, kind=kind, sizes=sizes, seed=seed)
    output.line(f"{made.directory}  {made.parameters:,} parameters, {made.vocabulary:,} tokens")


def _refuse_before_command(context: typer.Context, command: str) -> None:
    """Refuse options of `srl train` itself before one of its commands, which has its own."""
    if options := _typed_options(context):
        raise UserError(
            f"{options} before {command} has no effect: options of `srl train {command}` follow its name"
        )


def _refuse_beside_resume(context: typer.Context) -> None:
    """Refuse options that have no effect on a resumed run, which keeps its configuration except its length
    and what `--set` may change."""
    if options := _typed_options(context, besides=("resume", "run", "steps", "sets", "json")):
        raise UserError(
            f"{options}: a resumed run keeps the configuration it started with; "
            "leave it out, or start a new run"
        )


def _typed_options(context: typer.Context, besides: Sequence[str] = ()) -> str:
    """The options that were typed, but those named."""
    given = [
        name for name in context.params
        if name not in besides and "COMMANDLINE" in str(context.get_parameter_source(name))
    ]  # fmt: skip
    names = (f"--{name.removesuffix('s') if name == 'sets' else name}" for name in given)
    return ", ".join(names).replace("_", "-")


def _configured(
    algo: str | None, preset: str, config: Path | None, model: str | None, seed: int | None,
    steps: int | None, sets: list[str], logged: dict[str, str], backend: Literal["local", "verl"],
) -> Any:  # fmt: skip
    """The resolved configuration; with `--algo sft`, `--steps` is the number of fine-tuning steps."""
    from srl.config import load_config
    from srl.train.run_directory import steps_key

    flags = {"model.path": model and _model(model), "trainer.seed": seed, steps_key(algo or ""): steps}
    resolved = load_config(preset, config, algo, {**flags, **logged}, sets, backend)
    for warning in resolved.warnings:
        output.note(f"warning: {warning}")
    return resolved


def _logged(algo: str | None, run: str, condition: str | None, context: typer.Context) -> dict[str, str]:
    """The settings of --from-log and --run; none without --from-log. Raises UserError."""
    import os

    from srl.store import find_logs
    from srl.workspace import Workspace

    if condition is None:
        if "COMMANDLINE" in str(context.get_parameter_source("run")):
            raise UserError("--run goes with --resume or --from-log; add one of them, or leave it out")
        return {}
    if algo != SFT:
        raise UserError("--from-log is for fine-tuning; add --algo sft")
    is_path = os.sep in run and bool(find_logs(run))
    log = Path(run) if is_path else Workspace.resolve().find_run(run, trained=True)
    return {"sft.log": str(log), "sft.filter": condition}


def _config_of_log(log: str) -> Path | None:
    """The configuration that the episodes of a log were sampled with; None where the log is in no run."""
    from srl.config.load import SAVED

    files = [run / SAVED for run in (Path(log), Path(log).parent)]
    return next((file for file in files if file.is_file()), None)


def _count_episodes(config: Any, json: bool) -> None:
    """Print how many episodes --from-log takes."""
    from srl.train.logged_episodes import episodes_of_log

    found = episodes_of_log(config)
    if json:
        output.print_json({**found.metrics(), "sft/policy_tokens": found.policy_tokens})
        return
    for line in found.lines():
        output.line(line)


def _model(name: str) -> str:
    """The directory of a checkpoint that is named as `RUN@best`, `RUN@STEP` or `best`; others as they are."""
    from srl.train.named_checkpoint import model_directory, split_name
    from srl.workspace import Workspace

    is_checkpoint = split_name(name)[1]
    return str(model_directory(name, Workspace.resolve(), output.note)) if is_checkpoint else name


def _print_config(resolved: Any, json: bool) -> None:
    from json import dumps

    from srl.config import describe

    rows = describe(resolved)
    if json:
        output.print_json({key: {"value": value, "origin": origin} for key, value, origin in rows})
        return
    width = max(len(key) for key, _, _ in rows)
    for key, value, origin in rows:
        written = value if isinstance(value, str) else dumps(value, ensure_ascii=False)
        output.line(f"{key:<{width}}  {written:<24}  {origin}")


def _dry_run(resolved: Any, backend: str, json: bool) -> None:
    from srl.train.dry_run.text import plan_lines

    found = _planned(resolved.config, backend)
    if json:
        output.print_json(asdict(found))
        return
    for line in plan_lines(found):
        output.line(line)


def _planned(config: Any, backend: str) -> Any:
    """The plan of a run on this backend."""
    from srl.train.dry_run.plan import plan_local, plan_verl, planned_job

    return plan_verl(config, planned_job(config)) if backend == "verl" else plan_local(config)


def _start(resolved: Any, algo: str | None, backend: str, json: bool) -> None:
    from srl.workspace import Workspace

    name = algo if algo in (SFT, RFT) else resolved.config.algorithm.name
    _warn_of_demo_model(resolved)
    if backend == "verl" and algo in (SFT, RFT):
        raise UserError(f"--algo {algo} trains in this process; leave out --backend verl")
    workspace = Workspace.resolve()
    summary = _runs().start(
        resolved.config,
        backend=backend,
        preset=resolved.preset,
        algo=name,
        workspace=workspace,
        terminal=_terminal(),
    )
    _tell(summary, json, workspace)


def _warn_of_demo_model(resolved: Any) -> None:
    """Say so where settings that are not the demo's train its model, or the demo's a model and questions that
    are not."""
    config = resolved.config
    demo = str(config.data.template).startswith("tiny")
    if demo and config.model.path and config.data.train_files:
        output.note(
            f"warning: {resolved.preset} has the demo's prompt, without instructions, and its limits of "
            "length; --preset small and one-gpu are for pretrained models"
        )
    elif not (demo or config.model.path or config.sft.log):
        output.note(f"warning: {resolved.preset} without a model trains the demo's model; give --model")


def _resume(run: str, steps: int | None, sets: list[str], json: bool) -> None:
    from srl.workspace import Workspace

    workspace = Workspace.resolve()
    directory = workspace.find_run(run, trained=True)
    workspace = Workspace.around(directory) or workspace
    summary = _runs().resume(directory, workspace=workspace, terminal=_terminal(), steps=steps, sets=sets)
    _tell(summary, json, workspace)


def _runs() -> Any:
    """The module that starts and resumes runs, which takes seconds to import."""
    from importlib import import_module

    from srl.cli.output import progress

    with progress("starting", passing=True):
        return import_module("srl.train.run")


def _terminal() -> Any:
    import logging

    from srl.train.report import Terminal

    output.show_counted()
    return Terminal(quiet=logging.getLogger("srl").getEffectiveLevel() > logging.INFO)


def _tell(summary: Any, json: bool, workspace: Workspace) -> None:
    """Print the summary: one line of JSON, or a few lines of text."""
    if json:
        output.print_rows([asdict(summary)])
        return
    if summary.test_em_start is not None and summary.test_em_end is not None:
        output.line(f"test EM {summary.test_em_start:.3f} → {summary.test_em_end:.3f}")
    output.line(f"{summary.run_id}: {summary.steps} steps in {summary.seconds:.0f} s")
    if summary.checkpoint is not None:
        output.line(f"checkpoint {summary.checkpoint}")
    commands = (workspace.command("inspect", *what) for what in (["trajectories"], ["curve"], ["show", "ID"]))
    output.note(f"look inside: {', '.join(commands)}")


def _defined(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.replace("_", "").isalnum():
            raise UserError(f"--define {text}: expected NAME=VALUE, as in --define DATA_DIR=data/nq")
        found[name] = value
    return found


def _write(out: Path, text: str) -> None:
    from srl.files import atomic_file

    if out.exists():
        raise UserError(f"{out} exists already; choose another name, or remove it first")
    with atomic_file(out) as file:
        file.write(text)
