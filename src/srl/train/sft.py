"""Supervised fine-tuning, `srl train --algo sft`: the run, what it learns from, its batches, loss and steps.

A run's step is one batch. The cold start (`srl.train.cold_start`) and rounds of rejection sampling fine-tune
as well (`fine_tune`).

A scripted engine runs each demonstration through `run_episode` with the real search, so that the
tokens and masks are those of a rollout.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from srl import process
from srl.config.sections import Sft
from srl.data.demonstration_file import read_demonstrations
from srl.errors import UserError
from srl.progress import Note, counted
from srl.rollout.engine import ScriptedEngine
from srl.rollout.environment import Environment
from srl.rollout.episode import Key
from srl.rollout.protocol import Protocol
from srl.train.learning_rate import sft_factor
from srl.train.load_protocol import prompts
from srl.train.loop import Loop
from srl.trajectory import Question, Trajectory
from srl.update.batch import Batch, collate
from srl.update.logits import micro_batches_of
from srl.update.logprobs import token_stats
from srl.update.losses import sft_loss
from srl.update.optimiser import Optimiser

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True, kw_only=True)
class FineTuning(Loop):
    """Fine-tunes for `sft.steps`.

    The order of the episodes depends on the seed only, so a resumed run continues as if it had not stopped.
    """

    episodes: list[Trajectory]
    data: Iterator[list[Trajectory]] = field(init=False)

    def step(self, number: int) -> dict[str, float]:
        sft = self.config.sft
        self.put_to_sleep()
        metrics = fine_tune_step(
            self.actor, self.optimisers["actor"], next(self.data),
            max_tokens=self.config.actor.ppo_max_token_len,
        )  # fmt: skip
        self.record(number, "sft", [], metrics)
        if number in (1, sft.steps) or number % 10 == 0:
            self.terminal.fine_tuning_step(number, sft.steps, metrics)
        return metrics

    @property
    def steps(self) -> int:
        return self.config.sft.steps

    def begin(self) -> None:
        self.data = itertools.islice(
            batches(self.episodes, self.config.sft, self.config.trainer.seed), self.progress.step, None
        )
        if self.progress.step == 0:
            tokens = sum(episode.policy_tokens for episode in self.episodes)
            counts = {"sft/episodes": float(len(self.episodes)), "sft/policy_tokens": float(tokens)}
            self.record(0, "sft", [], counts)


def demonstrated(
    file: Path,
    environment: Environment,
    note: Note = lambda text: None,
    training_questions: Sequence[Question] = (),
) -> list[Trajectory]:
    """The demonstrations of `file` as episodes, run against the search that training will use. Those of the
    `training_questions` have their prompts.

    One that does not play as it is written (`not_as_written`) would teach something else. It is left out, and
    a note says so. Raises UserError if none is left.
    """
    demonstrations = read_demonstrations(file)
    fitting, faults = with_prompts(demonstrations, environment, training_questions)
    episodes = demonstrate(fitting, environment)
    whys = [not_as_written(episode, environment.protocol) for episode in episodes]
    faults += [
        (episode.question.id, why) for episode, why in zip(episodes, whys, strict=True) if why is not None
    ]
    if faults:
        name, why = faults[0]
        message = (
            f"{file}: {len(faults):,} of {len(demonstrations):,} demonstrations do not play as they are "
            f"written; the first is {name!r}: {why}"
        )
        if len(faults) == len(demonstrations):
            raise UserError(message)
        note(f"warning: {message}; they are left out")
    return [episode for episode, why in zip(episodes, whys, strict=True) if why is None]


def with_prompts(
    questions: Sequence[Question], environment: Environment, training_questions: Sequence[Question] = ()
) -> tuple[list[Question], list[tuple[str, str]]]:
    """The questions with the prompts that reinforcement learning gives them: that of one of
    `training_questions` with the same text, which may be from its file, else the template's. Also the ids of
    those whose prompt is too long, with what to say. A template that retrieves makes its prompts while an
    episode runs."""
    codec, template = environment.codec, environment.template
    if template.retrieves:
        return list(questions), []
    prompt_of, longest = prompts(template, codec), environment.options.max_prompt_length
    fitting, faults = list[Question](), list[tuple[str, str]]()
    prompt_by_text = {question.text: question.prompt for question in training_questions}
    for question in questions:
        prompt = prompt_by_text.get(question.text) or prompt_of(question.text)
        if (length := len(environment.protocol.prompt(prompt)[0])) <= longest:
            fitting.append(replace(question, prompt=prompt))
        else:
            why = f"its prompt has {length:,} tokens, more than data.max_prompt_length={longest}"
            faults.append((question.id, why))
    return fitting, faults


def not_as_written(episode: Trajectory, protocol: Protocol) -> str | None:
    """Why the episode of a demonstration is not what its turns (`metadata["turns"]`) say; None if it is."""
    turns = episode.question.metadata["turns"]
    played = [segment.token_ids for segment in episode.segments if segment.is_policy]
    for number, (text, ids) in enumerate(zip(turns, played, strict=False), start=1):
        if any(stop in protocol.codec.decode(ids[:-1]) for stop in protocol.stop):
            return f"turn {number} goes on after its tag"
        if len(protocol.encode(text)) > len(ids):
            return f"turn {number} does not fit (rollout.max_turn_tokens, data.max_response_length)"
    if rejected := next((search for search in episode.searches if search.status == "rejected"), None):
        return f"turn {rejected.turn + 1}: {rejected.error}"
    if len(played) < len(turns):
        limits = "rollout.max_turns, data.max_response_length"
        return f"{len(played)} of its {len(turns)} turns are played ({limits})"
    if episode.end != "answered" or episode.valid_actions < episode.turns:
        return "a turn is neither a search nor an answer, or it ends without an answer"
    return None


def digest_of_episodes(episodes: Iterable[Trajectory]) -> str:
    """32 hex digits of the token ids of all segments, in order."""
    digest = blake2b(digest_size=16)
    for episode in episodes:
        for segment in episode.segments:
            digest.update(array("q", [len(segment.token_ids), *segment.token_ids]).tobytes())
    return digest.hexdigest()


def fine_tune(
    sft: Sft, model: PreTrainedModel, episodes: list[Trajectory], *, max_tokens: int, seed: int, what: str
) -> dict[str, float]:
    """A whole fine-tuning, shown as `what`: `sft.steps` optimiser steps, at most `max_tokens` in a forward
    pass. The metrics of the last step, with all tokens and seconds."""
    data, optimiser = batches(episodes, sft, seed), sft_optimiser(sft, model)
    metrics, tokens, began = dict[str, float](), 0.0, time.perf_counter()
    with counted(what, sft.steps) as count:
        for number, batch in enumerate(data, start=1):
            metrics = fine_tune_step(model, optimiser, batch, max_tokens=max_tokens)
            tokens += metrics["perf/total_num_tokens"]
            count(number)
    seconds = time.perf_counter() - began
    return metrics | {
        "perf/total_num_tokens": tokens, "perf/throughput": tokens / seconds, "sft/steps": sft.steps,
        "timing_s/update_actor": seconds,
    }  # fmt: skip


def sft_optimiser(sft: Sft, model: PreTrainedModel) -> Optimiser:
    """AdamW of the section `sft`; the schedule of its learning rate ends at `sft.steps`."""
    optim = sft.optim
    return Optimiser(
        model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay,
        schedule=sft_factor(sft),
    )  # fmt: skip


def demonstrate(questions: Sequence[Question], environment: Environment) -> list[Trajectory]:
    """Run the demonstrations (`metadata["turns"]`) as episodes, in order; several may share a question.

    Raises UserError if search fails: an episode cut short would teach the model to stop there.
    """

    async def one(question: Question) -> Trajectory:
        turns = question.metadata["turns"]
        engine = ScriptedEngine(
            environment.codec, lambda request, turn: turns[turn] if turn < len(turns) else "",
            environment.protocol.encode,
        )  # fmt: skip
        trajectory = await environment.play(engine, question, Key(phase="sft"))
        count(next(numbers))
        return trajectory

    async def all_at_once() -> list[Trajectory]:
        return await asyncio.gather(*map(one, questions))

    numbers = itertools.count(1)

    with counted("demonstrations", len(questions)) as count:
        trajectories = process.run_async(all_at_once())
    failed = [trajectory for trajectory in trajectories if not trajectory.valid]
    if failed:
        fault = failed[0].searches[-1]
        raise UserError(
            f"search failed in {len(failed)} of {len(trajectories)} demonstrations "
            f"({fault.status}: {fault.error}); test it with `srl index search` or `srl serve check`, then "
            "type the same command again"
        )
    return trajectories


def batches(trajectories: Sequence[Trajectory], sft: Sft, seed: int) -> Iterator[list[Trajectory]]:
    """`sft.steps` batches of `sft.batch_size` trajectories, shuffled anew each epoch."""
    rng, queue = random.Random(seed), list[Trajectory]()
    for _ in range(sft.steps):
        while len(queue) < sft.batch_size:
            queue += rng.sample(trajectories, len(trajectories))
        batch, queue = queue[: sft.batch_size], queue[sft.batch_size :]
        yield batch


def fine_tune_step(
    model: PreTrainedModel,
    optimiser: Optimiser,
    trajectories: list[Trajectory],
    *,
    observation_weight: float = 0.0,
    max_tokens: int = 16384,
) -> dict[str, float]:
    """One optimiser step, and its metrics: loss, learning rate, tokens (prompts included) and seconds."""
    start = time.perf_counter()
    batch = collate(trajectories).to(next(model.parameters()).device)
    metrics = accumulate(model, batch, observation_weight=observation_weight, max_tokens=max_tokens)
    metrics |= {"sft/lr": optimiser.lr, "sft/grad_norm": optimiser.step()}
    seconds, tokens = time.perf_counter() - start, float(batch.attention_mask.sum())
    return metrics | {
        "timing_s/step": seconds, "perf/total_num_tokens": tokens, "perf/throughput": tokens / seconds,
    }  # fmt: skip


def accumulate(
    model: PreTrainedModel, batch: Batch, *, observation_weight: float, max_tokens: int
) -> dict[str, float]:
    """Backward over micro-batches. Returns the mean loss of all trained tokens and of the policy's."""
    weights = token_weights(batch, observation_weight)
    denominator = weights.sum()
    total, own = 0.0, 0.0
    for index in micro_batches_of(model, batch, max_tokens):
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
