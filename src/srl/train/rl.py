"""Reinforcement learning in this process; `ReinforcementLearning.step` is a step from top to bottom:

sample the episodes of a batch of questions, score them, compute advantages, update critic and policy, log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from srl.advantage import masked_mean
from srl.config import Config
from srl.evaluate import step_metrics
from srl.store import Record
from srl.train.compute_advantages import (
    compute_advantages,
    group_ids,
    needs_old_logprobs,
    policy_metrics,
    token_rewards,
)
from srl.train.dynamic_sampling import Sampled
from srl.train.learner import Learner
from srl.train.loop import Loop
from srl.train.question_order import QuestionOrder, order_of
from srl.train.run_directory import due
from srl.trajectory import Score, Trajectory
from srl.update.actor import ActorLoss, Experience, rows_with_gradient, update_actor
from srl.update.batch import collate, response_and_loss_mask
from srl.update.critic import batched_values, update_critic
from srl.update.logprobs import TokenStats
from srl.update.optimiser import Optimiser
from srl.update.rollout_correction import NO_CORRECTION, RolloutCorrection


@dataclass(slots=True, kw_only=True)
class ReinforcementLearning(Loop):
    """A run of reinforcement learning: `step` is all that it adds to the loop."""

    learner: Learner
    order: QuestionOrder = field(init=False)
    asked: int = 0
    """How many questions of the order are behind."""

    def begin(self) -> None:
        self.order = order_of(self.environment.splits.train, self.config.data, self.config.trainer.seed)

    def step(self, number: int) -> dict[str, float]:
        """Sample, score, advantages, update, log."""
        learner = self.learner
        learner.timings.clear()
        with learner.timed("step"):
            sampled, position = self.sample(number)
            trained = sampled.trained()
            trajectories, scores = unzipped(trained)
            self.put_to_sleep()
            experience, metrics = make_experience(learner, trajectories, scores)
            experience, updated = update(learner, self.optimisers, number, experience)
            with learner.timed("update_weights"):
                self.wake()
        self.asked = position
        metrics |= updated | step_metrics(*unzipped(sampled.records)) | sampled.metrics()
        metrics |= {f"timing_s/{name}": seconds for name, seconds in learner.timings.items()}
        with_numbers_of_tokens(trained, experience)
        self.runner.record(number, "train", sampled.records, metrics)
        self.terminal.step(number, self.config, metrics)
        if due(number, self.config.trainer.sample_freq):
            self.terminal.samples(trajectories, scores)
        return metrics

    def sample(self, number: int) -> tuple[Sampled, int]:
        """The scored episodes of a step, in as many generation batches as it takes, and the place in the
        order of questions after those asked.

        An error puts the episodes that have ended in the log, and a resumed run samples them again. Raises
        UserError where too many failed, or where none teaches anything.
        """
        config, order, position = self.config, self.order, self.asked
        sampled = Sampled(config.algorithm.filter_groups, order.batch_size, self.learner.algorithm.turn_level)
        try:
            while count := sampled.next_batch():
                questions, position = order.further(position, count, sampled.groups)
                if not questions:
                    break
                with self.learner.timed("gen"):
                    trajectories = self.runner.roll_out(questions, "train", number, config.rollout.n)
                with self.learner.timed("reward"):
                    scores = self.runner.score(trajectories)
                self.runner.check_failures([*sampled.trajectories, *trajectories])
                sampled.add(trajectories, scores)
            sampled.require_differing(number)
        except Exception:
            ended = {
                episode.id: episode
                for episode in [*sampled.trajectories, *self.runner.ended]
                if episode.step == number
            }
            if ended:
                unscored = list(map(Record, ended.values()))
                self.runner.record(number, "train", unscored, step_metrics(list(ended.values())))
            raise
        return sampled, position

    def state(self) -> dict[str, Any]:
        return {"kl": self.learner.kl_control.state_dict(), "asked": self.asked}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.learner.kl_control.load_state_dict(state["kl"])
        self.asked = state["asked"]


def make_experience(
    learner: Learner, trajectories: Sequence[Trajectory], scores: Sequence[Score]
) -> tuple[Experience, dict[str, float]]:
    """What the update learns from, with advantages, and the metrics that describe it.

    A row whose search failed has `valid` 0 and a mask of zeros: it is out of the loss, of every mean and of
    its group's baseline. Where old log-probs are those of the update (`needs_old_logprobs`), there are none
    here, nor the metrics that need them.
    """
    config, correction = learner.config, learner.correction
    batch = collate(trajectories).to(learner.device)  # (B, T)
    valid = torch.tensor([episode.valid for episode in trajectories], device=learner.device)  # (B,)
    mask, loss_mask = response_and_loss_mask(batch, valid, mask_observations=config.actor.mask_observations)
    old, reference, values = None, None, None
    if needs_old_logprobs(config, correction):
        with learner.timed("old_log_prob"):
            old = learner.stats(learner.actor, batch, loss_mask)
    if config.needs_reference:
        with learner.timed("ref"), learner.as_reference() as frozen:
            reference = learner.stats(frozen, batch, loss_mask).logprobs
    if learner.critic is not None:
        with learner.timed("values"):
            values = batched_values(learner.critic, batch, max_tokens=config.critic.ppo_max_token_len)
    rewards = token_rewards(
        torch.tensor([score.value for score in scores], device=learner.device, dtype=torch.float32),
        [score.per_turn for score in scores], [episode.turn_ends for episode in trajectories], mask,
    )  # fmt: skip
    experience = Experience(
        tokens=batch, valid=valid, mask=mask, loss_mask=loss_mask,
        group_ids=group_ids([episode.question.id for episode in trajectories]).to(learner.device),
        rewards=rewards, advantages=rewards, returns=rewards, sampler_logprobs=batch.sampler_logprobs,
        old_logprobs=old.logprobs if old else None, entropies=old.entropy if old else None,
        ref_logprobs=reference, values=values,
    )  # fmt: skip
    with learner.timed("adv"):
        experience = compute_advantages(experience, config, learner.algorithm, learner.kl_control, correction)
    return experience, ({} if old is None else entropy_metric(old, mask)) | experience.metrics


def update(
    learner: Learner, optimisers: Mapping[str, Optimiser], number: int, experience: Experience
) -> tuple[Experience, dict[str, float]]:
    """Step critic and policy in training step `number`. The experience, with the old log-probs where the
    update computed them, and the metrics."""
    config, metrics = learner.config, dict[str, float]()
    if learner.critic is not None:
        with learner.timed("update_critic"):
            metrics |= update_critic(
                learner.critic, optimisers["critic"], experience,
                clip=config.critic.cliprange_value, normalise=config.critic.loss_agg_mode,
                horizon=config.data.max_response_length,
                mini_batch_rows=config.critic.ppo_mini_batch_size * config.rollout.n,
                epochs=config.actor.ppo_epochs, max_tokens=config.critic.ppo_max_token_len,
            )  # fmt: skip
    if number <= config.trainer.critic_warmup:
        return experience, metrics
    loss, stats = actor_loss(config, learner.correction), None
    if experience.old_logprobs is None:
        stats = TokenStats(torch.zeros_like(experience.mask), torch.zeros_like(experience.mask))
    with learner.timed("update_actor"):
        metrics |= update_actor(
            learner.actor, optimisers["actor"], experience, loss=loss,
            mini_batch_rows=config.actor.ppo_mini_batch_size * config.rollout.n,
            epochs=config.actor.ppo_epochs, max_tokens=config.actor.ppo_max_token_len, stats=stats,
        )  # fmt: skip
    if stats is None:
        return experience, metrics
    mask = experience.mask * rows_with_gradient(experience, loss)[:, None]
    sampler, reference = experience.sampler_logprobs, experience.ref_logprobs
    metrics |= entropy_metric(stats, mask)
    metrics |= policy_metrics(stats.logprobs, mask, sampler, reference, learner.correction)
    return replace(experience, old_logprobs=stats.logprobs, entropies=stats.entropy), metrics


def entropy_metric(stats: TokenStats, mask: Tensor) -> dict[str, float]:
    return {"actor/entropy": float(masked_mean(stats.entropy, mask))}


def actor_loss(config: Config, correction: RolloutCorrection = NO_CORRECTION) -> ActorLoss:
    """The loss configured in the section `actor`."""
    actor = config.actor
    return ActorLoss(
        temperature=config.rollout.temperature,
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        loss_mode=actor.policy_loss.loss_mode,
        normalise=actor.loss_agg_mode,
        horizon=config.data.max_response_length,
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
        correction=correction,
    )


def unzipped(records: Sequence[Record]) -> tuple[list[Trajectory], list[Score]]:
    """The trajectories of scored records, and their scores."""
    return [record.trajectory for record in records], [record.score or Score(0.0) for record in records]


def with_numbers_of_tokens(trained: Sequence[Record], experience: Experience) -> None:
    """Give the records of the experience's rows the numbers of their tokens, without padding.

    An episode that no pass has read (it failed, or has no gradient) has no log-probs and entropies.
    """
    old, entropies = experience.old_logprobs, experience.entropies
    for row, record in enumerate(trained):
        length, record.left_out = len(record.trajectory.token_ids), False
        record.advantages = experience.advantages[row, :length].tolist()
        record.returns = experience.returns[row, :length].tolist()
        if old is not None and bool(old[row].any()):
            record.trainer_logprobs = old[row, :length].tolist()
            record.entropies = None if entropies is None else entropies[row, :length].tolist()
