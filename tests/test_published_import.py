"""What `srl train import` makes of the published settings is the preset that reproduces them.

The lists are the settings of Search-R1's scripts at a14dc3a, as `tests/test_published_presets.py` has them;
what may differ between import and preset is named, nothing else does.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.import_inputs import imported

from srl.config import load_config
from srl.config.keys import flat, plain

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SHARED = {
    "data.train_files": "data/nq_hotpotqa_train/train.parquet",
    "data.val_files": "data/nq_hotpotqa_train/test.parquet",
    "data.train_batch_size": "512",
    "data.max_prompt_length": "4096",
    "data.max_response_length": "500",
    "data.max_start_length": "2048",
    "data.max_obs_length": "500",
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "true",
    f"{ACTOR}.optim.lr": "1e-6",
    f"{ACTOR}.optim.lr_warmup_steps_ratio": "0.285",
    f"{ACTOR}.ppo_mini_batch_size": "256",
    f"{ACTOR}.fsdp_config.param_offload": "true",
    f"{ACTOR}.fsdp_config.optimizer_offload": "true",
    f"{ACTOR}.state_masking": "true",
    f"{ROLLOUT}.tensor_model_parallel_size": "1",
    f"{ROLLOUT}.gpu_memory_utilization": "0.6",
    f"{ROLLOUT}.temperature": "1",
    "+trainer.val_before_train": "true",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "1",
    "trainer.save_freq": "100",
    "trainer.test_freq": "100",
    "trainer.total_training_steps": "1005",
    "max_turns": "4",
    "retriever.url": "http://127.0.0.1:8000/retrieve",
    "retriever.topk": "3",
}
PPO = {
    "algorithm.adv_estimator": "gae",
    f"{ROLLOUT}.n_agent": "1",
    f"{ROLLOUT}.top_p": "1.0",
    "critic.optim.lr": "1e-5",
    "critic.optim.lr_warmup_steps_ratio": "0.015",
    "critic.model.path": "Qwen/Qwen2.5-7B",
    "critic.model.fsdp_config.param_offload": "true",
    "critic.model.fsdp_config.optimizer_offload": "true",
    "algorithm.kl_ctrl.kl_coef": "0.001",
    "trainer.critic_warmup": "0",
}
GRPO = {
    "algorithm.adv_estimator": "grpo",
    f"{ACTOR}.use_kl_loss": "true",
    f"{ACTOR}.kl_loss_coef": "0.001",
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ROLLOUT}.n_agent": "5",
}
FORMAT = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B",
    "reward_model.structure_format_score": "0.2",
    "reward_model.final_format_score": "0.1",
    "reward_model.retrieval_score": "0",
}
FOUR_MACHINES = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-32B",
    f"{ACTOR}.optim.lr": "2e-7",
    f"{ACTOR}.fsdp_config.param_offload": "false",
    f"{ROLLOUT}.tensor_model_parallel_size": "2",
    f"{ROLLOUT}.gpu_memory_utilization": "0.5",
    "trainer.nnodes": "4",
}
LLAMA = {
    "data.train_files": "data/nq_search/train.parquet",
    "actor_rollout_ref.model.path": "meta-llama/Llama-3.2-3B",
    "critic.model.path": "meta-llama/Llama-3.2-3B",
    "max_turns": "2",
    "trainer.test_freq": "50",
}
PPO_32B = {
    "critic.model.path": "Qwen/Qwen2.5-32B",
    "critic.model.fsdp_config.param_offload": "false",
    "+trainer.val_before_train": "true",
}
GRPO_32B = {f"{ACTOR}.fsdp_config.optimizer_offload": "false", "+trainer.val_before_train": "false"}
RUNS = {
    ("search-r1-v0.2", "ppo"): SHARED | PPO,
    ("search-r1-v0.2", "grpo"): SHARED | GRPO,
    ("search-r1-v0.3", "ppo"): SHARED | PPO | FORMAT | {"critic.model.path": "Qwen/Qwen2.5-3B"},
    ("search-r1-v0.3", "grpo"): SHARED | GRPO | FORMAT | {f"{ACTOR}.optim.lr": "5e-7"},
    ("search-r1-llama", "ppo"): SHARED | PPO | LLAMA,
    ("search-r1-llama", "grpo"): SHARED | GRPO | LLAMA,
    ("search-r1-32b", "ppo"): SHARED | PPO | FOUR_MACHINES | PPO_32B,
    ("search-r1-32b", "grpo"): SHARED | GRPO | FOUR_MACHINES | GRPO_32B,
}
OTHERWISE = {
    "actor.ppo_max_token_len": "what is computed does not depend on it",
    "cluster.address": "theirs is that of ray job submit",
    "cluster.rollout": "auto is vllm where there is a GPU",
    "critic.ppo_max_token_len": "what is computed does not depend on it",
    "data.template": "the questions have their prompts, which are the template's",
    "data.val_files": "not on test questions",
    "eval.val_questions": "512 of those set aside, not 51,713",
    "model.attn_implementation": "use_remove_padding, which needs it, is verl's default",
    "search.retries": "theirs ends at the first failure",
}
ONLY_GRPO = {"actor.ppo_mini_batch_size": "64 questions, not 256 episodes", "rollout.top_p": "1, not 0.95"}


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.parametrize(("preset", "algo"), RUNS)
def test_verl_accepts_the_preset_and_it_fits_the_gpus_it_was_published_for(preset, algo):
    """Eight H100 of 80 GB, or four times eight; a tenth of them is for the libraries."""
    pytest.importorskip("verl")
    from srl.train.dry_run import plan_run, planned_job
    from srl.train.verl.config_check import validated

    config = load_config(preset, algo=algo).config
    job = planned_job(config)
    assert validated(config, job).algorithm.adv_estimator == f"srl_{algo}"
    assert not job.cpu
    assert plan_run(config, "verl").fits["80 GB"] == {}


def values(config: Any) -> dict[str, Any]:
    return {".".join(path): plain(value) for path, value in flat(config.model_dump())}


@pytest.mark.parametrize(("preset", "algo"), RUNS)
def test_preset_differs_from_the_import_where_it_says_so_and_nowhere_else(preset, algo, tmp_path: Path):
    program = "main_ppo_format" if preset == "search-r1-v0.3" else "main_ppo"
    settings = [f"{key}={value}" for key, value in RUNS[preset, algo].items()]
    config, _ = imported(tmp_path, f"python3 -m verl.trainer.{program} \\\n" + " \\\n".join(settings) + "\n")
    theirs, ours = values(config), values(load_config(preset, algo=algo).config)
    differ = {key for key in theirs | ours if theirs.get(key) != ours.get(key)}
    allowed = OTHERWISE | (ONLY_GRPO if algo == "grpo" else {})
    assert {key: (theirs.get(key), ours.get(key)) for key in differ - set(allowed)} == {}
    assert {key for key in ONLY_GRPO if key in differ} == (set(ONLY_GRPO) if algo == "grpo" else set())
