"""Reinforcement learning in this process; `ReinforcementLearning.step` is a step from top to bottom:

sample the episodes of a batch of questions, score them, compute advantages, update critic and policy, log.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from srl.advantage import Algorithm, masked_mean
from srl.advantage.groups import group_ids
from srl.config import Config
from srl.evaluate import step_metrics
from srl.models.load import load_model, on_device
from srl.models.weights import has_lora, model_digest, without_lora
from srl.rollout.engine import Engine
from srl.store import Record
from srl.train.compute_advantages import (
    compute_advantages,
    needs_old_logprobs,
    policy_metrics,
    rollout_correction,
    token_rewards,
)
from srl.train.dynamic_sampling import sample_until_differing
from srl.train.learning_rate import Network, rate_factor
from srl.train.load_components import LoadedModel, load_algorithm, model_options
from srl.train.loop import Loop
from srl.train.questions import QuestionOrder, order_of
from srl.trajectory import Question, Score, Trajectory
from srl.update.actor import ActorLoss, Experience, rows_with_gradient, update_actor
from srl.update.batch import Batch, collate, response_and_loss_mask
from srl.update.critic import Critic, batched_values, update_critic
from srl.update.kl import KLController, kl_controller
from srl.update.logprobs import TokenStats, batched_stats
from srl.update.optimiser import Optimiser
from srl.update.rollout_correction import NO_CORRECTION, RolloutCorrection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True, kw_only=True)
class ReinforcementLearning(Loop):
    """A run of reinforcement learning: `step` is all that it adds to the loop."""

    learner: Learner
    order: QuestionOrder = field(init=False)
    asked: int = 0
    """How many questions of the order are behind."""

    def begin(self) -> None:
        self.order = order_of(self.splits.train, self.config.data, self.config.trainer.seed)

    def step(self, number: int) -> dict[str, float]:
        """Sample, score, advantages, update, log."""
        learner = self.learner
        learner.timings.clear()
        with learner.timed("step"):
            records, position, metrics = self.sample(number)
            trained = [record for record in records if not record.left_out]
            trajectories, scores = unzipped(trained)
            self.put_to_sleep()
            experience, described = make_experience(learner, trajectories, scores)
            experience, updated = update_networks(learner, self.optimisers, number, experience)
            with learner.timed("update_weights"):
                self.wake()  # gives an engine with a copy the weights; the torch engine has the policy itself
        self.asked = position
        metrics = described | updated | step_metrics(*unzipped(records)) | metrics
        metrics |= {f"timing_s/{name}": seconds for name, seconds in learner.timings.items()}
        with_numbers_of_tokens(trained, experience)
        self.record(number, "train", records, metrics)
        self.terminal.step(number, self.config, metrics)
        return metrics

    def sample(self, number: int) -> tuple[list[Record], int, dict[str, float]]:
        """The scored episodes of a step, the place in the order of questions after those asked, and metrics.

        An error puts the episodes that have ended in the log, and a resumed run samples them again. Raises
        UserError where too many failed.
        """
        config, order, records = self.config, self.order, list[Record]()

        def play(questions: Sequence[Question]) -> list[Record]:
            with self.learner.timed("gen"):
                trajectories = self.roll_out(questions, "train", number, config.rollout.n)
            with self.learner.timed("reward"):
                scores = self.score(trajectories)
            self.check_failures([*unzipped(records)[0], *trajectories])
            records.extend(map(Record, trajectories, scores))
            return records

        try:
            if config.algorithm.filter_groups.enable:
                position, batches = sample_until_differing(
                    config.algorithm.filter_groups, order, self.asked, play
                )
                return records, position, {"train/num_gen_batches": float(batches)}
            questions, position = order.further(self.asked, order.batch_size)
            return play(questions), position, {}
        except Exception:
            ended = [*unzipped(records)[0], *(episode for episode in self.ended if episode.step == number)]
            if ended := list({episode.id: episode for episode in ended}.values()):
                self.record(number, "train", list(map(Record, ended)), step_metrics(ended))
            raise

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
    if needs_old_logprobs(config):
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


def update_networks(
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
    loss, stats = loss_settings(config, learner.correction), None
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


def loss_settings(config: Config, correction: RolloutCorrection = NO_CORRECTION) -> ActorLoss:
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
        length = len(record.trajectory.token_ids)
        record.advantages = experience.advantages[row, :length].tolist()
        record.returns = experience.returns[row, :length].tolist()
        if old is not None and bool(old[row].any()):
            record.trainer_logprobs = old[row, :length].tolist()
            record.entropies = None if entropies is None else entropies[row, :length].tolist()


# ---- The networks


@dataclass(slots=True)
class Learner:
    """The networks of reinforcement learning, and the KL controller of their rewards.

    `same_weights`: what samples has the actor's weights, to the bit.
    """

    config: Config
    algorithm: Algorithm
    actor: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None
    kl_control: KLController
    same_weights: bool = True
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of the step under way, by verl's names in `timing_s/…`."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measures a part of a step."""
        start = time.perf_counter()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    @property
    def correction(self) -> RolloutCorrection:
        return rollout_correction(self.config, self.same_weights)

    @property
    def device(self) -> torch.device:
        return next(self.actor.parameters()).device

    def stats(self, model: PreTrainedModel, batch: Batch, mask: Tensor) -> TokenStats:
        """Log-probs and entropies (B, T) where `mask` is 1, at the temperature of the rollout."""
        return batched_stats(
            model, batch, mask, max_tokens=self.config.actor.ppo_max_token_len,
            temperature=self.config.rollout.temperature,
        )  # fmt: skip

    @contextmanager
    def as_reference(self) -> Iterator[PreTrainedModel]:
        """The frozen reference model, on the policy's device; without one, the policy without adapters."""
        if self.reference is not None:
            with on_device(self.reference, self.device):
                yield self.reference
        else:
            with without_lora(self.actor):
                yield self.actor


