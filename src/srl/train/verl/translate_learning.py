"""Our sections algorithm, actor, critic and ref in verl's keys."""

from __future__ import annotations

from typing import Any

from srl.config import Config
from srl.config.checks import algorithm_plugin
from srl.config.sections import Actor, Critic
from srl.train.learning_rate import Network, warmup_steps
from srl.train.verl.job import Job
from srl.train.verl.setting import ACTOR, Rows, at_least_one_episode, is_megatron

NO_DUAL_CLIP = 1e9
"""A bound that no ratio reaches, for verl asks for one: it clamps log-ratios to 20, and e^20 is 4.9e8."""
KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
LOSS_AGG = {"constant": "seq-mean-token-sum-norm"}
"""Our modes that verl calls otherwise."""


def learning(config: Config, job: Job) -> Rows:
    yield from _algorithm(config)
    yield from _actor(config)
    if algorithm_plugin(config.algorithm.name).needs_critic:
        yield from _critic(config)
        yield from _optimiser(config, "critic", config.critic)
    yield from _optimiser(config, "actor", config.actor)


def _algorithm(config: Config) -> Rows:
    algorithm = config.algorithm
    yield "algorithm.adv_estimator", f"srl_{algorithm.name}", "algorithm.name"
    yield "critic.enable", algorithm_plugin(algorithm.name).needs_critic, "algorithm.name"
    yield "algorithm.gamma", algorithm.gamma, "algorithm.gamma"
    yield "algorithm.lam", algorithm.lam, "algorithm.lam"
    yield "algorithm.use_kl_in_reward", algorithm.use_kl_in_reward, "algorithm.use_kl_in_reward"
    yield "algorithm.kl_penalty", KL_NAMES[algorithm.kl_penalty], "algorithm.kl_penalty"
    for name, value in algorithm.kl_ctrl.model_dump().items():
        yield f"algorithm.kl_ctrl.{name}", value, f"algorithm.kl_ctrl.{name}"


def _actor(config: Config) -> Rows:
    actor = config.actor
    low, high = ("clip_ratio" if value is None else name for name, value in _clips(actor))
    yield from _passes(config, ACTOR, "actor", actor)
    yield f"{ACTOR}.ppo_max_token_len_per_gpu", *_tokens(config, "actor", actor)
    yield f"{ACTOR}.clip_ratio", actor.clip_ratio, "actor.clip_ratio"
    yield f"{ACTOR}.clip_ratio_low", getattr(actor, low), f"actor.{low}"
    yield f"{ACTOR}.clip_ratio_high", getattr(actor, high), f"actor.{high}"
    yield f"{ACTOR}.clip_ratio_c", actor.clip_ratio_c or NO_DUAL_CLIP, "actor.clip_ratio_c"
    yield f"{ACTOR}.entropy_coeff", actor.entropy_coeff, "actor.entropy_coeff"
    yield f"{ACTOR}.use_kl_loss", actor.use_kl_loss, "actor.use_kl_loss"
    yield f"{ACTOR}.kl_loss_coef", actor.kl_loss_coef, "actor.kl_loss_coef"
    yield f"{ACTOR}.kl_loss_type", KL_NAMES[actor.kl_loss_type], "actor.kl_loss_type"


def _clips(actor: Actor) -> tuple[tuple[str, float | None], ...]:
    return ("clip_ratio_low", actor.clip_ratio_low), ("clip_ratio_high", actor.clip_ratio_high)


def _critic(config: Config) -> Rows:
    """verl's critic takes its limit of tokens, in training too, from the key for inference."""
    critic = config.critic
    yield from _passes(config, "critic", "critic", critic)
    for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"):
        yield f"critic.{name}", *_tokens(config, "critic", critic)
    yield "critic.ppo_infer_max_token_len_per_gpu", *_tokens(config, "critic", critic)
    yield "critic.cliprange_value", critic.cliprange_value, "critic.cliprange_value"


def _passes(config: Config, verl: str, ours: str, section: Actor | Critic) -> Rows:
    """Mini-batches (questions in both configurations), epochs, and how token losses become one."""
    mode = section.loss_agg_mode
    horizon = config.actor.loss_agg_constant or config.data.max_response_length
    source = "actor.loss_agg_constant" if config.actor.loss_agg_constant else "data.max_response_length"
    mini = min(section.ppo_mini_batch_size, config.data.train_batch_size)
    yield f"{verl}.ppo_mini_batch_size", mini, f"{ours}.ppo_mini_batch_size"
    yield f"{verl}.ppo_epochs", section.ppo_epochs, f"{ours}.ppo_epochs"
    yield f"{verl}.use_dynamic_bsz", True, f"{ours}.ppo_max_token_len"
    yield f"{verl}.shuffle", False, ""
    yield f"{verl}.data_loader_seed", config.trainer.seed, "trainer.seed"
    yield f"{verl}.loss_agg_mode", LOSS_AGG.get(mode, mode), f"{ours}.loss_agg_mode"
    yield f"{verl}.loss_scale_factor", horizon if mode == "constant" else None, source


def _tokens(config: Config, ours: str, section: Actor | Critic) -> tuple[int, str]:
    return at_least_one_episode(section.ppo_max_token_len, config), f"{ours}.ppo_max_token_len"


def _optimiser(config: Config, who: Network, section: Actor | Critic) -> Rows:
    """AdamW. verl clips by `optim.clip_grad` and reads `grad_clip` of the actor nowhere."""
    optim, verl = section.optim, f"{ACTOR if who == 'actor' else who}.optim"
    yield f"{verl}.lr", optim.lr, f"{who}.optim.lr"
    yield f"{verl}.betas", list(optim.betas), f"{who}.optim.betas"
    yield f"{verl}.weight_decay", optim.weight_decay, f"{who}.optim.weight_decay"
    yield f"{verl}.clip_grad", section.grad_clip, f"{who}.grad_clip"
    asked = "lr_warmup_steps" if optim.lr_warmup_steps else "lr_warmup_steps_ratio"
    yield f"{verl}.lr_warmup_steps", warmup_steps(config, who), f"{who}.optim.{asked}"
    yield f"{verl}.lr_warmup_steps_ratio", 0.0, f"{who}.optim.lr_warmup_steps_ratio"
    yield from _schedule(config, verl, who, optim)


def _schedule(config: Config, verl: str, who: str, optim: Any) -> Rows:
    """The schedule's kind, and ε. Under Megatron verl passes the moments' decay on nowhere but here.

    Under FSDP the schedule is our own, put in the place of verl's, which has no name for `linear`.
    """
    if is_megatron(config):
        first, second = optim.betas
        adam = {"adam_beta1": first, "adam_beta2": second, "adam_eps": optim.eps}
        yield f"{verl}.lr_decay_style", optim.lr_scheduler_type, f"{who}.optim.lr_scheduler_type"
        yield f"{verl}.override_optimizer_config", adam, f"{who}.optim.eps"
        return
    kind = verl_scheduler_type(optim.lr_scheduler_type)
    yield f"{verl}.lr_scheduler_type", kind, f"{who}.optim.lr_scheduler_type"
    yield f"{verl}.override_optimizer_config", {"eps": optim.eps}, f"{who}.optim.eps"


def verl_scheduler_type(kind: str) -> str:
    """The schedule's name in verl's configuration: verl refuses `linear`, and takes our schedule anyway."""
    return "constant" if kind == "linear" else kind
