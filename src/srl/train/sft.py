"""Supervised fine-tuning on demonstrations: `srl train --algo sft`, and the cold start before RL.

A scripted engine runs each demonstration through `run_episode` with the real search, so that the
tokens and masks are those of a rollout.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from srl import interrupts
from srl.config import Config
from srl.config.sections import Sft
from srl.data.demonstration_file import read_demonstrations
from srl.errors import UserError
from srl.files import atomic_directory
from srl.manifests import ABOUT, CHECKPOINT, checksums, write_manifest
from srl.model import save_model
from srl.progress import counted
from srl.protocol import Template
from srl.rollout.codec import Codec
from srl.rollout.engine import ScriptedEngine
from srl.rollout.episode import EpisodeOptions
from srl.rollout.many_episodes import rollout
from srl.train.episodes import Environment, EpisodeRunner
from srl.train.load_components import LoadedModel
from srl.train.model_card import model_card, write_card
from srl.train.run_directory import Progress, checkpoint_path
from srl.train.search import IndexDigests
from srl.trajectory import Question, SearchTool, Trajectory
from srl.update.batch import Batch, collate, micro_batches
from srl.update.logits import packs
from srl.update.logprobs import token_stats
from srl.update.losses import sft_loss
from srl.update.optimiser import Optimiser, schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OnStep = Callable[[int, dict[str, float]], None]
Loop = Callable[[Path, EpisodeRunner, int | None], Progress]
"""Trains a run in its directory; the last argument is as in `srl.train.run.Trainer.train`."""


def sft_loop(config: Config, policy: LoadedModel, place: Environment, file: Path) -> Loop:
    """Fine-tuning on the demonstrations in `file`, which are run here first. Raises UserError for 0 steps."""
    if config.sft.steps == 0:
        raise UserError("nothing to fine-tune: sft.steps = 0; type --steps with a number above 0")
    episodes = demonstrated(file, place.search, policy.codec, place.template, place.options)

    def loop(run: Path, runner: EpisodeRunner, resumed_from: int | None) -> Progress:
        progress = Progress()
        runner.give_weights(policy.model)
        if config.trainer.val_before_train:
            runner.validate(progress)
            progress.test_em_start = runner.test(0)

        def on_step(step: int, metrics: dict[str, float]) -> None:
            progress.step = step
            runner.record(step, "sft", [], metrics)
            if step % 10 == 0 or step == config.sft.steps:
                runner.terminal.step(step, config.sft.steps, metrics)

        began, longest = time.perf_counter(), config.actor.ppo_max_token_len
        runner.engine.sleep()
        fine_tune_policy(config.sft, policy, episodes, on_step, longest, config.trainer.seed)
        runner.give_weights(policy.model)
        runner.engine.wake()
        progress.seconds = time.perf_counter() - began
        runner.validate(progress)
        progress.test_em_end = runner.test(progress.step)
        card = model_card(place.template, IndexDigests.of(place.search))
        save_fine_tuned(checkpoint_path(run, progress.step), policy, card)
        return progress

    return loop


def save_fine_tuned(path: Path, policy: LoadedModel, card: dict[str, Any]) -> None:
    """Write the fine-tuned model as a Hugging Face directory, with its card beside the weights."""
    with atomic_directory(path) as folder:
        save_model(policy.model, policy.codec.tokenizer, folder)
        write_card(folder / ABOUT, card)
        write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})


def demonstrated(
    file: Path, search: SearchTool | None, codec: Codec, template: Template, options: EpisodeOptions
) -> list[Trajectory]:
    """The demonstrations of `file` as episodes, run against the search that training will use."""
    return demonstrate(read_demonstrations(file), search, codec=codec, template=template, options=options)


def fine_tune_policy(
    sft: Sft, policy: LoadedModel, trajectories: list[Trajectory], on_step: OnStep, max_tokens: int, seed: int
) -> None:
    """`sft.steps` optimiser steps over the demonstrations, at most `max_tokens` in a forward pass."""
    torch.manual_seed(seed)
    optim = sft.optim
    optimiser = Optimiser(
        policy.model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay,
        eps=optim.eps, schedule=schedule(optim.lr_scheduler_type, optim.lr_warmup_steps, sft.steps),
    )  # fmt: skip
    data = batches(trajectories, sft.batch_size, sft.steps, seed)
    with counted("fine-tuning steps", sft.steps) as count:

        def stepped(step: int, metrics: dict[str, float]) -> None:
            on_step(step, metrics)
            count(step)

        fine_tune(
            policy.model, optimiser, data, observation_weight=sft.observation_weight, max_tokens=max_tokens,
            on_step=stepped,
        )  # fmt: skip


def demonstrate(
    questions: Sequence[Question],
    search: SearchTool | None,
    *,
    codec: Codec,
    template: Template,
    options: EpisodeOptions,
) -> list[Trajectory]:
    """Run the demonstrations (`metadata["turns"]`) as episodes, in order; several may share a question.

    Raises UserError if search fails: an episode cut short would teach the model to stop there.
    """

    async def one(question: Question) -> Trajectory:
        turns = question.metadata["turns"]
        engine = ScriptedEngine(codec, lambda request, turn: turns[turn] if turn < len(turns) else "")
        (trajectory,) = await rollout(
            [question], engine, search, codec=codec, template=template, options=options, phase="sft"
        )
        count(next(done))
        return trajectory

    async def all_at_once() -> list[Trajectory]:
        return await asyncio.gather(*map(one, questions))

    done = itertools.count(1)

    with counted("demonstrations", len(questions)) as count:
        trajectories = interrupts.run(all_at_once())
    failed = [item for item in trajectories if not item.valid]
    if failed:
        fault = failed[0].searches[-1]
        raise UserError(
            f"search failed in {len(failed)} of {len(trajectories)} demonstrations "
            f"({fault.status}: {fault.error}); repair the search and start again"
        )
    return trajectories


def batches(
    trajectories: Sequence[Trajectory], size: int, steps: int, seed: int
) -> Iterator[list[Trajectory]]:
    """`steps` batches of `size` trajectories, shuffled anew each epoch."""
    rng = random.Random(seed)
    queue: list[Trajectory] = []
    for _ in range(steps):
        while len(queue) < size:
            queue += rng.sample(trajectories, len(trajectories))
        batch, queue = queue[:size], queue[size:]
        yield batch


def fine_tune(
    model: PreTrainedModel,
    optimiser: Optimiser,
    data: Iterator[list[Trajectory]],
    *,
    observation_weight: float = 0.0,
    max_tokens: int = 16384,
    on_step: OnStep | None = None,
) -> None:
    """One optimiser step per batch; calls `on_step(step, metrics)` after each, counted from 1."""
    model.train()
    device = next(model.parameters()).device
    for step, trajectories in enumerate(data, start=1):
        start = time.perf_counter()
        batch = collate(trajectories).to(device)
        metrics = accumulate(model, batch, observation_weight=observation_weight, max_tokens=max_tokens)
        metrics |= {"sft/lr": optimiser.lr, "sft/grad_norm": optimiser.step()}
        metrics["timing_s/step"] = time.perf_counter() - start
        if on_step is not None:
            on_step(step, metrics)


def accumulate(
    model: PreTrainedModel, batch: Batch, *, observation_weight: float, max_tokens: int
) -> dict[str, float]:
    """Backward over micro-batches. Returns the mean loss of all trained tokens and of the policy's."""
    weights = token_weights(batch, observation_weight)
    denominator = weights.sum()
    total, own = 0.0, 0.0
    for index in micro_batches(batch.lengths, max_tokens, packs(model)):
        rows = batch.rows(index)
        trained = weights[index, : rows.input_ids.shape[1]]
        if not bool(trained.any()):
            continue
        stats = token_stats(model, rows, trained, entropy=False)
        loss, _ = sft_loss(stats.logprobs, trained, denominator=denominator)
        loss.backward()
        total += float(loss.detach())
        own -= float((stats.logprobs.detach() * rows.response_mask).sum())
    return {"sft/loss": total, "sft/policy_loss": own / float(batch.response_mask.sum())}


def token_weights(batch: Batch, observation_weight: float) -> Tensor:
    """(B, T): 1 on the policy's tokens, `observation_weight` on others, 0 on padding and the first."""
    weights = batch.response_mask + observation_weight * (batch.attention_mask - batch.response_mask)
    weights[:, 0] = 0.0
    return weights
