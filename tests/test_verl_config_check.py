"""The composed configuration, as verl reads it: what verl's own code makes of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.verl_configs import GPU, job, made
from torch.testing import assert_close

from srl.config import Config
from srl.errors import UserError
from srl.train.verl.config_check import compose, validated
from srl.train.verl.job import Job
from srl.train.verl.translate import ours_of, settings
from srl.update.losses import policy_loss, value_loss

pytestmark = [pytest.mark.slow, pytest.mark.must_run]

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module", autouse=True)
def verl() -> Any:
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def select(composed: Any, key: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.select(composed, key)


def section(composed: Any, key: str) -> Any:
    """The object that verl makes of a section."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(select(composed, key))


def with_verl(config: Config, **given: Any) -> Config:
    """`config` with keys of verl's own, `__` for a dot."""
    tree: dict[str, Any] = {}
    for key, value in given.items():
        *above, last = key.split("__")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = value
    return config.model_copy(update={"verl": tree})


@pytest.mark.parametrize("on", [job(), GPU], ids=["cpu", "gpus"])
@pytest.mark.parametrize(
    "given",
    [
        ("algorithm.name=ppo", "algorithm.use_kl_in_reward=true"),
        ("algorithm.name=grpo", "rollout.n=4", "actor.use_kl_loss=true"),
        ("algorithm.name=reinforce_plus_plus", "actor.optim.lr_scheduler_type=linear"),
        ("algorithm.name=rloo", "rollout.n=2", "model.lora_rank=4", "cluster.strategy=fsdp"),
    ],
)
def test_verl_accepts_what_we_translate(given, on):
    validated(made(*given), on)


def test_verl_accepts_what_we_translate_for_megatron():
    composed = validated(made("cluster.strategy=megatron", "model.lora_rank=4"), GPU)
    assert select(composed, f"{ACTOR}.strategy") == select(composed, "critic.strategy") == "megatron"


def test_every_value_stands_in_the_composed_configuration():
    for on in (job(), GPU):
        composed, known = compose(made(), on), settings(made(), on)
        for key, setting in known.items():
            assert select(composed, key) == setting, key


def test_objects_that_verl_makes_hold_our_numbers():
    composed = compose(
        made(
            "actor.grad_clip=0.7", "actor.optim.betas=[0.8, 0.95]", "critic.ppo_max_token_len=9000",
            "cluster.strategy=fsdp2", "critic.optim.lr_warmup_steps=4",
        ),
        GPU,
    )  # fmt: skip
    actor, critic = section(composed, ACTOR), section(composed, "critic.optim")
    assert (actor.optim.clip_grad, tuple(actor.optim.betas)) == (0.7, (0.8, 0.95))
    assert actor.engine.strategy == "fsdp2"
    assert critic.lr_warmup_steps == 4
    assert select(composed, "critic.ppo_infer_max_token_len_per_gpu") == 9000


def test_optimiser_that_verl_builds_is_ours():
    from verl.workers.config.optimizer import build_optimizer

    given = ("actor.optim.lr=0.002", "actor.optim.betas=[0.8, 0.95]")
    optim = section(compose(made(*given, "actor.optim.weight_decay=0.3"), GPU), f"{ACTOR}.optim")
    built = build_optimizer([torch.nn.Parameter(torch.zeros(2))], optim)
    assert isinstance(built, torch.optim.AdamW)
    found = {name: built.defaults[name] for name in ("lr", "eps", "weight_decay")}
    assert found == {"lr": 0.002, "eps": 1e-8, "weight_decay": 0.3}
    assert tuple(built.defaults["betas"]) == (0.8, 0.95)


def rows(seed: int) -> tuple[torch.Tensor, ...]:
    """Log-probs far from the old ones, advantages, and a mask with a policy token in each row."""
    draw = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = (torch.randn(6, 9, generator=draw, dtype=torch.float64) for _ in range(3))
    mask = (torch.rand(6, 9, generator=draw) > 0.4).double()
    mask[:, 0] = 1
    return 3 * logprobs, old, advantages, mask


