"""`srl train export`: a checkpoint as a model directory that any tool loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from srl.cli import output


def export(
    out: Annotated[Path, typer.Option(help="Where to, a new directory.")],
    run: Annotated[str, typer.Argument(help="Its name, the end of it, or `last`.")] = "last",
    step: Annotated[
        int | None, typer.Option(min=0, help="The checkpoint's step; the newest by default.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the numbers; as they were saved by default."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an exported model.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a run's checkpoint as a Hugging Face directory: weights, tokenizer, stop strings.

    It holds no trainer state, no critic, and adapters are merged. What a cluster saved in parts is put
    together on this machine, which needs memory for the whole model and no GPU.

    \b
    Example:
      srl train export last --out my-model --dtype bfloat16
    """
    from dataclasses import asdict

    from srl.train.export import export as write
    from srl.workspace import Workspace

    workspace = Workspace.resolve()
    found = workspace.find_run(run)
    made = write(found, out, step=step, dtype=dtype, overwrite=overwrite, note=output.note)
    if json:
        output.print_json(asdict(made))
        return
    output.line(f"{made.directory}  step {made.step} of {made.run}, {made.dtype}")
    given = str(made.directory), "--config", str(found / "config.yaml"), "--data", "FILE"
    output.note(f"measure it: {workspace.command('eval', 'run', *given)}")
