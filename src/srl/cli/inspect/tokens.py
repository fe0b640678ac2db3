"""`srl inspect tokens`: the tokens of a trajectory with their mask and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.inspect.shared import Json, RunOption, app, print_rows, read_holding

if TYPE_CHECKING:
    from srl.browse.transcript import Step, Transcript


class Heat(StrEnum):
    """What colours the tokens."""

    logprob = "logprob"
    advantage = "advantage"
    mismatch = "mismatch"
    entropy = "entropy"


_COLOURS = {
    **{f"h{n}": f"black on {name}" for n, name in enumerate(
        ("#fff3d1", "#ffe3a3", "#ffcf8a", "#ffb380", "#ff9a8a", "#ff7d7d"), start=1)},
    **{f"p{n}": f"black on {name}" for n, name in enumerate(
        ("#e3f6e8", "#c2ebcd", "#96dba9", "#6acb86"), start=1)},
    **{f"n{n}": f"black on {name}" for n, name in enumerate(
        ("#ffe9ea", "#ffd0d3", "#ffb0b5", "#ff8f97"), start=1)},
}  # fmt: skip
"""The page's colours, by their classes."""


@app.command()
def tokens(
    trajectory: Annotated[str, typer.Argument(metavar="ID", help="Trajectory id, or the beginning of it.")],
    run: RunOption = "last",
    heat: Annotated[Heat, typer.Option(help="What colours the tokens on a terminal.")] = Heat.logprob,
    table: Annotated[bool, typer.Option("--table", help="Print the table on a terminal too.")] = False,
    json: Json = False,
) -> None:
    """Show the tokens of a trajectory: coloured text on a terminal, a table with all numbers in a pipe.

    `sampler` and `trainer` are log-probs; tokens with mask 0 were only read. The text of a token needs the
    run's tokenizer on this machine.

    \b
    Example:
      srl inspect tokens 0bdf61 --heat entropy
    """
    import sys

    from srl.browse.transcript import transcript

    shown, model, directory = read_holding(
        run, lambda log, path: (transcript(log, trajectory), _model(log), path)
    )
    texts = [_texts(step, directory, model) for step in shown.steps]
    if not json and not table and sys.stdout.isatty():
        _print_heat(shown, heat, texts)
    else:
        print_rows(_rows(shown, texts), json, {name: name for name in _COLUMNS})


_COLUMNS = (
    "position", "turn", "kind", "mask", "token", "text", "sampler", "trainer", "entropy", "advantage",
    "return",
)  # fmt: skip


def _model(log: Any) -> str:
    return str(log.execute("SELECT any_value(model) FROM runs").fetchall()[0][0] or "")


def _texts(step: Step, directory: Any, model: str) -> list[str] | None:
    from srl.browse.token_text import token_texts, tokenizer_of

    segment = step.segment
    return token_texts(tokenizer_of(directory, model), segment.token_ids, segment.text)


def _rows(shown: Transcript, texts: Sequence[Sequence[str] | None]) -> list[dict[str, Any]]:
    """A row for each token, in order; numbers that the log does not have are None."""
    found: list[dict[str, Any]] = []
    for step, pieces in zip(shown.steps, texts, strict=True):
        segment = step.segment
        numbers = {
            "sampler": segment.logprobs, "trainer": step.trainer_logprobs, "entropy": step.entropies,
            "advantage": step.advantages, "return": step.returns,
        }  # fmt: skip
        for place, token in enumerate(segment.token_ids):
            found.append({
                "position": len(found), "turn": segment.turn, "kind": segment.kind,
                "mask": int(segment.is_policy), "token": token,
                "text": None if pieces is None else pieces[place],
                **{name: of[place] if len(of) > place else None for name, of in numbers.items()},
            })  # fmt: skip
    return found


def _print_heat(shown: Transcript, heat: Heat, texts: Sequence[Sequence[str] | None]) -> None:
    """The text in its colours; what the policy only read is dim."""
    from rich.text import Text

    from srl.browse.web.heat import LEGENDS, largest_advantage
    from srl.browse.web.heat import tokens as coloured
    from srl.safe import safe

    console, largest = output.stdout(), largest_advantage(shown.steps)
    console.print(Text(f"{heat.value}: {LEGENDS[heat.value]}", style="dim"))
    for step, pieces in zip(shown.steps, texts, strict=True):
        if not step.segment.is_policy:
            console.print(Text(safe(step.segment.text), style="dim"))
            continue
        line = Text()
        for token in coloured(step, heat.value, pieces, largest):
            line.append(safe(token.text), style=_COLOURS.get(token.colour, ""))
        console.print(line)
