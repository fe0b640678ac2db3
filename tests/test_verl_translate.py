"""Every key of ours means to verl what it means to the local backend, or is refused."""

from __future__ import annotations

import sys
from functools import cache
from math import exp
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.verl_configs import GPU, job, made

from srl.config.cross_checks import algorithm_plugin
from srl.config.keys import keys
from srl.config.unread import UNREAD_BY_VERL, unread
from srl.errors import UserError
from srl.train.verl.config_check import REFUSED, check_supported, problems, refused
from srl.train.verl.job import Job
from srl.train.verl.launch import ray_cluster
from srl.train.verl.translate import READ_BY_US, settings, without_dropout
from srl.update.losses import MAX_LOG_RATIO

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def verl(*given: str, on: Job | None = None) -> dict[str, object]:
    """verl's keys and values for the defaults with `given` on top."""
    return {key: setting.value for key, setting in settings(made(*given), on or job()).items()}


EVERYTHING = (
    "algorithm.name=ppo", "model.lora_rank=8", "trainer.threads=2", "cluster.address=auto",
    "actor.loss_agg_mode=constant", "actor.loss_agg_constant=100", "actor.clip_ratio_low=0.1",
    "actor.clip_ratio_high=0.3", "actor.optim.lr_warmup_steps=3", "critic.optim.lr_warmup_steps=3",
)  # fmt: skip
"""Settings under which more keys are read."""


@cache
def translated() -> set[str]:
    """Our keys that some run of this backend takes a value of verl's from."""
    configs = [made(), made(*EVERYTHING), made("cluster.strategy=megatron", "model.lora_rank=8")]
    return {
        setting.ours
        for config in configs
        for on in (job(), GPU)
        for setting in settings(config, on).values()
        if setting.ours
    }


def listed(key: str) -> list[str]:
    """The entries of the tables of what is not translated that hold `key`."""
    tables = [*READ_BY_US, *UNREAD_BY_VERL, *REFUSED]
    return [entry for entry in tables if key == entry or (entry.endswith(".") and key.startswith(entry))]


@pytest.mark.parametrize("key", [key.name for key in keys()])
def test_somebody_has_decided_about_every_key(key):
    found = listed(key)
    assert len(found) + (key in translated()) == 1, f"{key}: translated or in {found}; it must be one of them"


def test_tables_name_only_keys_that_exist():
    names = [key.name for key in keys()]
    for entry in (*READ_BY_US, *UNREAD_BY_VERL, *REFUSED):
        assert any(name == entry or (entry.endswith(".") and name.startswith(entry)) for name in names), entry
    assert translated() <= set(names)


def test_key_that_is_refused_is_refused_when_it_is_not_the_default():
    changed = {
        "rollout.deterministic": "rollout.deterministic=true",
        "rollout.engine": "rollout.engine=torch",
        "rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization=0.8",
        "actor.mask_observations": "actor.mask_observations=false",
        "critic.lora_rank": "critic.lora_rank=8",
        "model.cast_lm_head_to_fp32": "model.cast_lm_head_to_fp32=true",
        "algorithm.filter_groups.enable": "algorithm.filter_groups.enable=true",
        "ref.path": "ref.path=/other",
    }
    assert set(changed) == set(REFUSED)
    for key, setting in changed.items():
        with pytest.raises(UserError, match=key):
            check_supported(made("actor.use_kl_loss=true", "rollout.n=2", setting), job())


def test_a_reward_on_a_gpu_is_refused():
    scored = "reward.weights={em: 0.0, rm: 1.0}", "reward.rm.model=here"
    (said,) = refused(made(*scored, "reward.rm.device=cuda:1"))
    assert said == (
        "reward.rm.device = cuda:1: --backend verl scores in processes without a GPU; "
        "set reward.rm.device=cpu"
    )
    for other in ((*scored, "reward.rm.device=cpu"), scored, ("reward.rm.device=cuda",)):
        assert list(refused(made(*other))) == [], (
            "with a GPU or without, it is scored on the CPU or not at all"
        )


@pytest.mark.parametrize("entry", UNREAD_BY_VERL)
def test_settings_that_nothing_on_verl_reads_are_named(entry):
    algorithm = algorithm_plugin("grpo")
    config = made(
        "algorithm.filter_groups.enable=true", "rollout.engine=openai",
        "actor.use_kl_loss=true",
    )  # fmt: skip
    for key in [key.name for key in keys() if key.name == entry or key.name.startswith(entry)]:
        kind = "eval" if key == "eval.batch_size" else "rl"
        assert set(unread(config, [key], kind, "verl", algorithm)) == {key}
        assert unread(config, [key], kind, "local", algorithm) == {}


