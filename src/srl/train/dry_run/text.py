"""A plan as text: facts, memory, time, verl's configuration, notes and warnings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from srl.train.dry_run.memory import Part, gib
from srl.train.dry_run.plan import RunPlan


def plan_lines(plan: RunPlan) -> list[str]:
    """The plan in blocks with an empty line between them; what a backend does not have is left out."""
    blocks = (
        _columns(plan.facts.items()), _columns(plan.machines.items()), _memory(plan),
        _table(("memory of each machine, estimated", "at the start", "after it", ""), plan.host),
        _generation(plan), _time(plan), _settings(plan),
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
    where = "" if plan.time else " of each GPU" if plan.fits else " of this machine"
    has = ""
    if plan.device.memory is not None:
        available = " available" if plan.device.kind == "cpu" else ""
        has = f"{plan.device.name} has {gib(plan.device.memory)}{available}"
    return _table((f"memory{where}, estimated", "rollout", "update", ""), plan.memory.parts, has)


def _table(title: Sequence[str], parts: Sequence[Part], has: str = "") -> Iterator[str]:
    """The bytes of each part in two columns, how they are counted, and their sums; nothing without parts."""
    if not parts:
        return
    total = Part("total", sum(part.rollout for part in parts), sum(part.update for part in parts), has)
    rows = [
        (part.name, *(gib(size) if size else "–" for size in (part.rollout, part.update)), part.how)
        for part in (*parts, total)
    ]
    yield from _columns([title, *rows], right=(1, 2))


def _generation(plan: RunPlan) -> Iterator[str]:
    """A row for each GPU: whether an update fits, and how many whole episodes generation holds at once."""
    engine = plan.generation
    if engine is None or not plan.fits:
        return
    yield (
        f"generation on each GPU: {gib(engine.weights)} of weights, {gib(engine.own)} allowed for the "
        f"server, {engine.token:,} bytes of KV cache per token"
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
