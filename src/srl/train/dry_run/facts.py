"""A run in words: the first lines of its plan."""

from __future__ import annotations

from pathlib import Path

from srl.config import Config
from srl.config.sections import Trainer
from srl.hub_models import HubName, hub_name
from srl.train.disk_space import kept_checkpoints
from srl.train.dry_run.memory import Layout, checkpoint_bytes, gib, millions
from srl.train.dry_run.model_size import Shape
from srl.train.learning_rate import updates_in_words
from srl.train.verl.job import Job, rollout_name
from srl.workspace import Workspace


def run_facts(config: Config, shape: Shape, path: str | Path, layout: Layout) -> dict[str, str]:
    """What is trained, how, on what, for how long, and what it leaves behind."""
    rollout, data, actor, trainer = config.rollout, config.data, config.actor, config.trainer
    source = " (not downloaded yet)" if HubName.parse(path) else ""
    name = (
        hub_name(path) or path
        if config.model.path is not None
        else "the small base model that comes with srl"
    )
    files = ", ".join(data.train_files or ()) or "those of the made-up world (data.train_files is not set)"
    share = shape.trainable / (shape.parameters + shape.adapter)
    what = f"a LoRA adapter of rank {config.model.lora_rank}" if shape.adapter else "all weights"
    rank = config.critic.lora_rank
    kind = f"an adapter of rank {rank}, " if rank else ""
    critic = f", and a critic: {kind}{millions(shape.critic_trained)}" if shape.critic else ""
    first = f"; first {config.sft.steps} steps of fine-tuning, unless the workspace has their result"
    before = "" if config.model.path is not None else first
    save = f"every {trainer.save_freq} steps" if trainer.save_freq else "after the last"
    test = f"a validation every {trainer.test_freq} steps" if trainer.test_freq else "no validation"
    export = "" if layout.kind == "local" else "; `srl train export` makes a model of one"
    return {
        "model": f"{name}{source}: {shape.kind}, {millions(shape.parameters)} parameters, {shape.layers} "
        f"layers, width {shape.width}",
        "trained": f"{what}, {millions(shape.trainable)} ({share:.1%}){critic}{before}",
        "algorithm": f"{config.algorithm.name}: {data.train_batch_size} questions × {rollout.n} episodes a "
        f"step, {updates_in_words(config, actor)}, learning rate {actor.optim.lr:g}",
        "episodes": f"up to {data.max_prompt_length:,} tokens of prompt and {data.max_response_length:,} of "
        f"response; up to {rollout.max_turns + 1} turns of {rollout.max_turn_tokens} tokens",
        "questions": f"{files}, prompt {data.template or 'as in the files'}",
        "search": _search(config),
        "reward": " + ".join(f"{weight:g} × {name}" for name, weight in config.reward.weights.items()),
        "length": f"{trainer.total_training_steps} steps; a checkpoint {save}, {test}",
        "checkpoints": f"{Workspace.resolve().runs}/…/checkpoints, "
        f"{disk_of_checkpoints(trainer, checkpoint_bytes(shape, layout))}{export}",
    }


def disk_of_checkpoints(trainer: Trainer, size: int) -> str:
    """Which checkpoints of `size` bytes stay, and the disk that they take at most."""
    found = kept_checkpoints(trainer, trainer.total_training_steps)
    stay = (
        f"the last {found.newest}{' and the best' if found.best else ''}"
        if found.newest
        else f"all {found.most}"
    )
    return f"{gib(size)} each, {stay} kept: up to {gib(found.most * size)}"


def _search(config: Config) -> str:
    search, (mode, cassette) = config.search, config.search.cassette_use or ("", "")
    if not config.rollout.search:
        return "none (rollout.search=false)"
    if search.replays:
        return f"replayed from {cassette}"
    corpus = config.data.corpus or "the made-up world's pages"
    index = search.index or f"{config.retriever.name} over {corpus}"
    source = ", ".join(search.url) if search.url else f"in this process, {index}"
    lines = [f"{source}, {search.topk} passages a search"]
    for name, other in search.retrievers.items():
        named = ", ".join(other.url) if other.url else other.index or other.retriever
        lines.append(f"{name}: {named}, {other.topk or search.topk} passages a search")
    if search.url or any(other.url for other in search.retrievers.values()):
        lines.append("a dry run contacts no server (`srl serve check URL` does)")
    if mode:
        lines.append(f"recorded on {cassette}")
    return "; ".join(lines)


def machine_facts(config: Config, job: Job, layout: Layout, shape: Shape) -> dict[str, str]:
    """verl's placement: which machine and which GPU does what, and what one step counts."""
    batch, n, actor, cluster = config.data.train_batch_size, config.rollout.n, config.actor, config.cluster
    what = "workers on the CPU" if layout.cpu else "GPUs with one worker each"
    where = f"the Ray cluster at {cluster.address}" if cluster.address else "a Ray cluster of its own"
    critic, reference = ", the critic" if shape.critic else "", ", the reference" if shape.reference else ""
    share = f"1/{layout.shards}" + (" of the weights" if layout.kind == "megatron" else "")
    gpus = "1 GPU" if layout.copy_gpus == 1 else f"{layout.copy_gpus} GPUs"
    beside = "each beside a worker" if layout.cpu else f"each on {gpus} of training, in turn with it"
    weights = gib((shape.parameters + shape.adapter) * shape.itemsize)
    return {
        "machines": f"{layout.nodes} × {layout.workers // layout.nodes} {what}; {where}",
        "training": f"{cluster.strategy}: each worker holds {share} of the policy{critic}{reference}",
        "generation": f"{rollout_name(config, job).removeprefix('srl_')}: {layout.copies} copies of the "
        f"policy, {beside}, up to {config.rollout.max_num_seqs:,} episodes at once",
        "processes": f"{layout.workers} workers that train, {layout.copies} servers that generate, "
        f"{layout.episode_workers} workers that run episodes, {layout.single_processes} for this "
        "command, the trainer, the log and the queue",
        "each step": f"{batch * n:,} episodes, {updates_in_words(config, actor)} of "
        f"{min(actor.ppo_mini_batch_size, batch) * n:,}; {weights} of weights to each copy",
    }
