"""What a run would do, take and last, said before anything starts: `srl train --dry-run`.

No weight is loaded, nothing is written. Memory is counted from shapes, time from a short measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from srl.config import Config
from srl.config.checks import algorithm_plugin
from srl.config.sections import NamedRetriever
from srl.model import pick_device, pick_dtype
from srl.train.dry_run.memory import Footprint, footprint, longest_episode, millions
from srl.train.dry_run.model_size import Shape, shape_of
from srl.train.dry_run.preflight import refusals
from srl.train.dry_run.remedy import Phase, remedy
from srl.train.dry_run.step_time import Lengths, Speed, Times, half_of_the_budgets, measure, times
from srl.train.learning_rate import updates_in_words
from srl.train.prepare import BASE_MODEL, check_data
from srl.train.threads import fastest_threads
from srl.workspace import Workspace

USABLE = 0.9
"""Share of a device's memory that can be planned with: the rest is the libraries' own and fragments."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where the run would be: its name, and its memory in bytes where that can be found out."""

    kind: str
    name: str
    memory: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it starts: `facts` in words, the sizes, the memory, the time, and what is amiss."""

    facts: dict[str, str]
    shape: Shape
    device: Device
    memory: Footprint
    rollout_peak: int
    update_peak: int
    speed: Speed
    assumed: Lengths
    time: Times
    warnings: tuple[str, ...]


def plan(config: Config) -> Plan:
    """The plan of a reinforcement learning run of `config`. Raises UserError where it cannot start."""
    check_data(config)
    target = pick_device(config.model.device)
    path = config.model.path or BASE_MODEL
    shape = shape_of(config, path, needs_critic=algorithm_plugin(config.algorithm.name).needs_critic)
    device = device_of(target)
    memory = footprint(shape, config, keeps_cache=target.type == "cpu")
    speed = _measured(config, shape, target)
    assumed = half_of_the_budgets(config)
    return Plan(
        dict(facts(config, shape, path)), shape, device, memory, memory.rollout, memory.update, speed,
        assumed, times(shape, config, speed, assumed), tuple(_warnings(config, shape, path, device)),
    )  # fmt: skip


def _measured(config: Config, shape: Shape, device: torch.device) -> Speed:
    """The device's speed with as many threads as the run would use."""
    before = torch.get_num_threads()
    deterministic = config.rollout.deterministic
    torch.set_num_threads(config.trainer.threads or (1 if deterministic else fastest_threads()))
    try:
        return measure(shape, device, pick_dtype(config.model.dtype, device))
    finally:
        torch.set_num_threads(before)


def device_of(device: torch.device) -> Device:
    """The device with its memory: a GPU's whole, of a CPU what is available now."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Device("cuda", found.name, found.total_memory)
    return Device(device.type, "this CPU" if device.type == "cpu" else device.type, _available_memory())


def _available_memory(path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that Linux says are available; None elsewhere."""
    if not path.is_file():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def facts(config: Config, shape: Shape, path: str | Path) -> Iterator[tuple[str, str]]:
    """What is trained, how, on what, against what, for how long, and what it leaves behind."""
    rollout, data, actor, trainer = config.rollout, config.data, config.actor, config.trainer
    yield "model", _model(config, shape, path)
    yield "trained", _trained(config, shape)
    yield (
        "algorithm",
        f"{config.algorithm.name}: {data.train_batch_size} questions × {rollout.n} episodes a step, "
        f"{updates_in_words(config, actor)}, learning rate {actor.optim.lr:g}",
    )
    yield (
        "episodes",
        f"up to {data.max_prompt_length:,} tokens of prompt and {data.max_response_length:,} after it; "
        f"up to {rollout.max_turns + 1} turns of {rollout.max_turn_tokens}",
    )
    yield "questions", _questions(config)
    yield "search", _search(config)
    yield "reward", " + ".join(f"{weight:g} × {name}" for name, weight in config.reward.weights.items())
    yield (
        "length",
        f"{trainer.total_training_steps} steps; a checkpoint {_every(trainer.save_freq)}, "
        f"a validation {_every(trainer.test_freq)}",
    )
    yield "checkpoints", f"{Workspace.resolve().runs}/…/checkpoints, {gib(_on_disk(shape))} each"


def _model(config: Config, shape: Shape, path: str | Path) -> str:
    source = "" if Path(path).is_dir() else ", its published shape (no weights here)"
    name = path if config.model.path is not None else "the small base that comes along"
    return (
        f"{name}{source}: {shape.kind}, {millions(shape.parameters)} parameters, {shape.layers} layers, "
        f"width {shape.width}"
    )


def _trained(config: Config, shape: Shape) -> str:
    share = shape.trainable / (shape.parameters + shape.adapter)
    what = f"a LoRA adapter of rank {config.model.lora_rank}" if shape.adapter else "all weights"
    critic = f", and a critic of {millions(shape.critic)}" if shape.critic else ""
    first = ""
    if config.model.path is None:
        first = f"; before it {config.sft.steps} steps of fine-tuning, unless the workspace has the result"
    return f"{what}, {millions(shape.trainable)} ({share:.1%}){critic}{first}"


def _questions(config: Config) -> str:
    files = config.data.train_files
    named = ", ".join(files) if files else "those of the made-up world (data.train_files is not set)"
    return f"{named}, prompt {config.data.template or 'as in the files'}"


