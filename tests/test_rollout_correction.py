"""Weights and metrics between sampler and trainer: by hand, as properties, and against verl's."""

import math
from dataclasses import replace

import pytest
import torch
from tests.rows import experience, gradients, policy, trajectory
from tests.tiny_models import byte_level_tokenizer, tiny_model
from torch import Tensor
from torch.testing import assert_close

from srl.config import load_config
from srl.models.weights import add_lora
from srl.rollout.codec import Codec
from srl.rollout.torch_engine import TorchEngine
from srl.train.compute_advantages import needs_old_logprobs, rollout_correction
from srl.train.rl import samples_as_trained
from srl.update.actor import ActorLoss, accumulate_actor
from srl.update.logprobs import TokenStats, batched_stats
from srl.update.rollout_correction import NO_CORRECTION, RolloutCorrection

NAN = float("nan")
KEY = "algorithm.rollout_correction"
LEVELS = ("token", "sequence")


def random(seed: int, rows: int = 6, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of trainer and sampler and a mask with at least one token in each row."""
    generator = torch.Generator().manual_seed(seed)
    trainer = -2 * torch.rand(rows, tokens, generator=generator)
    sampler = trainer + 0.4 * torch.randn(rows, tokens, generator=generator)
    mask = (torch.rand(rows, tokens, generator=generator) > 0.3).float()
    mask[:, 0] = 1
    return trainer, sampler, mask


def correction(*sets: str, same_weights: bool = False) -> RolloutCorrection:
    return rollout_correction(settings_of(*sets), same_weights)


def settings_of(*sets: str, algo: str = "grpo"):
    return load_config(None, None, algo, {}, [f"{KEY}.{each}" if "." not in each.split("=")[0] else each
                                             for each in sets]).config  # fmt: skip


def test_weights_by_hand() -> None:
    """Truncated ratios, 1 off the mask; a sequence's is the product; with two bounds those outside are 0."""
    trainer, sampler = torch.tensor([[-1.0, -1.0, NAN]]), torch.tensor([[-3.0, -0.5, -1.0]])
    mask = torch.tensor([[1, 1, 0]])
    weights = RolloutCorrection("token").weights(trainer.requires_grad_(), sampler, mask)
    assert_close(weights, torch.tensor([[2.0, math.exp(-0.5), 1.0]]))
    assert not weights.requires_grad
    product = RolloutCorrection("sequence", upper=9.0).weights(trainer, sampler, mask)
    assert_close(product, torch.tensor([[math.exp(1.5), math.exp(1.5), 1.0]]))
    bounded = RolloutCorrection("token", upper=2.0, lower=0.7).weights(trainer, sampler, mask)
    assert_close(bounded, torch.tensor([[0.0, 0.0, 1.0]]))


def test_metrics_by_hand() -> None:
    trainer, sampler = torch.log(torch.tensor([[0.5, 0.2, NAN]])), torch.log(torch.tensor([[0.25, 0.4, 1.0]]))
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    found = RolloutCorrection("token", upper=1.5).metrics(trainer, sampler, mask)
    expected = {
        "kl": 0.0, "k3_kl": (2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2,
        "training_ppl": 10**0.5, "rollout_ppl": 10**0.5, "log_ppl_diff": 0.0, "log_ppl_abs_diff": 0.0,
        "rollout_is_mean": 1.0, "rollout_is_max": 1.5, "rollout_is_min": 0.5,
        "rollout_is_eff_sample_size": 2.0**2 / (2 * (1.5**2 + 0.5**2)),
        "rollout_is_ratio_fraction_high": 0.5, "rollout_is_ratio_fraction_low": 0.5,
    }  # fmt: skip
    expected = {f"rollout_corr/{name}": value for name, value in expected.items()}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threshold", [1.2, "0.4_2.5"])
def test_weights_and_metrics_are_verls(verl, seed, level, threshold) -> None:
    trainer, sampler, mask = random(seed)
    chosen = correction(f"rollout_is={level}", f"rollout_is_threshold={threshold}")
    theirs, _, metrics = verl.compute_rollout_correction_and_rejection_mask(
        trainer, sampler, mask, level, threshold
    )
    weights = chosen.weights(trainer, sampler, mask)
    assert_close(weights * mask, theirs.batch["rollout_is_weights"] * mask)
    assert float((weights - 1).abs().max()) > 0.1
    found = chosen.metrics(trainer, sampler, mask)
    assert found == pytest.approx({name: metrics[name] for name in found}, rel=1e-4, abs=1e-6)
    assert len(found) == 12


def test_auto_weights_tokens_unless_the_engine_samples_with_the_trainers_weights() -> None:
    assert correction(same_weights=True) == NO_CORRECTION
    assert correction(same_weights=False) == RolloutCorrection("token", upper=2.0)
    assert correction("rollout_is=off") == NO_CORRECTION
    assert correction("rollout_is=sequence", same_weights=True).level == "sequence"


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, True), (torch.bfloat16, False)])
def test_an_adapter_merged_in_less_than_float32_is_another_sampler(dtype, exact) -> None:
    codec = Codec(byte_level_tokenizer())
    small = {"max_num_seqs": 2, "max_model_len": 64}
    plain = tiny_model(dtype=dtype)
    assert samples_as_trained(TorchEngine(plain, codec, **small), plain)
    adapted = tiny_model(dtype=dtype)
    add_lora(adapted, 2)
    assert samples_as_trained(TorchEngine(adapted, codec, **small), adapted) is exact


