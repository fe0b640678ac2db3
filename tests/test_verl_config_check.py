"""The composed configuration, as verl reads it: what verl's own code makes of it, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.verl_configs import GPU, job, made
from torch.testing import assert_close

from srl.config import Config, load_config
from srl.errors import UserError
from srl.train.verl.config_check import compose, notes, validated
from srl.train.verl.job import Job
from srl.train.verl.overrides import READ_HERE
from srl.train.verl.translate import settings
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
            assert select(composed, key) == setting.value, key


def test_composing_does_not_import_verl():
    code = (
        "import sys, pathlib; from srl.config import Config; from srl.train.verl.job import Job; "
        "from srl.train.verl.config_check import compose; "
        "compose(Config(), Job(pathlib.Path('run'))); sys.exit('verl' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("preset", ["search-r1-v0.2", "search-r1-v0.3", "search-r1-llama", "search-r1-32b"])
def test_published_settings_run_on_eight_gpus(preset):
    config = load_config(preset, sets=["cluster.address=auto"]).config
    validated(config, GPU)


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


def test_log_probs_are_computed_in_passes_as_large_as_the_updates():
    composed = compose(made("actor.ppo_max_token_len=7000"), GPU)
    for who in ("rollout", "ref"):
        assert select(composed, f"actor_rollout_ref.{who}.log_prob_max_token_len_per_gpu") == 7000
        assert select(composed, f"actor_rollout_ref.{who}.log_prob_use_dynamic_bsz") is True


def test_optimiser_that_verl_builds_is_ours():
    from verl.workers.config.optimizer import build_optimizer

    given = ("actor.optim.lr=0.002", "actor.optim.betas=[0.8, 0.95]", "actor.optim.eps=0.0001")
    optim = section(compose(made(*given, "actor.optim.weight_decay=0.3"), GPU), f"{ACTOR}.optim")
    built = build_optimizer([torch.nn.Parameter(torch.zeros(2))], optim)
    assert isinstance(built, torch.optim.AdamW)
    found = {name: built.defaults[name] for name in ("lr", "eps", "weight_decay")}
    assert found == {"lr": 0.002, "eps": 0.0001, "weight_decay": 0.3}
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
    given = (f"actor.clip_ratio_c={bound}", f"actor.loss_agg_mode={mode}", "actor.loss_agg_constant=9")
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
    ("given", "on", "words"),
    [
        (
            ("data.train_batch_size=6", "actor.ppo_mini_batch_size=3"),
            job(),
            "actor.ppo_mini_batch_size = 3 questions × rollout.n = 1 is not divisible by 2 workers; "
            "2 questions work",
        ),
        (
            ("data.train_batch_size=3", "actor.ppo_mini_batch_size=3"),
            job(),
            "data.train_batch_size = 3 must be a multiple of 2",
        ),
        (
            ("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=1"),
            job(),
            "critic.ppo_mini_batch_size = 1",
        ),
        (("cluster.tensor_model_parallel_size=3",), GPU, "does not divide the 8 GPUs"),
        (("cluster.tensor_model_parallel_size=8",), GPU, "does not divide the model's 4 heads"),
        (("cluster.nnodes=2",), GPU, "cluster.nnodes = 2: several machines need an existing Ray cluster"),
        (("data.max_response_length=4000",), GPU, "4,256 tokens, and this model's context is 1,024"),
    ],
)
def test_what_a_worker_would_find_out_late_is_refused_first(given, on, words):
    with pytest.raises(UserError) as said:
        validated(made(*given), on)
    assert words in str(said.value)


def refusal(config: Config, on: Job | None = None) -> str:
    with pytest.raises(UserError) as said:
        validated(config, on or job())
    assert "\n" not in str(said.value)
    return str(said.value)


def test_refusal_of_verls_names_the_key_that_was_set():
    text = refusal(with_verl(made(), actor_rollout_ref__actor__loss_agg_mode="bogus"))
    assert text.startswith("verl.actor_rollout_ref.actor.loss_agg_mode: refused by verl")
    assert "bogus" in text


def test_refusal_of_verls_without_words_shows_what_it_asserts():
    text = refusal(with_verl(made(), actor_rollout_ref__actor__optim__lr_scheduler_type="linear"))
    assert "lr_scheduler_type: refused by verl: assert" in text


def test_refusal_of_verls_names_our_key_where_it_is_ours():
    """A value of ours that verl refuses: no key of ours can be it today, so one is put in its place."""
    from srl.train.verl.config_check import _in_our_words

    error = ValueError("train_batch_size (4) must be >= actor.ppo_mini_batch_size (64)")
    text = _in_our_words(error, made(), settings(made(), job()))
    assert text.startswith("data.train_batch_size, actor.ppo_mini_batch_size, critic.ppo_mini_batch_size: ")


def test_unknown_key_of_verls_is_refused_with_the_nearest():
    text = refusal(with_verl(made(), actor_rollout_ref__rollout__enforce_eagr=True))
    assert "did you mean 'actor_rollout_ref.rollout.enforce_eager'?" in text
    assert "verl.+actor_rollout_ref.rollout.enforce_eagr" in text


def test_section_of_verls_is_not_a_value():
    assert "verl.trainer is a section" in refusal(with_verl(made(), trainer=3))


CORRECTION = "algorithm__rollout_correction"
LOSS = "actor_rollout_ref__actor__policy_loss"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({f"{CORRECTION}__rollout_is": "token"}, "set algorithm.rollout_correction.rollout_is instead"),
        ({f"+{CORRECTION}__rollout_rs": "token_k1"}, "set algorithm.rollout_correction.rollout_rs instead"),
        ({CORRECTION: None}, "set algorithm.rollout_correction instead"),
        ({f"{CORRECTION}__bypass_mode": True}, "srl has no bypass mode"),
        ({f"{LOSS}__loss_mode": "bypass_mode"}, "srl computes the old"),
        ({f"+{LOSS}__rollout_correction__rollout_is": "token"}, "rollout_correction.rollout_is instead"),
        ({f"+{LOSS}__rollout_correction__bypass_mode": True}, "srl has no bypass mode"),
        ({"actor_rollout_ref__rollout__logprobs_mode": "raw_logprobs"}, "at the sampling temperature"),
        ({"+critic__enable": True}, "verl.critic.enable is set by srl"),
    ],
)  # fmt: skip
def test_what_our_trainer_would_not_read_is_refused_with_the_key_to_set(given, words):
    assert words in refusal(with_verl(made(), **given))


def test_top_p_on_vllm_needs_the_weights():
    cut = ("rollout.top_p=0.9", "algorithm.rollout_correction.rollout_is='off'")
    assert "rollout.top_p = 0.9: vLLM renormalises" in refusal(made(*cut), GPU)
    compose(made("rollout.top_p=0.9"), GPU)
    compose(made(*cut), job())


@pytest.mark.parametrize("key", ["critic__enable", "data__custom_cls__path", "trainer__v1__trainer_mode"])
def test_key_by_which_our_code_is_in_verl_cannot_be_changed(key):
    assert "is set by srl" in refusal(with_verl(made(), **{key: "other"}))


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref__rollout__repetition_penalty",
        "actor_rollout_ref__rollout__engine_kwargs__vllm__max_logprobs",
        "actor_rollout_ref__model__override_config__rope_theta",
        "ray_kwargs__ray_init__object_store_memory",
        "+trainer__wandb_proxy",
    ],
)
def test_key_that_verl_knows_outside_its_files_may_be_set(key):
    composed = compose(with_verl(made(), **{key: 2}), job())
    assert select(composed, key.removeprefix("+").replace("__", ".")) == 2


def test_key_of_verls_wins_and_is_said():
    config = with_verl(made(), actor_rollout_ref__rollout__gpu_memory_utilization=0.3)
    assert select(compose(config, job()), "actor_rollout_ref.rollout.gpu_memory_utilization") == 0.3
    said = [line for line in notes(config, job()) if "gpu_memory_utilization" in line]
    key = "verl.actor_rollout_ref.rollout.gpu_memory_utilization"
    ours = "cluster.gpu_memory_utilization"
    assert said == [f"{key} = 0.3 overrides {ours} = {made().cluster.gpu_memory_utilization}"]


@pytest.mark.parametrize("key", READ_HERE)
def test_key_that_our_code_reads_is_refused_with_ours(key):
    """Else verl's part of the run would have one value, and ours another."""
    config = made(*(["algorithm.name=ppo"] if key.startswith("critic.") else []))
    said = settings(config, job()).get(key)
    if said is not None:
        compose(with_verl(config, **{key.replace(".", "__"): said.value}), job())
        assert said.ours == READ_HERE[key]
    with pytest.raises(
        UserError, match=rf"^verl\.{key} is not read everywhere: set {READ_HERE[key]} instead"
    ):
        compose(with_verl(config, **{key.replace(".", "__"): 12345}), job())


def test_raised_limit_is_said():
    said = notes(made("actor.ppo_max_token_len=10", "critic.ppo_max_token_len=10"), job())
    assert [line.split(" = ")[0] for line in said if "less than the longest episode" in line] == [
        "actor.ppo_max_token_len",
        "critic.ppo_max_token_len",
    ]