def _search(config: Config) -> str:
    search = config.search
    if not config.rollout.search:
        return "none (rollout.search=false)"
    if search.replays:
        return f"replayed from {search.cassette_use[1]}" if search.cassette_use else ""
    corpus = config.data.corpus or "the made-up world's pages"
    source = search.index or f"{config.retriever.name} over {corpus}"
    said = [
        f"{', '.join(search.url) if search.url else f'in this process, {source}'}, {_passages(search.topk)}"
    ]
    said += [_named(name, retriever, search.topk) for name, retriever in search.retrievers.items()]
    if search.url or any(retriever.url for retriever in search.retrievers.values()):
        said.append("servers are not asked before the start (`srl serve check URL` does)")
    return "; ".join([*said, f"recorded on {search.cassette_use[1]}"] if search.cassette_use else said)


def _named(name: str, retriever: NamedRetriever, topk: int) -> str:
    source = ", ".join(retriever.url) if retriever.url else retriever.index or retriever.retriever
    return f"{name}: {source}, {_passages(retriever.topk or topk)}"


def _passages(count: int) -> str:
    return f"{count} passages a search"


def _every(steps: int) -> str:
    return f"every {steps} steps" if steps else "after the last"


def _on_disk(shape: Shape) -> int:
    """Bytes of a checkpoint: the merged model, and what training goes on with."""
    state = 8 + (4 if shape.itemsize < 4 else 0) + shape.itemsize
    return shape.parameters * shape.itemsize + (shape.trainable + shape.critic) * state


def gib(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.1f} MiB"


def _warnings(config: Config, shape: Shape, path: str | Path, device: Device) -> Iterator[str]:
    """What would keep the run from starting or from fitting, each with the key to turn."""
    if not Path(path).is_dir():
        yield f"there are no weights at {path}; give --model DIRECTORY to train"
    yield from refusals(config)
    longest = longest_episode(config)
    if shape.context is not None and longest > shape.context:
        yield (
            f"data.max_prompt_length + data.max_response_length = {longest:,} tokens, and the model reads "
            f"{shape.context:,}; lower one of them"
        )
    if device.memory is not None:
        yield from _too_large(config, shape, path, device)


def _too_large(config: Config, shape: Shape, path: str | Path, device: Device) -> Iterator[str]:
    """A line for each phase that does not fit."""
    assert device.memory is not None
    room = USABLE * device.memory

    def footprint_of(changed: Config) -> Footprint:
        other = shape
        if changed.model.lora_rank != config.model.lora_rank:
            other = shape_of(changed, path, needs_critic=shape.critic > 0)
        return footprint(other, changed, keeps_cache=device.kind == "cpu")

    needed = footprint_of(config)
    phases: dict[Phase, int] = {"rollout": needed.rollout, "update": needed.update}
    for phase, size in phases.items():
        if size > room:
            yield (
                f"the {phase} takes {gib(size)}, and {device.name} has {gib(device.memory)}: "
                f"{remedy(config, phase, room, footprint_of)}"
            )


def plan_lines(plan: Plan) -> list[str]:
    """The plan as text: what, memory, time, warnings."""
    width = max(map(len, plan.facts))
    lines = [f"{name:<{width}}  {text}" for name, text in plan.facts.items()]
    return [*lines, "", *_memory_lines(plan), "", *_time_lines(plan), *_warning_lines(plan)]


def _memory_lines(plan: Plan) -> list[str]:
    """A table: bytes of each part in a rollout and in an update, and how they are counted."""
    rows = [(part.name, part.rollout, part.update, part.how) for part in plan.memory.parts]
    has = "" if plan.device.memory is None else f"{plan.device.name} has {gib(plan.device.memory)}"
    if plan.device.kind == "cpu" and has:
        has += " available"
    rows.append(("peak", plan.rollout_peak, plan.update_peak, has))
    width = max(len(name) for name, *_ in rows)
    head = f"{'memory, estimated':<{max(width, 17)}}  {'rollout':>11}  {'update':>11}"
    return [head, *(_memory_line(max(width, 17), *row) for row in rows)]


def _memory_line(width: int, name: str, rollout: int, update: int, how: str) -> str:
    sizes = "  ".join(f"{gib(size) if size else '–':>11}" for size in (rollout, update))
    return f"{name:<{width}}  {sizes}  {how}".rstrip()


def _time_lines(plan: Plan) -> list[str]:
    """The times, what they assume and what they leave out."""
    speed, assumed, found = plan.speed, plan.assumed, plan.time
    rows = [
        ("rollout", duration(found.rollout_s)),
        ("log-probs", duration(found.logprobs_s)),
        ("update", duration(found.update_s)),
        ("a step", duration(found.step_s)),
        ("all steps", duration(found.total_s)),
    ]
    return [
        f"time, estimated on {plan.device.name} as it is now: {speed.operations / 1e12:,.3g} TFLOP/s in the "
        f"model's products, {speed.bandwidth / 1e9:,.3g} GB/s, {1000 * speed.forward_s:,.3g} ms to launch a "
        "forward",
        *(f"{name:<9}  {text:>9}" for name, text in rows),
        f"if a mean episode has {assumed.prompt:,} tokens of prompt, {assumed.written:,} written and "
        f"{assumed.read:,} read (half of each budget); searches, validation and checkpoints come on top",
    ]


def duration(seconds: float) -> str:
    """A length of time in the unit that suits it."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.3g} s"


def _warning_lines(plan: Plan) -> list[str]:
    return ["", *(f"warning: {text}" for text in plan.warnings)] if plan.warnings else []
