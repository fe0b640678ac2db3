"""A plan as text: facts, memory, time, verl's configuration, notes and warnings."""

from __future__ import annotations

import json
from collections.abc import Iterator

from srl.train.dry_run.facts import gib
from srl.train.dry_run.memory import Part
from srl.train.dry_run.plan import RunPlan


def plan_lines(plan: RunPlan) -> list[str]:
    """The plan in blocks with an empty line between them; what a backend does not have is left out."""
    blocks = (
        _columns(plan.facts), _columns(plan.machines), _memory(plan), _host(plan), _fits(plan), _time(plan),
        _settings(plan), (f"note: {text}" for text in plan.notes),
        (f"warning: {text}" for text in plan.warnings),
    )  # fmt: skip
    filled = [lines for lines in map(list, blocks) if lines]
    return [line for lines in filled for line in ("", *lines)][1:]


def _columns(facts: dict[str, str]) -> Iterator[str]:
    width = max(map(len, facts), default=0)
    return (f"{name:<{width}}  {text}" for name, text in facts.items())


def _memory(plan: RunPlan) -> Iterator[str]:
    where = "" if plan.time else " of each GPU" if plan.fits else " of this machine"
    has = ""
    if plan.device.memory is not None:
        available = " available" if plan.device.kind == "cpu" else ""
        has = f"{plan.device.name} has {gib(plan.device.memory)}{available}"
    return _table(f"memory{where}, estimated", plan.memory.parts, ("rollout", "update"), has)


def _host(plan: RunPlan) -> Iterator[str]:
    if plan.host:
        yield from _table("memory of each machine, estimated", plan.host, ("at the start", "after it"), "")


def _table(title: str, parts: tuple[Part, ...], columns: tuple[str, str], has: str) -> Iterator[str]:
    """The bytes of each part in two columns, how they are counted, and their sums."""
    total = Part("total", sum(part.rollout for part in parts), sum(part.update for part in parts), has)
    width = max(len(title), *(len(part.name) for part in parts))
    yield f"{title:<{width}}  {columns[0]:>12}  {columns[1]:>12}"
    for part in (*parts, total):
        sizes = "  ".join(f"{gib(size) if size else '–':>12}" for size in (part.rollout, part.update))
        yield f"{part.name:<{width}}  {sizes}  {part.how}".rstrip()


def _fits(plan: RunPlan) -> Iterator[str]:
    """A row for each GPU: whether an update fits, and how many whole episodes generation holds at once."""
    engine, width = plan.generation, max((len(fit.name) for fit in plan.fits), default=0)
    if engine is None or not plan.fits:
        return
    yield (
        f"generation on each GPU: {gib(engine.weights)} of weights, {gib(engine.own)} allowed for the "
        f"server, {engine.token:,} bytes of KV cache per token"
    )
    for fit in plan.fits:
        update = "fits" if fit.update_fits else "does not fit"
        whole = f"{fit.episodes:,} whole episodes at once"
        held = whole if fit.generation_fits else "does not fit beside training"
        yield f"{fit.name:<{width}}  the update {update}; {gib(fit.share)} for generation: {held}"


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
    rows = {
        "rollout": time.rollout_s,
        "log-probs": time.logprobs_s,
        "update": time.update_s,
        "a step": time.step_s,
        "all steps": time.total_s,
    }
    yield from (f"{name:<9}  {duration(seconds):>9}" for name, seconds in rows.items())
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
    if not plan.settings:
        return
    yield f"verl's configuration, {len(plan.settings)} keys that are not at its defaults"
    values = [json.dumps(setting.value, ensure_ascii=False) for setting in plan.settings]
    width = max(len(setting.key) for setting in plan.settings)
    wide = min(40, max(map(len, values)))
    for setting, value in zip(plan.settings, values, strict=True):
        yield f"{setting.key:<{width}}  {value:<{wide}}  {setting.ours or '(fixed)'}"
