"""The plan of a run on verl as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from srl.train.dry_run.memory import Part
from srl.train.dry_run.plan import gib
from srl.train.dry_run.verl_memory import Generation
from srl.train.dry_run.verl_plan import Fit, Line, Plan


def plan_lines(plan: Plan) -> list[str]:
    """What, where, memory, verl's keys, and what to know or to change."""
    return [
        *_named(plan.facts), "", *_named(plan.machines), "", *_memory(plan), "", *_settings(plan.settings),
        *_remarks("note", plan.notes), *_remarks("warning", plan.warnings),
    ]  # fmt: skip


def _named(facts: dict[str, str]) -> Iterator[str]:
    width = max(map(len, facts))
    return (f"{name:<{width}}  {text}" for name, text in facts.items())


def _remarks(kind: str, texts: Iterable[str]) -> list[str]:
    lines = [f"{kind}: {text}" for text in texts]
    return ["", *lines] if lines else []


def _memory(plan: Plan) -> Iterator[str]:
    """A table for each GPU, one for each machine, and what fits which GPU."""
    where = "each GPU" if plan.fits else "this machine"
    yield from _table(f"memory of {where}, estimated", plan.memory.parts, "generating", "update")
    if plan.host:
        yield ""
        yield from _table("memory of each machine, estimated", plan.host, "at the start", "after it")
    if plan.fits:
        yield ""
        yield from _fits(plan.fits, plan.generation)


def _table(title: str, parts: tuple[Part, ...], first: str, second: str) -> Iterator[str]:
    rows = [(part.name, part.rollout, part.update, part.how) for part in parts]
    rows.append(("together", sum(row[1] for row in rows), sum(row[2] for row in rows), ""))
    width = max(len(title), *(len(row[0]) for row in rows))
    yield f"{title:<{width}}  {first:>12}  {second:>12}"
    for name, one, two, how in rows:
        sizes = "  ".join(f"{gib(size) if size else '–':>12}" for size in (one, two))
        yield f"{name:<{width}}  {sizes}  {how}".rstrip()


def _fits(fits: tuple[Fit, ...], making: Generation) -> Iterator[str]:
    """A row for each GPU: whether an update fits, and how many whole episodes generation holds at once."""
    yield (
        f"generation on each GPU: {gib(making.weights)} of weights, {gib(making.own)} allowed for the "
        f"server, {making.token:,} bytes a token of keys and values"
    )
    width = max(len(fit.name) for fit in fits)
    for fit in fits:
        update = "fits" if fit.update_fits else "does not fit"
        share = f"{gib(fit.share)} for generation"
        held = (
            f"{fit.episodes:,} whole episodes at once"
            if fit.generation_fits
            else "does not fit beside training"
        )
        yield f"{fit.name:<{width}}  the update {update}; {share}: {held}"


def _settings(settings: tuple[Line, ...]) -> Iterator[str]:
    """verl's keys that are not at its defaults, each with the key that it comes from."""
    yield f"verl's configuration, {len(settings)} keys that are not at its defaults"
    width = max(len(line.key) for line in settings)
    values = [json.dumps(line.value, ensure_ascii=False) for line in settings]
    wide = min(40, max(map(len, values)))
    for line, value in zip(settings, values, strict=True):
        yield f"{line.key:<{width}}  {value:<{wide}}  {line.ours or '(fixed)'}"
