"""The options that choose trajectories, declared once: `@filtered` gives them to a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli.inspect.shared import OfPhase, Steps

if TYPE_CHECKING:
    from srl.browse.trajectories import Filter

Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Filters:
    """The values of the options that choose trajectories; help lists the options in this order."""

    steps: Steps = None
    phase: OfPhase = None
    source: Annotated[str | None, typer.Option(help="Only this data source.")] = None
    hops: Annotated[int | None, typer.Option(help="Only questions with this many hops.")] = None
    question: Annotated[str | None, typer.Option(help="Only this question id.")] = None
    em: Annotated[str | None, typer.Option(metavar="X", help="Exact match: 0, 1, or '<1'.")] = None
    reward: Annotated[str | None, typer.Option(metavar="X", help="Reward: a number, or '>0.5'.")] = None
    searches: Annotated[str | None, typer.Option(metavar="X", help="Searches: 0, or '>=2'.")] = None
    end: Annotated[str | None, typer.Option(help="answered, unanswered, truncated or failed.")] = None
    verdict: Annotated[str | None, typer.Option(help="correct, reader, retriever, no search, …")] = None
    contains: Annotated[
        str | None, typer.Option(help="Only if the question, the text or a query contains this.")
    ] = None

    def condition(self) -> Filter:
        """The condition on the log that the options state."""
        from srl.browse.trajectories import Filter

        return Filter(**asdict(self) | {"phase": self.phase and self.phase.value})


def filtered(command: Command) -> Command:
    """Replaces a command's parameter `filters: Filters` by the options.

    typer reads a command's options from its signature, so the decorated command has a signature with them.
    """
    options = list(signature(Filters, eval_str=True).parameters.values())

    @wraps(command)
    def run(**values: Any) -> None:
        chosen = {option.name: values.pop(option.name) for option in options}
        command(filters=Filters(**chosen), **values)

    own = signature(command, eval_str=True)
    parameters: list[Parameter] = []
    for parameter in own.parameters.values():
        parameters += options if parameter.name == "filters" else [parameter]
    keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = own.replace(parameters=keywords)  # type: ignore[attr-defined]
    return run
