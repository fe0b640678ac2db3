"""What a run on verl does, and which machine does what, in words: the first lines of its plan."""

from __future__ import annotations

from srl.config import Config
from srl.train.dry_run.model_size import Shape
from srl.train.dry_run.plan import facts, gib
from srl.train.dry_run.verl_memory import Split, checkpoint_bytes
from srl.train.learning_rate import updates_in_words
from srl.train.verl.job import Job
from srl.train.verl.setting import rollout_name
from srl.workspace import Workspace


def run_facts(config: Config, named: Config, shape: Shape) -> dict[str, str]:
    """What the local plan says of a run, with verl's checkpoints."""
    assert named.model.path is not None
    found = dict(facts(config, shape, named.model.path))
    count = config.trainer.max_ckpt_to_keep
    kept = f"the last {count}" if count else "all kept"
    found["checkpoints"] = (
        f"{Workspace.resolve().runs}/…/checkpoints, {gib(checkpoint_bytes(shape))} each, {kept}; "
        "`srl train export` makes a model of one"
    )
    return found


def machine_facts(
    config: Config, job: Job, split: Split, processes: dict[str, int], shape: Shape
) -> dict[str, str]:
    """Which machine and which GPU does what."""
    return {
        "machines": _nodes(config, job, split),
        "training": _training(config, split, shape),
        "generation": _generation(config, job, split),
        "processes": ", ".join(f"{count} {what}" for what, count in processes.items()),
        "each step": _step(config, split, shape),
    }


def _nodes(config: Config, job: Job, split: Split) -> str:
    what = "workers on processors, no GPU" if job.cpu else "GPUs, a worker on each"
    where = f"the Ray cluster at {config.cluster.address}" if config.cluster.address else "a Ray of its own"
    return f"{split.nodes} × {split.workers // split.nodes} {what}; {where}"


def _training(config: Config, split: Split, shape: Shape) -> str:
    networks = ["policy", *(["critic"] if shape.critic else []), *(["reference"] if shape.reference else [])]
    one = f"1/{split.workers}" if not split.megatron else f"1/{split.parts} of the weights"
    return f"{config.cluster.strategy}: each worker holds {one} of the {', the '.join(networks)}"


def _generation(config: Config, job: Job, split: Split) -> str:
    name = rollout_name(config, job).removeprefix("srl_")
    each = "1 GPU" if split.copy_gpus == 1 else f"{split.copy_gpus} GPUs"
    where = "each beside a worker" if job.cpu else f"each on {each} of training, in turn with it"
    seqs = f"up to {config.rollout.max_num_seqs:,} episodes at once"
    return f"{name}: {split.copies} copies of the policy, {where}, {seqs}"


def _step(config: Config, split: Split, shape: Shape) -> str:
    """What one step counts: episodes, optimiser steps, and bytes of weights that go to the copies."""
    batch, n, actor = config.data.train_batch_size, config.rollout.n, config.actor
    mini = min(actor.ppo_mini_batch_size, batch)
    weights = f"{gib((shape.parameters + shape.adapter) * split.itemsize)} of weights to each copy"
    return f"{batch * n:,} episodes, {updates_in_words(config, actor)} of {mini * n:,}; {weights}"
