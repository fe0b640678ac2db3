"""A run in words: the first lines of its plan."""

from __future__ import annotations

from pathlib import Path

from srl.config import Config
from srl.config.sections import NamedRetriever
from srl.train.dry_run.memory import Layout, checkpoint_bytes, millions
from srl.train.dry_run.model_size import Shape
from srl.train.learning_rate import updates_in_words
from srl.workspace import Workspace


def run_facts(config: Config, shape: Shape, path: str | Path, layout: Layout) -> dict[str, str]:
    """What is trained, how, on what, for how long, and what it leaves behind."""
    rollout, data, actor, trainer = config.rollout, config.data, config.actor, config.trainer
    return {
        "model": _model(config, shape, path),
        "trained": _trained(config, shape),
        "algorithm": f"{config.algorithm.name}: {data.train_batch_size} questions × {rollout.n} episodes a "
        f"step, {updates_in_words(config, actor)}, learning rate {actor.optim.lr:g}",
        "episodes": f"up to {data.max_prompt_length:,} tokens of prompt and {data.max_response_length:,} of "
        f"response; up to {rollout.max_turns + 1} turns of {rollout.max_turn_tokens} tokens",
        "questions": _questions(config),
        "search": _search(config),
        "reward": " + ".join(f"{weight:g} × {name}" for name, weight in config.reward.weights.items()),
        "length": f"{trainer.total_training_steps} steps; a checkpoint {_every(trainer.save_freq)}, "
        f"a validation {_every(trainer.test_freq)}",
        "checkpoints": _checkpoints(config, shape, layout),
    }


def gib(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.1f} MiB"


def _model(config: Config, shape: Shape, path: str | Path) -> str:
    source = "" if Path(path).is_dir() else " (published sizes; no weights here)"
    name = path if config.model.path is not None else "the small base model that comes with srl"
    return (
        f"{name}{source}: {shape.kind}, {millions(shape.parameters)} parameters, {shape.layers} layers, "
        f"width {shape.width}"
    )


def _trained(config: Config, shape: Shape) -> str:
    share = shape.trainable / (shape.parameters + shape.adapter)
    what = f"a LoRA adapter of rank {config.model.lora_rank}" if shape.adapter else "all weights"
    critic = f", and a critic of {millions(shape.critic)}" if shape.critic else ""
    before = ""
    if config.model.path is None:
        before = f"; first {config.sft.steps} steps of fine-tuning, unless the workspace has their result"
    return f"{what}, {millions(shape.trainable)} ({share:.1%}){critic}{before}"


def _questions(config: Config) -> str:
    files = config.data.train_files
    source = ", ".join(files) if files else "those of the made-up world (data.train_files is not set)"
    return f"{source}, prompt {config.data.template or 'as in the files'}"


def _search(config: Config) -> str:
    search = config.search
    if not config.rollout.search:
        return "none (rollout.search=false)"
    if search.replays:
        return f"replayed from {search.cassette_use[1]}" if search.cassette_use else ""
    corpus = config.data.corpus or "the made-up world's pages"
    index = search.index or f"{config.retriever.name} over {corpus}"
    source = ", ".join(search.url) if search.url else f"in this process, {index}"
    lines = [f"{source}, {_passages(search.topk)}"]
    lines += [_named(name, retriever, search.topk) for name, retriever in search.retrievers.items()]
    if search.url or any(retriever.url for retriever in search.retrievers.values()):
        lines.append("a dry run contacts no server (`srl serve check URL` does)")
    return "; ".join([*lines, f"recorded on {search.cassette_use[1]}"] if search.cassette_use else lines)


def _named(name: str, retriever: NamedRetriever, topk: int) -> str:
    source = ", ".join(retriever.url) if retriever.url else retriever.index or retriever.retriever
    return f"{name}: {source}, {_passages(retriever.topk or topk)}"


def _passages(count: int) -> str:
    return f"{count} passages a search"


def _every(steps: int) -> str:
    return f"every {steps} steps" if steps else "after the last"


def _checkpoints(config: Config, shape: Shape, layout: Layout) -> str:
    count = config.trainer.max_ckpt_to_keep
    kept = f"the last {count}" if count else "all"
    export = "" if layout.kind == "local" else "; `srl train export` makes a model of one"
    size = gib(checkpoint_bytes(shape, layout))
    return f"{Workspace.resolve().runs}/…/checkpoints, {size} each, {kept} kept{export}"
