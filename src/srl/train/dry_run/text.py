"""A plan as text: facts, memory, time, verl's configuration, notes and warnings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from srl.train.dry_run.memory import BUCKET, Part, gib
from srl.train.dry_run.plan import RunPlan
from srl.train.dry_run.remedy import typed


def plan_lines(plan: RunPlan) -> list[str]:
    """The plan in blocks with an empty line between them; what a backend does not have is left out."""
    blocks = (
        _columns(plan.facts.items()), _columns(plan.machines.items()), _memory(plan),
        _table("memory of each machine, estimated", AT_THE_START, plan.host),
        _generation(plan), _local_fits(plan), _time(plan), _settings(plan),
        [f"note: {text}" for text in plan.notes],
        [f"warning: {text}" for text in plan.warnings],
    )  # fmt: skip
    filled = [lines for lines in map(list, blocks) if lines]
    return [line for lines in filled for line in ("", *lines)][1:]


def _columns(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Rows as lines with aligned columns; the columns whose numbers are in `right` are right-aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _memory(plan: RunPlan) -> Iterator[str]:
    where = "" if not plan.machines else " of each GPU" if plan.fits else " of this machine"
    has = ""
    if plan.device.memory is not None:
        available = " available" if plan.device.kind == "cpu" else ""
        has = f"{plan.device.name} has {gib(plan.device.memory)}{available}"
    phases = PHASES if plan.machines else LOCAL_PHASES
    return _table(f"memory{where}, estimated", phases, plan.memory.parts, has)


PHASES = {"rollout": "rollout", "update": "update"}
AT_THE_START = {"rollout": "at the start", "update": "after it"}
LOCAL_PHASES = {"rollout": "rollout", "logprobs": "log-probs", "update": "update", "checkpoint": "checkpoint"}
"""The phases that have a column, and its title."""


def _table(title: str, phases: Mapping[str, str], parts: Sequence[Part], has: str = "") -> Iterator[str]:
    """The bytes of each part in a column for each phase, how they are counted, and their sums."""
    if not parts:
        return
    rows = [(part.name, [getattr(part, phase) for phase in phases], part.how) for part in parts]
    sums = [sum(column) for column in zip(*(sizes for _, sizes, _ in rows), strict=True)]
    lines = [
        (name, *(gib(size) if size else "–" for size in sizes), how)
        for name, sizes, how in (*rows, ("total", sums, has))
    ]
    yield from _columns([(title, *phases.values(), ""), *lines], right=range(1, 1 + len(phases)))


def _local_fits(plan: RunPlan) -> Iterator[str]:
    """A row for each of the usual GPUs: what to type, beside what was typed, for a run to fit it."""
    if plan.local_fits:
        yield "on one GPU"
    rows = []
    for fit in plan.local_fits:
        if fit.settings is None:
            said = "does not fit"
        else:
            said = f"fits with {typed(fit.settings)}" if fit.settings else "fits"
        rows.append((fit.name, said))
    yield from _columns(rows) if rows else ()


def _generation(plan: RunPlan) -> Iterator[str]:
    """A row for each GPU: whether an update fits, and how many whole episodes generation holds at once."""
    engine = plan.generation
    if engine is None or not plan.fits:
        return
    yield (
        f"generation on each GPU: {gib(engine.weights)} of weights, {gib(engine.own)} allowed for the "
        f"server, {engine.token:,} bytes of KV cache per token; {gib(BUCKET)} for new weights on their way"
    )
    rows = []
    for fit in plan.fits:
        update = "fits" if fit.update_fits else "does not fit"
        held = (
            f"{fit.episodes:,} whole episodes at once"
            if fit.generation_fits
            else "does not fit beside training"
        )
        rows.append((fit.name, f"the update {update}; {gib(fit.share)} for generation: {held}"))
    yield from _columns(rows)


def _time(plan: RunPlan) -> Iterator[str]:
    """The times, what they assume, and what they leave out."""
    speed, assumed, time = plan.speed, plan.assumed, plan.time
    if speed is None or assumed is None or time is None:
        return
    yield (
        f"time, estimated on {plan.device.name} as it is now: {speed.operations / 1e12:,.3g} TFLOP/s in the "
        f"model's matrix products, {speed.bandwidth / 1e9:,.3g} GB/s, {1000 * speed.forward_s:,.3g} ms to "
        "launch a forward pass"
    )
    names = ("rollout", "log-probs", "update", "a step", "all steps")
    seconds = (time.rollout_s, time.logprobs_s, time.update_s, time.step_s, time.total_s)
    yield from _columns(zip(names, map(duration, seconds), strict=True), right=(1,))
    yield (
        f"assumes a mean episode of {assumed.prompt:,} tokens of prompt, {assumed.written:,} written and "
        f"{assumed.read:,} read (half of each budget); searches, validation and checkpoints are not included"
    )


def duration(seconds: float) -> str:
    """A length of time in the unit that suits it."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.3g} s"


def _settings(plan: RunPlan) -> Iterator[str]:
    """verl's keys that are not at its defaults, each with the key of ours that it comes from."""
    if plan.settings:
        yield f"verl's configuration, {len(plan.settings)} keys that are not at its defaults"
        yield from _columns(
            (each.key, each.ours or "(fixed)", json.dumps(each.value, ensure_ascii=False))
            for each in plan.settings
        )