def test_old_log_probs_are_computed_beforehand_only_where_something_needs_them() -> None:
    one_step = ("data.train_batch_size=16", "actor.ppo_mini_batch_size=16")

    def needs(*sets: str, algo: str = "grpo") -> bool:
        return needs_old_logprobs(settings_of(*sets, algo=algo))

    assert not needs(*one_step)
    assert not needs(*one_step, "rollout_is=sequence")
    assert needs("data.train_batch_size=16", "actor.ppo_mini_batch_size=8")
    assert needs(*one_step, "actor.ppo_epochs=2")
    assert needs(*one_step, algo="ppo"), "the KL is in its reward"


SPECS = ("ppaaooaa", "paafa", "paaa", "ppaoaaa")


@pytest.mark.parametrize("observed", [False, True])
def test_the_updates_own_log_probs_serve_as_old_ones_bit_for_bit(observed) -> None:
    """Gradients, metrics, weights and what `seen` records: those of a pass before the update."""
    chosen = RolloutCorrection("token", upper=1.5)
    loss = ActorLoss(temperature=0.7, entropy_coeff=0.1, kl_loss_coef=0.2, correction=chosen)
    trajectories = [trajectory(spec, seed=n, question=f"q{n // 2}") for n, spec in enumerate(SPECS)]
    model, part = policy(), experience(trajectories, mask_observations=not observed)
    stats = batched_stats(model, part.batch, part.loss_mask, max_tokens=16, temperature=0.7)
    weights = chosen.weights(stats.logprobs, part.batch.sampler_logprobs, part.mask)
    before = replace(part, old_logprobs=stats.logprobs, weights=weights)
    expected = accumulate_actor(model, before, loss=loss, max_tokens=16)
    wanted = gradients(model)
    seen = TokenStats(torch.zeros_like(part.mask), torch.zeros_like(part.mask))
    found = accumulate_actor(model, replace(part, old_logprobs=None), loss=loss, max_tokens=16, stats=seen)
    assert found == expected
    assert found["actor/ratio_mean"] == pytest.approx(1.0)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, wanted[name]), name
    assert torch.equal(seen.logprobs, stats.logprobs)
    assert torch.equal(seen.entropy, stats.entropy)
    assert float((weights - 1).abs().max()) > 0.1