def test_reference_that_nothing_asks_for_is_not_refused():
    check_supported(made("ref.path=/other"), job())


def test_defaults_are_supported_on_both_kinds_of_machine():
    check_supported(made(), job())
    check_supported(made(), GPU)


@pytest.mark.parametrize(
    ("setting", "on", "names"),
    [
        ("cluster.rollout=torch", GPU, "cluster.rollout = torch"),
        ("cluster.rollout=sglang", job(), "cluster.rollout = sglang"),
        ("cluster.tensor_model_parallel_size=2", job(), "cluster.tensor_model_parallel_size = 2"),
        ("cluster.strategy=megatron", job(), "cluster.strategy = megatron"),
        ("model.device=cuda:1", GPU, "model.device = cuda:1"),
        ("model.device=cuda:1", GPU, "CUDA_VISIBLE_DEVICES"),
        ("model.device=cuda", job(), "model.device = cuda"),
        ("model.dtype=float16", job(), "model.dtype = float16"),
        ("trainer.total_training_steps=0", GPU, "at least one step"),
    ],
)
def test_machine_that_cannot_is_said_in_one_line_with_our_key(setting, on, names):
    with pytest.raises(UserError, match=names) as said:
        check_supported(made(setting), on)
    assert "\n" not in str(said.value)


def test_batches_are_counted_in_questions_on_both_sides():
    found = verl("data.train_batch_size=12", "rollout.n=5", "actor.ppo_mini_batch_size=6")
    assert found["data.train_batch_size"] == 12
    assert found[f"{ROLLOUT}.n"] == 5
    assert found[f"{ACTOR}.ppo_mini_batch_size"] == 6


def test_mini_batch_larger_than_the_batch_is_the_batch():
    found = verl("data.train_batch_size=4", "actor.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=64")
    assert found[f"{ACTOR}.ppo_mini_batch_size"] == found["critic.ppo_mini_batch_size"] == 4


def test_pass_holds_at_least_one_whole_episode():
    lengths = ("data.max_prompt_length=300", "data.max_response_length=700")
    assert verl("actor.ppo_max_token_len=10", *lengths)[f"{ACTOR}.ppo_max_token_len_per_gpu"] == 1000
    assert verl("actor.ppo_max_token_len=5000", *lengths)[f"{ACTOR}.ppo_max_token_len_per_gpu"] == 5000
    assert verl("critic.ppo_max_token_len=10", *lengths)["critic.ppo_infer_max_token_len_per_gpu"] == 1000


def test_clip_ratio_stands_for_the_bounds_left_out():
    found = verl("actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4")
    assert (found[f"{ACTOR}.clip_ratio_low"], found[f"{ACTOR}.clip_ratio_high"]) == (0.3, 0.4)
    ours = settings(made("actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4"), job())
    assert ours[f"{ACTOR}.clip_ratio_low"].ours == "actor.clip_ratio"
    assert ours[f"{ACTOR}.clip_ratio_high"].ours == "actor.clip_ratio_high"


def test_no_dual_clip_is_a_bound_above_any_ratio():
    assert verl("actor.clip_ratio_c=4.0")[f"{ACTOR}.clip_ratio_c"] == 4.0
    assert verl("actor.clip_ratio_c=null")[f"{ACTOR}.clip_ratio_c"] > exp(MAX_LOG_RATIO)


def test_kl_estimators_have_verls_names():
    found = verl("algorithm.kl_penalty=k1", "actor.kl_loss_type=k3", "algorithm.use_kl_in_reward=true")
    assert found["algorithm.kl_penalty"] == "kl"
    assert found[f"{ACTOR}.kl_loss_type"] == "low_var_kl"
    assert found["algorithm.use_kl_in_reward"] is True
    assert verl("actor.kl_loss_type=k2")[f"{ACTOR}.kl_loss_type"] == "mse"


