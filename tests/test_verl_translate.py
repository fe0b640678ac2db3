"""Every key of ours means to verl what it means to the local backend, or is refused."""

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.verl_configs import GPU, job, made

from srl.config.keys import keys
from srl.errors import UserError
from srl.train.verl.config_check import check_supported
from srl.train.verl.job import Job
from srl.train.verl.launch import ray_cluster
from srl.train.verl.translate import NO_DUAL_CLIP, settings

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TABLE = {key.name: key.facts for key in keys()}


def verl(*given: str, on: Job | None = None) -> dict[str, object]:
    """verl's keys and values for the defaults with `given` on top."""
    return settings(made(*given), on or job())


COMPUTED = {
    "model.dtype", "model.device", "actor.policy_loss.loss_mode", "actor.optim.betas", "critic.optim.betas",
}  # fmt: skip


def test_what_verls_workers_compute_is_translated_or_refused():
    """A key of the networks that nobody has decided about would silently keep verl's default."""
    for name, facts in TABLE.items():
        if name.startswith(("model.", "actor.", "critic.", "ref.")):
            assert name in COMPUTED or facts.verl or facts.refused, name


REFUSED = {
    "rollout.deterministic": "true", "rollout.engine": "vllm",
    "actor.mask_observations": "false", "critic.lora_rank": "8",
    "model.cast_lm_head_to_fp32": "true", "algorithm.filter_groups.enable": "true", "ref.path": "/other",
}  # fmt: skip


@pytest.mark.parametrize("key", [name for name, facts in TABLE.items() if facts.refused])
def test_key_that_is_refused_is_refused_when_it_is_not_the_default(key):
    with pytest.raises(UserError, match=key):
        check_supported(made("actor.use_kl_loss=true", "rollout.n=2", f"{key}={REFUSED[key]}"), job())


def test_a_reward_on_a_gpu_is_refused_where_it_is_used():
    scored = "reward.weights={em: 0.0, rm: 1.0}", "reward.rm.model=here"
    with pytest.raises(UserError) as said:
        check_supported(made(*scored, "reward.rm.device=cuda:1"), job())
    assert said.value.key == "reward.rm.device"
    for other in ((*scored, "reward.rm.device=cpu"), scored, ("reward.rm.device=cuda",)):
        check_supported(made(*other), job())


@pytest.mark.parametrize(
    ("setting", "on"),
    [
        ("cluster.rollout=torch", GPU),
        ("cluster.tensor_model_parallel_size=2", job()),
        ("model.device=cuda:1", GPU),
        ("model.device=cuda", job()),
        ("trainer.total_training_steps=0", GPU),
    ],
)
def test_what_the_machine_cannot_do_is_refused_with_our_key(setting, on):
    with pytest.raises(UserError, match=setting.partition("=")[0]):
        check_supported(made(setting), on)


LINEAR = "actor.optim.lr_scheduler_type=linear"
TRANSLATED = {
    "a mini-batch is at most the batch": (
        ("data.train_batch_size=4",), None,
        {f"{ACTOR}.ppo_mini_batch_size": 4, "critic.ppo_mini_batch_size": 4},
    ),
    "a pass holds an episode": (
        ("actor.ppo_max_token_len=10", "critic.ppo_max_token_len=10", "data.max_prompt_length=300",
         "data.max_response_length=700"), None,
        {f"{ACTOR}.ppo_max_token_len_per_gpu": 1000, "critic.ppo_infer_max_token_len_per_gpu": 1000},
    ),
    "clip_ratio stands for a bound left out": (
        ("actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4", "actor.clip_ratio_c=4.0"), None,
        {f"{ACTOR}.clip_ratio_low": 0.3, f"{ACTOR}.clip_ratio_high": 0.4, f"{ACTOR}.clip_ratio_c": 4.0},
    ),
    "KL estimators have verl's names": (
        ("algorithm.kl_penalty=k1", "actor.kl_loss_type=k3", "algorithm.use_kl_in_reward=true"), None,
        {"algorithm.kl_penalty": "kl", f"{ACTOR}.kl_loss_type": "low_var_kl",
         "algorithm.use_kl_in_reward": True},
    ),
    "a constant divides by the length": (
        ("actor.loss_agg_mode=constant", "data.max_response_length=700",
         ), None,
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 700,},
    ),
    "a share of warm-up is rounded as by the local backend": (
        ("actor.optim.lr_warmup_steps_ratio=0.289", "trainer.total_training_steps=100"), None,
        {f"{ACTOR}.optim.lr_warmup_steps": 29, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.0},
    ),
    "linear decay is our own schedule": ((LINEAR,), None, {f"{ACTOR}.optim.lr_scheduler_type": "constant"}),
    "no bound is one above any ratio": (
        ("actor.clip_ratio_c=null",), None, {f"{ACTOR}.clip_ratio_c": NO_DUAL_CLIP}
    ),
    "verl's actor learns from that step on, ours after it": (
        ("trainer.critic_warmup=2",), None, {"trainer.critic_warmup": 3}
    ),
    "0 saves the last step": (
        ("trainer.save_freq=0", "trainer.total_training_steps=7"), None,
        {"trainer.save_freq": 7, "trainer.total_training_steps": 7, "trainer.total_epochs": 7},
    ),
    "a resumed run": ((), job(resume=True), {"trainer.resume_mode": "auto"}),
    "PPO": (("algorithm.name=ppo",), None, {"algorithm.adv_estimator": "srl_ppo", "critic.enable": True}),
    "GRPO": (
        ("algorithm.name=grpo",), None, {"algorithm.adv_estimator": "srl_grpo", "critic.enable": False}
    ),
    "float32 on a CPU": ((), None, {f"{ROLLOUT}.dtype": "float32"}),
    "bfloat16 on a GPU": ((), GPU, {f"{ROLLOUT}.dtype": "bfloat16"}),
    "padding goes with it": (
        ("model.attn_implementation=flash_attention_2",), GPU,
        {f"{MODEL}.use_remove_padding": True,
         f"{MODEL}.override_config.attn_implementation": "flash_attention_2"},
    ),
    "adapters, merged for the torch rollout": (
        ("model.lora_rank=4", "model.lora_alpha=8", "model.lora_target_modules=[q_proj, v_proj]"), None,
        {f"{MODEL}.lora_rank": 4, f"{MODEL}.lora_alpha": 8, f"{MODEL}.target_modules": ["q_proj", "v_proj"],
         f"{MODEL}.lora.merge": True},
    ),
    "the tokenizer is the run's own": (
        (), job(run=Path("/runs/seven")),
        {f"{MODEL}.tokenizer_path": "/runs/seven/tokenizer",
         "critic.model.tokenizer_path": "/runs/seven/tokenizer",
         "trainer.default_local_dir": "/runs/seven/checkpoints"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "on", "expected"), TRANSLATED.values(), ids=TRANSLATED)
