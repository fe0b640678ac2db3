"""Sections about what learns: algorithm, actor, critic, reference, fine-tuning, the run, evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from srl.config.base import (
    Count,
    File,
    KlEstimator,
    Listed,
    LossAggMode,
    Natural,
    NonNegative,
    PluginSection,
    Positive,
    Section,
    Seed,
    Share,
    one_or_many,
)


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed, or adaptive towards target_kl (Ziegler et al. 2019)."""
    kl_coef: NonNegative = 0.001
    """Coefficient of the penalty; where adaptive starts."""
    target_kl: Positive = 0.1
    """KL that the adaptive coefficient aims at."""
    horizon: Count = 10000
    """Episodes over which the adaptive coefficient moves."""


class Algorithm(PluginSection):
    """From rewards to advantages. Options of an algorithm lie under its name."""

    name: str = "ppo"
    """The algorithm plugin; `srl plugins list` shows those installed."""
    gamma: Share = 1.0
    """Discount for each token that the policy wrote."""
    lam: Share = 1.0
    """λ of generalised advantage estimation."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef × KL(policy, reference) from the reward of each token."""
    kl_penalty: KlEstimator = "k1"
    """Estimator of the KL in the reward: k1 (difference of log-probs), k2 (half its square), k3 (low
    variance)."""
    kl_ctrl: KlCtrl = KlCtrl()


class Optim(Section):
    """AdamW and its learning rate."""

    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        Listed,
    ] = (0.9, 0.999)
    """Decay of the first and second moment."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    lr_warmup_steps: Natural = 0
    """Training steps over which the learning rate rises from 0; 0: see lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: Share = 0.0
    """The same as a share of the steps in which the network learns; only where lr_warmup_steps is 0."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 at the last step."""


class CriticOptim(Optim):
    """AdamW and its learning rate."""

    lr: Positive = 1e-5
    """Learning rate after the warm-up."""


class SftOptim(CriticOptim):
    """AdamW and its learning rate."""


class Actor(Section):
    """The update of the policy."""

    ppo_mini_batch_size: Count = 64
    """Questions (× rollout.n episodes) of one optimiser step; divides data.train_batch_size."""
    ppo_epochs: Count = 1
    """Passes over the episodes of a step."""
    ppo_max_token_len: Count = 16384
    """Tokens of a forward and backward pass, padding included: the knob for memory. What is computed does
    not depend on it."""
    clip_ratio: NonNegative = 0.2
    """ε of PPO's clipping."""
    clip_ratio_low: NonNegative | None = None
    """ε below 1; null: clip_ratio."""
    clip_ratio_high: NonNegative | None = None
    """ε above 1; null: clip_ratio."""
    clip_ratio_c: float | None = Field(default=3.0, gt=1)
    """Bound of the ratio where the advantage is negative (dual clip, Ye et al. 2020); null: none."""
    entropy_coeff: NonNegative = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add kl_loss_coef × KL(policy, reference) to the loss."""
    kl_loss_coef: NonNegative = 0.001
    """Weight of the KL in the loss."""
    kl_loss_type: KlEstimator = "k3"
    """Estimator of the KL in the loss."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one: the mean over all policy tokens of the mini-batch, a mean over episodes of
    their mean or sum, or the sum divided by loss_agg_constant for each episode."""
    loss_agg_constant: Count | None = None
    """Tokens that the sum of an episode is divided by with loss_agg_mode: constant; null:
    data.max_response_length."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    mask_observations: bool = True
    """Train only on what the policy wrote. false also trains on what it read; only for the ablation."""
    optim: Optim = Optim()


class Critic(Section):
    """The update of the value function, for algorithms that have one."""

    ppo_mini_batch_size: Count = 64
    """Questions (× rollout.n episodes) of one optimiser step; divides data.train_batch_size."""
    ppo_epochs: Count = 1
    """Passes over the episodes of a step."""
    ppo_max_token_len: Count = 16384
    """Tokens of a forward and backward pass, padding included."""
    cliprange_value: Positive = 0.5
    """How far a value may move from the old one before its loss is clipped."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one, as for the actor."""
    optim: CriticOptim = CriticOptim()


class Ref(Section):
    """The reference policy of the KL terms."""

    path: File | None = None
    """Directory of the reference; null: the policy as RL starts."""


class Sft(Section):
    """Supervised fine-tuning before RL, on episodes that a script plays."""

    train_files: File | None = None
    """Demonstrations, JSON lines `{"question", "golden_answers", "turns": ["…", …]}`; null: those of the
    tiny world."""
    steps: Natural = 80
    """Optimiser steps; 0: none."""
    batch_size: Count = 32
    """Episodes of a step."""
    observation_weight: Share = 0.0
    """Weight of retrieved tokens in the loss; the policy's own have 1."""
    optim: SftOptim = SftOptim()


class Trainer(Section):
    """The length of a run and what it leaves behind."""

    total_training_steps: Natural = 30
    """Steps of RL."""
    save_freq: Natural = 10
    """Steps between checkpoints; 0: only the last step."""
    test_freq: Natural = 10
    """Steps between validations; 0: none."""
    val_before_train: bool = True
    """Validate before the first step."""
    critic_warmup: Natural = 0
    """First steps in which only the critic learns; the actor's learning rate counts from the step after."""
    seed: Seed = 0
    """Seed of everything random: order of questions, sampling, new weights."""
    max_ckpt_to_keep: Count | None = None
    """Checkpoints that are kept, the newest; null: all."""
    logger: Annotated[
        tuple[Literal["console", "tensorboard", "wandb"], ...], BeforeValidator(one_or_many)
    ] = ("console",)
    """Where metrics go besides the run's own log: console, tensorboard, wandb."""
    project_name: str = "srl"
    """Project in external loggers."""
    experiment_name: str | None = None
    """Name in external loggers; null: the run's."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of torch; null: what a short measurement finds fastest."""
    sample_freq: Natural = 10
    """Steps between showing a few episodes; 0: never."""
    sample_count: Natural = 2
    """Episodes shown."""


class Eval(Section):
    """Validation inside training, and evaluation after it."""

    val_questions: Count | None = 512
    """Questions of a validation, the same each time; null: all."""
    test_questions: Count | None = None
    """Questions of a test; null: all."""
    batch_size: Count | None = None
    """Questions in flight; null: rollout.max_num_seqs."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    max_failed: Share = 0.01
    """Share of questions that may be lost to search faults before the exit code says so."""