def test_constant_divides_by_the_same_number_on_both_sides():
    by_length = verl("actor.loss_agg_mode=constant", "data.max_response_length=700")
    assert by_length[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert by_length[f"{ACTOR}.loss_scale_factor"] == 700
    by_number = verl("actor.loss_agg_mode=constant", "actor.loss_agg_constant=123")
    assert by_number[f"{ACTOR}.loss_scale_factor"] == 123
    assert verl()[f"{ACTOR}.loss_scale_factor"] is None


def test_critic_has_its_own_loss_mode_and_number():
    found = verl("actor.loss_agg_mode=constant", "critic.loss_agg_mode=seq-mean-token-mean")
    assert found["critic.loss_agg_mode"] == "seq-mean-token-mean"
    assert found["critic.loss_scale_factor"] is None


def test_optimiser_is_translated_whole():
    found = verl(
        "actor.optim.lr=0.002", "actor.optim.betas=[0.8, 0.95]", "actor.optim.eps=0.0001",
        "actor.optim.weight_decay=0.3", "actor.grad_clip=0.7", "critic.grad_clip=0.6",
    )  # fmt: skip
    optim = f"{ACTOR}.optim"
    assert (found[f"{optim}.lr"], found[f"{optim}.betas"]) == (0.002, [0.8, 0.95])
    assert (found[f"{optim}.weight_decay"], found[f"{optim}.clip_grad"]) == (0.3, 0.7)
    assert found[f"{optim}.override_optimizer_config"] == {"eps": 0.0001}
    assert found["critic.optim.clip_grad"] == 0.6


def test_megatron_gets_the_moments_decay_where_verl_passes_it_on():
    given = ("cluster.strategy=megatron", "actor.optim.betas=[0.8, 0.95]", "actor.optim.eps=0.0001")
    found = verl(*given, on=GPU)[f"{ACTOR}.optim.override_optimizer_config"]
    assert found == {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 0.0001}


def test_warm_up_as_a_share_is_rounded_as_by_the_local_backend():
    given = ("actor.optim.lr_warmup_steps_ratio=0.289", "trainer.total_training_steps=100")
    assert verl(*given)[f"{ACTOR}.optim.lr_warmup_steps"] == 29
    assert verl(*given, "actor.optim.lr_warmup_steps=7")[f"{ACTOR}.optim.lr_warmup_steps"] == 7
    assert verl(*given)[f"{ACTOR}.optim.lr_warmup_steps_ratio"] == 0.0


def test_linear_decay_is_our_own_schedule_under_fsdp_and_megatrons_there():
    linear = "actor.optim.lr_scheduler_type=linear"
    assert verl(linear)[f"{ACTOR}.optim.lr_scheduler_type"] == "constant"
    assert verl("actor.optim.lr_scheduler_type=cosine")[f"{ACTOR}.optim.lr_scheduler_type"] == "cosine"
    assert verl(linear, "cluster.strategy=megatron", on=GPU)[f"{ACTOR}.optim.lr_decay_style"] == "linear"


@pytest.mark.parametrize("warmup", [0, 2])
def test_actor_begins_to_learn_at_the_same_step(warmup):
    bound = verl(f"trainer.critic_warmup={warmup}")["trainer.critic_warmup"]
    in_verl = [step for step in range(1, 6) if bound <= step]
    assert in_verl == [step for step in range(1, 6) if step > warmup]


@pytest.mark.parametrize(("frequency", "saved"), [(0, [7]), (3, [3, 6, 7])])
def test_checkpoints_come_at_the_same_steps(frequency, saved):
    every = verl(f"trainer.save_freq={frequency}", "trainer.total_training_steps=7")["trainer.save_freq"]
    assert [step for step in range(1, 8) if every > 0 and (step == 7 or step % every == 0)] == saved


def test_run_lasts_its_steps_however_few_the_questions():
    found = verl("trainer.total_training_steps=7")
    assert found["trainer.total_training_steps"] == 7
    assert found["trainer.total_epochs"] >= 7


def test_resume_goes_on_from_the_newest_checkpoint():
    assert verl(on=job())["trainer.resume_mode"] == "disable"
    assert verl(on=job(resume=True))["trainer.resume_mode"] == "auto"


def test_training_samples_as_configured_and_greedy_validation_is_greedy():
    found = verl("rollout.temperature=0.7", "rollout.top_p=0.9")
    assert (found[f"{ROLLOUT}.temperature"], found[f"{ROLLOUT}.top_p"], found[f"{ROLLOUT}.top_k"]) == (
        0.7,
        0.9,
        -1,
    )
    assert found[f"{ROLLOUT}.val_kwargs.do_sample"] is False
    assert verl("eval.temperature=0.5")[f"{ROLLOUT}.val_kwargs.do_sample"] is True


def test_algorithm_says_its_name_and_whether_it_has_a_critic():
    ppo, grpo = verl("algorithm.name=ppo"), verl("algorithm.name=grpo")
    assert (ppo["algorithm.adv_estimator"], ppo["critic.enable"]) == ("srl_ppo", True)
    assert (grpo["algorithm.adv_estimator"], grpo["critic.enable"]) == ("srl_grpo", False)
    assert not [key for key in grpo if key.startswith("critic.") and key != "critic.enable"]


def test_precision_follows_the_machine():
    key, engine = f"{ROLLOUT}.dtype", f"{ACTOR}.fsdp_config.mixed_precision"
    assert (verl()[key], verl()[engine]["param_dtype"]) == ("float32", "fp32")
    assert (verl(on=GPU)[key], verl(on=GPU)[engine]["param_dtype"]) == ("bfloat16", "bf16")
    forced = verl("model.dtype=float32", on=GPU)
    assert (forced[key], forced[engine]["param_dtype"]) == ("float32", "fp32")


@pytest.mark.parametrize(("attention", "packed"), [("sdpa", False), ("flash_attention_2", True)])
def test_padding_is_taken_out_only_where_attention_sees_the_seams(attention, packed):
    found = verl(f"model.attn_implementation={attention}", on=GPU)
    assert found["actor_rollout_ref.model.use_remove_padding"] is packed
    assert found["actor_rollout_ref.model.override_config"] == {"attn_implementation": attention}


def test_dropout_is_off_in_training_too():
    sizes = {"attention_dropout": 0.1, "resid_pdrop": 0.0, "text_config": {"hidden_dropout": 0.2, "n": 3}}
    assert without_dropout(sizes) == {"attention_dropout": 0.0, "text_config": {"hidden_dropout": 0.0}}


def test_models_own_dropout_reaches_policy_and_critic(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"attention_dropout": 0.5}')
    found = verl(f"model.path={tmp_path}")
    for network in ("actor_rollout_ref.model", "critic.model"):
        assert found[f"{network}.override_config"]["attention_dropout"] == 0.0


def test_adapters_are_the_policys_alone_and_merged_for_the_torch_rollout():
    given = ("model.lora_rank=4", "model.lora_alpha=8", "model.lora_target_modules=[q_proj, v_proj]")
    found = verl(*given)
    assert found["actor_rollout_ref.model.lora_rank"] == 4
    assert found["actor_rollout_ref.model.lora_alpha"] == 8
    assert found["actor_rollout_ref.model.target_modules"] == ["q_proj", "v_proj"]
    assert found["actor_rollout_ref.model.lora.merge"] is True
    assert "critic.model.lora_rank" not in found
    assert "actor_rollout_ref.model.lora.merge" not in verl(*given, on=GPU)


def test_tokenizer_is_the_runs_own_directory():
    found = verl(on=job(run=Path("/runs/seven")))
    assert found["actor_rollout_ref.model.tokenizer_path"] == str(Path("/runs/seven/tokenizer"))
    assert found["critic.model.tokenizer_path"] == str(Path("/runs/seven/tokenizer"))
    assert found["trainer.default_local_dir"] == str(Path("/runs/seven/checkpoints"))


def test_paths_hold_in_every_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    found = verl("model.path=model", on=job(run=Path("runs/one")))
    assert found["actor_rollout_ref.model.path"] == str(tmp_path / "model")
    assert found["trainer.default_local_dir"] == str(tmp_path / "runs" / "one" / "checkpoints")
    assert found["critic.model.tokenizer_path"] == str(tmp_path / "runs" / "one" / "tokenizer")
    assert verl("model.path=Qwen/Qwen2.5-7B")["actor_rollout_ref.model.path"] == "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    ("given", "on", "name"),
    [
        ("auto", job(), "srl_torch"),
        ("auto", GPU, "vllm"),
        ("sglang", GPU, "sglang"),
        ("vllm", job(), "vllm"),
        ("torch", job(), "srl_torch"),
    ],
)
def test_what_generates_depends_on_the_machine(given, on, name):
    assert verl(f"cluster.rollout={given}", on=on)[f"{ROLLOUT}.name"] == name


