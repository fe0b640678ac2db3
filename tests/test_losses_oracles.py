"""Losses and their gradients against verl's and trl's own code, at default tolerances."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from tests.test_advantage_oracles import OneProcess
from torch import Tensor
from torch.testing import assert_close

from srl.update import logprobs
from srl.update.kl import AdaptiveKL, kl_penalty
from srl.update.losses import aggregate, count_for, policy_loss, value_loss
from srl.update.rollout_correction import RolloutCorrection

pytestmark = [pytest.mark.slow, pytest.mark.must_run]

TOKEN = RolloutCorrection("token")
seeds = pytest.mark.parametrize("seed", range(5))
ROWS, TOKENS, HORIZON = 8, 13, 20
VERL_MODES = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "constant": "seq-mean-token-sum-norm",
}
TRL_MODES = {
    "token-mean": ("bnpo", "dapo"),
    "seq-mean-token-mean": ("grpo",),
    "seq-mean-token-sum": ("luspo",),
    "constant": ("dr_grpo",),
}


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def random(seed: int) -> Tensor:
    return torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(seed))


def make_mask(seed: int) -> Tensor:
    """Gaps inside, a masked head and tail, at least one policy token in each row."""
    mask = (random(seed) > -0.4).float()
    mask[:, 0] = mask[:, -2:] = 0
    mask[:, 5] = 1
    return mask


def make_batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs that learn, old ones at a distance that clips some tokens, advantages, mask."""
    old = random(seed) - 2
    return (old + 0.6 * random(seed + 1)).requires_grad_(), old, random(seed + 2), make_mask(seed + 3)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


def verl_config(**settings: object) -> SimpleNamespace:
    config = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.8}
    config |= {"global_batch_info": {"loss_scale_factor": HORIZON}, **settings}
    return SimpleNamespace(**config, get=config.get)


@seeds
@pytest.mark.parametrize("normalise", VERL_MODES)
def test_aggregates_are_verls(verl, seed, normalise):
    per_token, mask = random(seed), make_mask(seed + 1)
    mask[3] = 0
    theirs = verl.agg_loss(per_token, mask, VERL_MODES[normalise], loss_scale_factor=HORIZON)
    count = count_for(mask, normalise, HORIZON)
    assert_close(aggregate(per_token, mask, normalise=normalise, denominator=count), theirs)


@seeds
@pytest.mark.parametrize("normalise", VERL_MODES)
def test_policy_loss_is_verls(verl, seed, normalise):
    logprobs, old, advantages, mask = make_batch(seed)
    weights = TOKEN.weights(old, random(seed + 9) - 2, mask)
    ours, metrics = policy_loss(
        logprobs,
        old,
        advantages,
        mask,
        clip_high=0.28,
        clip_c=1.8,
        weights=weights,
        normalise=normalise,
        denominator=count_for(mask, normalise, HORIZON),
    )
    theirs, verl_metrics = verl.compute_policy_loss_vanilla(
        old, logprobs, advantages, mask, VERL_MODES[normalise], verl_config(), weights
    )
    assert_close(ours, theirs)
    assert_close(gradient(ours, logprobs), gradient(theirs, logprobs))
    assert min(verl_metrics["actor/pg_clipfrac"], verl_metrics["actor/pg_clipfrac_lower"]) > 0
    for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        assert float(metrics[name]) == pytest.approx(verl_metrics[f"actor/{name}"], rel=1e-5)


@seeds
@pytest.mark.parametrize("normalise", VERL_MODES)
@pytest.mark.parametrize("mode", ["gspo", "cispo"])
def test_gspo_and_cispo_are_verls(verl, seed, normalise, mode):
    from verl.workers.config import FSDPActorConfig

    logprobs, old, advantages, mask = make_batch(seed)
    mask[2] = 0
    weights = TOKEN.weights(old, random(seed + 9) - 2, mask)
    settings = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "ppo_micro_batch_size_per_gpu": 1}
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, **settings)
    config.global_batch_info["loss_scale_factor"] = HORIZON
    ours, metrics = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.1, clip_high=0.15, weights=weights, normalise=normalise,
        denominator=count_for(mask, normalise, HORIZON), loss_mode=mode,
    )  # fmt: skip
    theirs, verl_metrics = verl.get_policy_loss_fn(mode)(
        old, logprobs, advantages, mask, VERL_MODES[normalise], config, weights
    )
    assert_close(ours, theirs)
    assert_close(gradient(ours, logprobs), gradient(theirs, logprobs))
    assert verl_metrics["actor/pg_clipfrac"] > 0
    for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        assert float(metrics[name]) == pytest.approx(verl_metrics[f"actor/{name}"], rel=1e-5)