def test_translated(given, on, expected):
    found = verl(*given, on=on)
    assert {key: found[key] for key in expected} == expected


def test_what_a_run_does_not_have_is_not_translated():
    grpo = verl("algorithm.name=grpo")
    assert not [key for key in grpo if key.startswith("critic.") and key != "critic.enable"]
    lora = verl("model.lora_rank=4", on=GPU)
    assert "critic.model.lora_rank" not in lora
    assert f"{MODEL}.lora.merge" not in lora
    assert f"{MODEL}.lora_alpha" not in verl()


@pytest.mark.parametrize(
    ("engine", "on", "name"),
    [("auto", job(), "srl_torch"), ("auto", GPU, "vllm"), ("sglang", GPU, "sglang"), ("vllm", job(), "vllm")],
)
def test_what_generates_depends_on_the_machine_and_gets_the_runs_tokenizer(engine, on, name):
    values = verl(f"cluster.rollout={engine}", on=on)
    assert values[f"{ROLLOUT}.name"] == name
    tokenizers = {"vllm": "vllm.tokenizer", "sglang": "sglang.tokenizer_path"}
    if name in tokenizers:
        assert values[f"{ROLLOUT}.engine_kwargs.{tokenizers[name]}"] == str(on.tokenizer)
    assert (name == "sglang") == (values.get(f"{ROLLOUT}.skip_tokenizer_init") is False), "it ignores stops"
    bound = values.get(f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes")
    assert (bound == 2**30) == (name == "vllm" and on.cpu), "it would take a share of the machine's memory"


def test_cluster_that_is_there_is_not_told_what_it_has_and_a_new_one_counts_workers():
    there, new = verl("cluster.address=10.0.0.1:6379", "cluster.nnodes=3"), verl(on=job(gpus=2))
    assert there["trainer.nnodes"] == 3
    assert "ray_kwargs.ray_init.num_gpus" not in there
    assert new["ray_kwargs.ray_init.num_gpus"] == new["trainer.n_gpus_per_node"] == 2
    assert "ray_kwargs.ray_init.num_gpus" not in verl(on=GPU)


@pytest.mark.parametrize(
    ("address", "found"),
    [
        (None, {"address": "local", "_node_ip_address": "127.0.0.1", "num_gpus": 2}),
        ("auto", {"address": "auto"}),
    ],
)
def test_cluster_is_the_one_at_the_address_or_a_new_one_on_the_loopback(monkeypatch, address, found):
    """Without an address Ray itself would look for a cluster, in $RAY_ADDRESS and in its files."""
    ray, config = pytest.importorskip("ray"), pytest.importorskip("omegaconf").OmegaConf
    given: dict[str, object] = {}
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def init(**options: object) -> None:
        given.update(options)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray replaces it

    monkeypatch.setattr(ray, "init", init)
    theirs = SimpleNamespace(get_ppo_ray_runtime_env=lambda composed: {})
    monkeypatch.setitem(sys.modules, "verl.trainer.constants_ppo", theirs)
    composed = config.create({"ray_kwargs": {"ray_init": {"address": address, "num_gpus": 2}}})
    with ray_cluster(composed, "run", {"A": "1"}):
        assert given["namespace"] == "run"
        assert signal.getsignal(signal.SIGTERM) is on_sigterm
    options = ("address", "_node_ip_address", "num_gpus")
    assert {name: given[name] for name in options if name in given} == found


def test_seed_threads_and_offload_reach_every_process():
    drawn = [value for key, value in verl("trainer.seed=77").items() if key.endswith("seed")]
    assert len(drawn) >= 5
    assert set(drawn) == {77}
    assert verl("trainer.threads=3")["ray_kwargs.ray_init.runtime_env.env_vars"] == {"OMP_NUM_THREADS": "3"}
    found = verl("cluster.param_offload=true", "cluster.optimizer_offload=true", on=GPU)
    for engine in (f"{ACTOR}.fsdp_config", "critic.fsdp"):
        assert found[f"{engine}.param_offload"] is found[f"{engine}.optimizer_offload"] is True