def test_vllm_gets_the_runs_own_tokenizer_and_without_a_gpu_bounded_bytes():
    key = f"{ROLLOUT}.engine_kwargs.vllm"
    assert verl(on=GPU)[f"{key}.tokenizer"] == str(GPU.tokenizer)
    assert f"{key}.kv_cache_memory_bytes" not in verl(on=GPU)
    assert verl("cluster.rollout=vllm")[f"{key}.kv_cache_memory_bytes"] == 2**30
    assert not [name for name in verl() if "engine_kwargs" in name]


def test_sglang_has_the_tokenizer_that_stop_strings_need():
    found = verl("cluster.rollout=sglang", on=GPU)
    assert found[f"{ROLLOUT}.skip_tokenizer_init"] is False
    assert found[f"{ROLLOUT}.engine_kwargs.sglang.tokenizer_path"] == str(GPU.tokenizer)


def test_cluster_that_is_there_is_not_told_what_it_has():
    found = verl("cluster.address=10.0.0.1:6379", "cluster.nnodes=3")
    assert found["ray_kwargs.ray_init.address"] == "10.0.0.1:6379"
    assert "ray_kwargs.ray_init.num_cpus" not in found
    assert "ray_kwargs.ray_init.num_gpus" not in found
    assert found["trainer.nnodes"] == 3