@seeds
@pytest.mark.parametrize("normalise", VERL_MODES)
def test_value_loss_is_verls(verl, seed, normalise):
    values, old, returns, mask = make_batch(seed)
    ours, metrics = value_loss(
        values,
        old,
        returns,
        mask,
        clip=0.3,
        normalise=normalise,
        denominator=count_for(mask, normalise, HORIZON),
    )
    theirs, clipfrac = verl.compute_value_loss(
        values, returns, old, mask, 0.3, VERL_MODES[normalise], loss_scale_factor=HORIZON
    )
    assert_close(ours, theirs)
    assert_close(gradient(ours, values), gradient(theirs, values))
    assert_close(metrics["vf_clipfrac"], clipfrac)


@seeds
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "kl", "mse", "low_var_kl"])
@pytest.mark.parametrize("distance", [0.1, 3.0, 30.0])
def test_kl_estimators_are_verls_clamps_and_gradients_too(verl, seed, kind, distance):
    logprobs, reference = (distance * random(seed)).requires_grad_(), distance * random(seed + 1)
    ours, theirs = kl_penalty(logprobs, reference, kind), verl.kl_penalty(logprobs, reference, kind)
    assert_close(ours, theirs)
    assert_close(gradient(ours.sum(), logprobs), gradient(theirs.sum(), logprobs))


def test_the_adaptive_coefficient_is_verls(verl):
    ours, theirs = AdaptiveKL(0.1, 0.05, 500), verl.AdaptiveKLController(0.1, 0.05, 500)
    for kl in (0.01, 0.2, 0.052, 0.05, 1.0, 0.0):
        ours.update(kl, 64)
        theirs.update(kl, 64)
        assert ours.coef == pytest.approx(theirs.value)


@seeds
def test_log_probs_and_entropy_are_verls_and_trls(verl, seed):
    trl = pytest.importorskip("trl.trainer.utils")
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(24, 50, generator=generator)
    targets = torch.randint(50, (24,), generator=generator)
    chosen, entropy = logprobs._FromLogits.apply(logits, targets, 1.0, True)
    assert_close(entropy, verl.verl_F.entropy_from_logits(logits))
    assert_close(entropy, trl.entropy_from_logits(logits))
    assert_close(chosen, verl.verl_F.logprobs_from_logits_naive(logits, targets))
    assert_close(chosen, trl.selective_log_softmax(logits, targets))


def trl_grpo_loss(loss_type: str, logprobs: Tensor, inputs: dict[str, Tensor], beta: float) -> Tensor:
    """`GRPOTrainer._compute_loss` itself, on a stand-in for the trainer and given log-probs."""
    trl = pytest.importorskip("trl.trainer.grpo_trainer")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=1.8, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=loss_type,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=0.28,
        max_completion_length=HORIZON,
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    return trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


@seeds
@pytest.mark.parametrize(
    ("normalise", "loss_type"), [(mode, name) for mode, names in TRL_MODES.items() for name in names]
)
def test_policy_loss_with_k3_is_trls(seed, normalise, loss_type):
    """Retrieved tokens as trl's tool mask, its two-sided clip `delta` as our dual clip."""
    logprobs, old, advantages, mask = make_batch(seed)
    reference, beta = old + 0.3 * random(seed + 8), 0.1
    weights = TOKEN.weights(old, random(seed + 9) - 2, mask)
    inputs = {
        "prompt_ids": torch.ones(ROWS, 1),
        "prompt_mask": torch.ones(ROWS, 1),
        "completion_ids": torch.ones(ROWS, TOKENS),
        "completion_mask": torch.ones(ROWS, TOKENS),
        "tool_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    options = {"normalise": normalise, "denominator": count_for(mask, normalise, HORIZON)}
    ours, _ = policy_loss(
        logprobs, old, advantages, mask, clip_high=0.28, clip_c=1.8, weights=weights, **options
    )
    ours = ours + beta * aggregate(kl_penalty(logprobs, reference, "k3"), mask, **options)
    theirs = trl_grpo_loss(loss_type, logprobs, inputs, beta)
    assert_close(ours, theirs)
    assert_close(gradient(ours, logprobs), gradient(theirs, logprobs))
