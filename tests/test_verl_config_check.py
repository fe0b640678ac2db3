"""The composed configuration, as verl reads it: what verl's own code makes of it, and what is refused."""

import json
from typing import Any

import pytest
import torch
from tests.verl_configs import BASE, GPU, job, made
from torch.testing import assert_close

from srl.config import Config, load_config
from srl.errors import UserError
from srl.train.rl import loss_settings
from srl.train.verl.config_check import compose, validated
from srl.update.losses import policy_loss

pytestmark = [pytest.mark.slow, pytest.mark.must_run, pytest.mark.timeout(600)]

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


PRESETS = sorted(path.stem for path in BASE.parent.glob("*.yaml"))
NOT_ON_VERL = ("no-mask",)
SECTIONS = ("model", "actor", "ref", "rollout", "rollout.checkpoint_engine")
"""What the worker makes objects of, in `actor_rollout_ref`."""


@pytest.mark.parametrize(
    ("preset", "rank", "engine", "more"),
    [
        *((name, 0, "vllm", ()) for name in PRESETS if name not in NOT_ON_VERL),
        ("tiny", 16, "vllm", ()),
        ("tiny", 16, "sglang", ()),
        ("tiny", 0, "sglang", ("algorithm.name=reinforce_plus_plus", "actor.optim.lr_scheduler_type=linear")),
        ("tiny", 0, "vllm", ("algorithm.name=rloo", "verl.actor_rollout_ref.actor.strategy=fsdp")),
    ],
)
def test_verl_makes_its_objects_of_every_preset_as_on_gpus(preset, rank, engine, more):
    from omegaconf import OmegaConf, open_dict
    from verl.utils.config import omega_conf_to_dataclass

    sets = [f"cluster.rollout={engine}", f"model.lora_rank={rank}", f"model.path={BASE}",
            "cluster.address=auto", *more]  # fmt: skip
    composed = compose(load_config(preset, sets=sets).config, GPU)
    networks = [
        composed.actor_rollout_ref.model,
        *([composed.critic.model] if composed.critic.enable else []),
    ]
    for network in networks:  # the tokenizer is the run's, which there is none of
        network.tokenizer_path = str(BASE)
    ref = composed.actor_rollout_ref.ref
    with open_dict(ref):  # as the worker does
        ref.ppo_mini_batch_size = composed.actor_rollout_ref.actor.ppo_mini_batch_size
        ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz")
        ref.ppo_max_token_len_per_gpu = ref.pop("log_prob_max_token_len_per_gpu")
        ref.ppo_micro_batch_size = ref.pop("log_prob_micro_batch_size")
        ref.ppo_micro_batch_size_per_gpu = ref.pop("log_prob_micro_batch_size_per_gpu")
    made: dict[str, Any] = {
        name: omega_conf_to_dataclass(OmegaConf.select(composed.actor_rollout_ref, name)) for name in SECTIONS
    }
    if composed.critic.enable:
        omega_conf_to_dataclass(composed.critic)
    rollout = made["rollout"]
    assert (rollout.name, rollout.free_cache_engine, rollout.enable_sleep_mode) == (engine, True, True)
    assert rollout.load_format == ("safetensors" if rank else "dummy")
    assert made["model"].lora_rank == rank
    assert not made["model"].lora.get("merge")
    assert made["actor"].engine.param_offload == made["ref"].engine.param_offload


def test_bucket_of_shared_memory_holds_the_largest_weight(tmp_path):
    """verl ends a run without a GPU at a weight that is larger."""
    sizes = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    composed = compose(made("cluster.rollout=vllm", f"model.path={tmp_path}"), job())
    bucket = composed.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
    assert 151_936 * 896 * 4 <= bucket * 2**20 < 1.01 * 151_936 * 896 * 4


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


@pytest.mark.parametrize(("mode", "bound"), [
    ("vanilla", "null"), ("vanilla", "1.5"), ("gspo", "3.0"), ("cispo", "3.0"),
])  # fmt: skip
@pytest.mark.parametrize("by", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"])
def test_policy_loss_is_the_same_number_under_both(verl, mode, bound, by):
    given = (f"actor.clip_ratio_c={bound}", f"actor.loss_agg_mode={by}", "data.max_response_length=9")
    config = made(
        *given, "actor.clip_ratio_low=0.1", "actor.clip_ratio_high=0.3",
        f"actor.policy_loss.loss_mode={mode}",
    )  # fmt: skip
    theirs = section(compose(config, GPU), ACTOR)
    logprobs, old, advantages, mask = rows(0)
    theirs.global_batch_info.update(
        dp_size=2, batch_num_tokens=2 * mask.sum(), global_batch_size=2 * len(mask),
        loss_scale_factor=theirs.loss_scale_factor,
    )  # fmt: skip
    ours, _ = policy_loss(logprobs, old, advantages, mask, **loss_settings(config).of_policy)
    batch = {"loss_agg_mode": theirs.loss_agg_mode, "config": theirs}
    value, metrics = verl.get_policy_loss_fn(mode)(old, logprobs, advantages, mask, **batch)
    assert_close(value, ours)
    assert metrics["actor/pg_clipfrac"] > 0


@pytest.mark.parametrize(
    ("given", "on", "key"),
    [
        (("data.train_batch_size=6", "actor.ppo_mini_batch_size=3"), job(), "actor.ppo_mini_batch_size"),
        (("data.train_batch_size=8", "critic.ppo_mini_batch_size=1"), job(), "critic.ppo_mini_batch_size"),
        (("cluster.tensor_model_parallel_size=3",), GPU, "cluster.tensor_model_parallel_size"),
        (("cluster.nnodes=2",), GPU, "cluster.nnodes"),
        (("verl.actor_rollout_ref.actor.strategy=megatron",), GPU, "actor.strategy"),
        (("data.max_response_length=4000",), GPU, "data.max_response_length"),
        (("rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is='off'"), GPU, "rollout.top_p"),
    ],
)
def test_what_a_worker_would_find_out_late_is_refused_first(given, on, key):
    with pytest.raises(UserError, match=key):
        validated(made(*given), on)


def test_what_verls_own_validation_refuses_is_one_line():
    with pytest.raises(UserError):
        validated(made("verl.actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"), GPU)


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
        {f"+{LOSS}__rollout_correction__rollout_is": "token"},
        {"actor_rollout_ref__rollout__logprobs_mode": "raw_logprobs"},
        {"+critic__enable": True},
        {"trainer__v1__trainer_mode": "other"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_key_of_verls_that_it_lacks_or_that_our_code_replaces_is_refused(given):
    with pytest.raises(UserError) as said:
        compose(with_verl(made(), **given), job())
    assert str(said.value.key).removeprefix("verl.") == next(iter(given)).replace("__", ".").lstrip("+")


@pytest.mark.parametrize(("key", "ours"), [
    ("critic.cliprange_value", "critic.cliprange_value"), (f"{ACTOR}.optim.lr", "actor.optim.lr"),
    ("data.seed", "trainer.seed"),
])  # fmt: skip
def test_key_of_verls_that_is_one_of_ours_is_refused_with_ours(key, ours):
    """Else verl's part of the run would have one value, and ours another."""
    with pytest.raises(UserError, match=ours):
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