@pytest.mark.parametrize("bound", ["null", "1.5"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_policy_loss_is_the_same_number_under_both(verl, mode, bound):
    given = (f"actor.clip_ratio_c={bound}", f"actor.loss_agg_mode={mode}", "data.max_response_length=9")
    config = made(*given, "actor.clip_ratio_low=0.1", "actor.clip_ratio_high=0.3")
    theirs = section(compose(config, GPU), ACTOR)
    logprobs, old, advantages, mask = rows(0)
    theirs.global_batch_info.update(
        dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=len(mask),
        loss_scale_factor=theirs.loss_scale_factor,
    )  # fmt: skip
    loss, _ = verl.compute_policy_loss_vanilla(
        old, logprobs, advantages, mask, loss_agg_mode=theirs.loss_agg_mode, config=theirs
    )
    actor = config.actor
    ours, _ = policy_loss(
        logprobs, old, advantages, mask, clip_low=0.1, clip_high=0.3, clip_c=actor.clip_ratio_c,
        normalise=actor.loss_agg_mode,
    )  # fmt: skip
    assert_close(loss, ours)


def test_value_loss_is_the_same_number_under_both(verl):
    config = made("critic.cliprange_value=0.2", "critic.loss_agg_mode=seq-mean-token-mean")
    composed = compose(config, GPU)
    values, old, returns, mask = rows(1)
    loss, _ = verl.compute_value_loss(
        values, returns, old, mask, select(composed, "critic.cliprange_value"),
        loss_agg_mode=select(composed, "critic.loss_agg_mode"),
    )  # fmt: skip
    ours, _ = value_loss(values, old, returns, mask, clip=0.2, normalise="seq-mean-token-mean")
    assert_close(loss, ours)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_is_the_same_number_under_both(verl, kind):
    from srl.update.kl import kl_penalty

    name = select(compose(made(f"actor.kl_loss_type={kind}"), GPU), f"{ACTOR}.kl_loss_type")
    logprobs, reference, _, _ = rows(2)
    assert_close(verl.kl_penalty(logprobs, reference, name), kl_penalty(logprobs, reference, kind))


def test_verl_ends_a_run_at_an_episode_above_its_limit():
    """Why a limit below the longest episode is raised: the symptom in verl's own code."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    given = ("actor.ppo_max_token_len=10", "data.max_prompt_length=30", "data.max_response_length=30")
    limit = select(compose(made(*given), job()), f"{ACTOR}.ppo_max_token_len_per_gpu")
    ids = torch.nested.as_nested_tensor([torch.ones(60), torch.ones(20)], layout=torch.jagged)
    batch = TensorDict({"input_ids": ids}, batch_size=2)
    with pytest.raises(AssertionError, match="max_token_len"):
        rearrange_micro_batches(batch, max_token_len=10)
    parts, _ = rearrange_micro_batches(batch, max_token_len=limit)
    assert len(parts) == 2


@pytest.mark.parametrize(
    ("given", "on", "key"),
    [
        (("data.train_batch_size=6", "actor.ppo_mini_batch_size=3"), job(), "actor.ppo_mini_batch_size"),
        (("data.train_batch_size=8", "critic.ppo_mini_batch_size=1"), job(), "critic.ppo_mini_batch_size"),
        (("cluster.tensor_model_parallel_size=3",), GPU, "cluster.tensor_model_parallel_size"),
        (("cluster.nnodes=2",), GPU, "cluster.nnodes"),
        (("data.max_response_length=4000",), GPU, "data.max_response_length"),
        (
            ("rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is='off'"),
            GPU,
            "rollout.top_p",
        ),
    ],
)
def test_what_a_worker_would_find_out_late_is_refused_first(given, on, key):
    assert key in refusal(made(*given), on)


def refusal(config: Config, on: Job | None = None) -> str:
    with pytest.raises(UserError) as said:
        validated(config, on or job())
    assert "\n" not in str(said.value)
    return str(said.value)


def test_top_p_is_corrected_by_weights_and_by_an_engine_of_whole_distributions():
    compose(made("rollout.top_p=0.9"), GPU)
    compose(made("rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is='off'"), job())


CORRECTION = "algorithm__rollout_correction"
LOSS = "actor_rollout_ref__actor__policy_loss"


@pytest.mark.parametrize(
    "given",
    [
        {"actor_rollout_ref__rollout__enforce_eagr": True},
        {"trainer": 3},
        {f"{CORRECTION}__rollout_is": "token"},
        {f"+{CORRECTION}__rollout_rs": "token_k1"},
        {CORRECTION: None},
        {f"{CORRECTION}__bypass_mode": True},
        {f"{LOSS}__loss_mode": "bypass_mode"},
        {f"+{LOSS}__rollout_correction__rollout_is": "token"},
        {"actor_rollout_ref__rollout__logprobs_mode": "raw_logprobs"},
        {"+critic__enable": True},
        {"data__custom_cls__path": "other"},
        {"trainer__v1__trainer_mode": "other"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_key_of_verls_that_it_lacks_or_that_our_code_replaces_is_refused(given):
    with pytest.raises(UserError) as said:
        compose(with_verl(made(), **given), job())
    assert str(said.value.key).removeprefix("verl.") == next(iter(given)).replace("__", ".").lstrip("+")


@pytest.mark.parametrize(
    "key", ["critic.cliprange_value", "algorithm.gamma", f"{ACTOR}.optim.lr", "data.seed"]
)
def test_key_of_verls_that_is_one_of_ours_is_refused_with_ours(key):
    """Else verl's part of the run would have one value, and ours another."""
    with pytest.raises(UserError, match=rf"set {ours_of()[key]} instead"):
        compose(with_verl(made(), **{key.replace(".", "__"): 12345}), job())


@pytest.mark.parametrize(
    "key",
    [
        "+actor_rollout_ref__rollout__engine_kwargs__vllm__max_logprobs",
        "actor_rollout_ref__rollout__max_num_batched_tokens",
        "+ray_kwargs__ray_init__object_store_memory",
    ],
)
def test_key_of_verls_may_be_set_or_added_and_wins(key):
    composed = compose(with_verl(made(), **{key: 2}), job())
    assert select(composed, key.removeprefix("+").replace("__", ".")) == 2