@pytest.mark.parametrize("given", ["", "10.0.0.1:6379"])
def test_several_machines_need_the_address_of_their_cluster(monkeypatch, given):
    monkeypatch.setenv("RAY_ADDRESS", given)
    composed = SimpleNamespace(trainer=SimpleNamespace(nnodes=2))
    said = next(problems(composed, made("cluster.nnodes=2")))
    assert said.startswith("cluster.nnodes = 2: several machines need an existing Ray cluster")
    assert said.endswith("set cluster.address=auto")


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
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    theirs = SimpleNamespace(get_ppo_ray_runtime_env=lambda composed: {})
    monkeypatch.setitem(sys.modules, "verl.trainer.constants_ppo", theirs)
    composed = config.create({"ray_kwargs": {"ray_init": {"address": address, "num_gpus": 2}}})
    with ray_cluster(composed, "run", {"A": "1"}, quiet=True):
        assert given["namespace"] == "run"
    options = ("address", "_node_ip_address", "num_gpus")
    assert {name: given[name] for name in options if name in given} == found


def test_machine_without_a_gpu_counts_its_workers_as_gpus():
    found = verl(on=job(gpus=2))
    assert (found["ray_kwargs.ray_init.num_gpus"], found["trainer.n_gpus_per_node"]) == (2, 2)
    assert found["trainer.device"] == "cpu"
    assert found[f"{ACTOR}.fsdp_config.use_torch_compile"] is False
    assert "ray_kwargs.ray_init.num_gpus" not in verl(on=GPU)


def test_seed_reaches_everything_that_draws():
    found = verl("trainer.seed=77")
    drawn = [key for key in found if key.endswith("seed")]
    assert len(drawn) >= 6
    assert {found[key] for key in drawn} == {77}


def test_threads_reach_every_process_and_the_torch_rollout():
    found = verl("trainer.threads=3")
    assert found["ray_kwargs.ray_init.runtime_env.env_vars"] == {"OMP_NUM_THREADS": "3"}
    assert found[f"{ROLLOUT}.engine_kwargs.srl_torch"] == {"threads": 3}
    assert not [key for key in verl() if "env_vars" in key or "engine_kwargs" in key]


def test_offload_reaches_actor_and_critic():
    found = verl("cluster.param_offload=true", "cluster.optimizer_offload=true", on=GPU)
    for engine in (f"{ACTOR}.fsdp_config", "critic.fsdp"):
        assert found[f"{engine}.param_offload"] is True
        assert found[f"{engine}.optimizer_offload"] is True
    assert "actor_rollout_ref.ref.fsdp_config.optimizer_offload" not in found


def test_megatron_recomputes_layers_by_its_own_names():
    given = ("cluster.strategy=megatron", "model.gradient_checkpointing=true")
    found = verl(*given, on=GPU)
    where = f"{ACTOR}.megatron.override_transformer_config"
    assert found[f"{where}.recompute_granularity"] == "full"
    assert not [key for key in verl(given[0], on=GPU) if "recompute" in key]