def samples_as_trained(engine: Engine, model: PreTrainedModel) -> bool:
    """Whether `engine` samples with the weights of `model` as the trainer has them.

    An adapter that is merged into weights of less than float32 is rounded, a small one away.
    """
    return engine.same_weights and not (has_lora(model) and model.dtype.itemsize < 4)


def load_learner(config: Config, policy: LoadedModel, same_weights: bool = True) -> Learner:
    """Actor, frozen reference and critic, as far as the algorithm needs them.

    `same_weights`: what samples has the policy's weights (`samples_as_trained`).
    """
    algorithm = load_algorithm(config)
    adapter = config.model.lora_rank > 0 and config.ref.path is None
    reference = _load_reference(config, policy.model) if config.needs_reference and not adapter else None
    critic = Critic(policy.model, **critic_options(config)) if algorithm.needs_critic else None
    control = config.algorithm.kl_ctrl
    kl = kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
    return Learner(config, algorithm, policy.model, reference, critic, kl, same_weights)


def critic_options(config: Config) -> dict[str, Any]:
    """The keywords of `srl.update.critic.Critic`: how its adapter is, if it has one."""
    model = config.model
    return {
        "lora_rank": config.critic.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_target_modules": model.lora_target_modules,
    }


def _load_reference(config: Config, policy: PreTrainedModel) -> PreTrainedModel:
    """The frozen reference in the policy's precision; of a policy on a GPU in pinned host memory."""
    away = policy.device.type == "cuda"
    options = model_options(config.model) | {
        "dtype": str(policy.dtype).removeprefix("torch."), "lora_rank": 0, "gradient_checkpointing": False,
    } | ({"device": "cpu"} if away else {})  # fmt: skip
    reference = load_model(_reference_path(config), **options).requires_grad_(False)
    for weight in reference.parameters() if away else ():
        weight.data = weight.data.pin_memory()
    return reference


def reference_digest(config: Config, loaded: PreTrainedModel | None = None) -> str:
    """The digest of the reference policy, `loaded` or in its directory; empty where no KL is asked for."""
    if not config.needs_reference:
        return ""
    return model_digest(_reference_path(config) if loaded is None else loaded)


def _reference_path(config: Config) -> str:
    path = config.ref.path or config.model.path
    assert path is not None, "model.path is filled in before the model is loaded"
    return path


def load_optimisers(config: Config, learner: Learner, questions: int | None = None) -> dict[str, Optimiser]:
    """AdamW for the actor, and for the critic where there is one; `questions` as in `learning_rate`."""
    networks: dict[Network, nn.Module] = {"actor": learner.actor}
    if learner.critic is not None:
        networks["critic"] = learner.critic
    optimisers: dict[str, Optimiser] = {}
    for name, model in networks.items():
        section = getattr(config, name)
        optim, schedule = section.optim, rate_factor(config, name, questions=questions)
        optimisers[name] = Optimiser(
            model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay,
            grad_clip=section.grad_clip, schedule=schedule,
        )  # fmt: skip
    return optimisers
