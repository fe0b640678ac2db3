"""The presets that reproduce published settings: each number beside the script and key it comes from.

The table is of github.com/PeterGriffinJin/Search-R1 at a14dc3a: `V2` and `V3` stand for its scripts
`nq_hotpotqa/v0.2/train_{ppo,grpo}.sh` and `v0.3/train_{ppo,grpo}_format.sh`, `BIG` for
`example/multinode/train_{ppo,grpo}_multinode_32b.sh`, `TOP` for `train_{ppo,grpo}.sh` at the top, `YAML`
for `verl/trainer/config/ppo_trainer.yaml`, which says what a script leaves alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from srl.cli.train import app
from srl.config import describe, load_config
from srl.config.load import PRESETS, read_layer
from srl.config.settings import Setting
from srl.train.model_size import PUBLISHED, shape_of

V2, V3, BIG, TOP, YAML = "v0.2", "v0.3", "32b", "top", "ppo_trainer.yaml"
OURS, CODE = "ours", "the code of Search-R1"
ALGORITHMS = ("ppo", "grpo")
NAMES = ("search-r1-v0.2", "search-r1-v0.3", "search-r1-32b", "search-r1-llama")
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"

SHARED: dict[str, tuple[Any, str, str]] = {
    "model.path": ("Qwen/Qwen2.5-7B", V2, "BASE_MODEL"),
    "model.gradient_checkpointing": (True, V2, "actor_rollout_ref.model.enable_gradient_checkpointing"),
    "model.attn_implementation": ("flash_attention_2", V2, "actor_rollout_ref.model.use_remove_padding"),
    "data.train_files": (["data/nq_hotpotqa_train/train.parquet"], V2, "data.train_files"),
    "data.val_files": (["data/nq_hotpotqa_train/validation.parquet"], OURS, "theirs is test.parquet"),
    "data.template": ("search-r1", CODE, "scripts/data_process/nq_search.py"),
    "data.train_batch_size": (512, V2, "data.train_batch_size"),
    "data.max_prompt_length": (2048, V2, "data.max_start_length"),
    "data.max_response_length": (4096, V2, "data.max_prompt_length"),
    "search.url": (["http://127.0.0.1:8000/retrieve"], V2, "retriever.url"),
    "search.topk": (3, V2, "retriever.topk"),
    "search.retries": (8, OURS, "theirs is none"),
    "rollout.temperature": (1.0, V2, f"{_ROLLOUT}.temperature"),
    "rollout.top_p": (1.0, V2, f"{_ROLLOUT}.top_p of PPO; GRPO's script leaves it at 0.95"),
    "rollout.max_turns": (4, V2, "max_turns"),
    "rollout.max_turn_tokens": (500, V2, "data.max_response_length"),
    "rollout.max_obs_length": (500, V2, "data.max_obs_length"),
    "rollout.max_num_seqs": (1024, YAML, f"{_ROLLOUT}.max_num_seqs"),
    "reward.weights.em": (1.0, CODE, "verl/utils/reward_score/qa_em.py"),
    "algorithm.gamma": (1.0, YAML, "algorithm.gamma"),
    "algorithm.lam": (1.0, YAML, "algorithm.lam"),
    "actor.ppo_mini_batch_size": (256, V2, f"{_ACTOR}.ppo_mini_batch_size"),
    "actor.ppo_epochs": (1, YAML, f"{_ACTOR}.ppo_epochs"),
    "actor.ppo_max_token_len": (16384, YAML, f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    "actor.clip_ratio": (0.2, YAML, f"{_ACTOR}.clip_ratio"),
    "actor.clip_ratio_c": (None, CODE, "verl/trainer/ppo/core_algos.py"),
    "actor.entropy_coeff": (0.001, YAML, f"{_ACTOR}.entropy_coeff"),
    "actor.grad_clip": (1.0, YAML, f"{_ACTOR}.grad_clip"),
    "actor.mask_observations": (True, V2, f"{_ACTOR}.state_masking"),
    "actor.optim.lr": (1e-6, V2, f"{_ACTOR}.optim.lr"),
    "actor.optim.lr_warmup_steps_ratio": (0.285, V2, f"{_ACTOR}.optim.lr_warmup_steps_ratio"),
    "actor.optim.lr_scheduler_type": ("constant", YAML, f"{_ACTOR}.optim.warmup_style"),
    "actor.optim.betas": ([0.9, 0.999], CODE, "verl/workers/fsdp_workers.py"),
    "actor.optim.weight_decay": (0.01, CODE, "verl/workers/fsdp_workers.py"),
    "sft.steps": (0, OURS, "there is none before"),
    "trainer.total_training_steps": (1005, V2, "trainer.total_training_steps"),
    "trainer.save_freq": (100, V2, "trainer.save_freq"),
    "trainer.test_freq": (100, V2, "trainer.test_freq"),
    "trainer.val_before_train": (True, V2, "+trainer.val_before_train"),
    "cluster.nnodes": (1, V2, "trainer.nnodes"),
    "cluster.n_gpus_per_node": (8, V2, "trainer.n_gpus_per_node"),
    "cluster.tensor_model_parallel_size": (1, V2, f"{_ROLLOUT}.tensor_model_parallel_size"),
    "cluster.gpu_memory_utilization": (0.6, V2, f"{_ROLLOUT}.gpu_memory_utilization"),
    "cluster.param_offload": (True, V2, f"{_ACTOR}.fsdp_config.param_offload"),
    "cluster.optimizer_offload": (True, V2, f"{_ACTOR}.fsdp_config.optimizer_offload"),
}
PPO: dict[str, tuple[Any, str, str]] = {
    "rollout.n": (1, V2, f"{_ROLLOUT}.n_agent"),
    "algorithm.use_kl_in_reward": (True, YAML, f"{_ACTOR}.use_kl_loss: False"),
    "algorithm.kl_penalty": ("k1", YAML, "algorithm.kl_penalty: kl"),
    "algorithm.kl_ctrl.type": ("fixed", YAML, "algorithm.kl_ctrl.type"),
    "algorithm.kl_ctrl.kl_coef": (0.001, V2, "algorithm.kl_ctrl.kl_coef"),
    "actor.use_kl_loss": (False, YAML, f"{_ACTOR}.use_kl_loss"),
    "critic.ppo_mini_batch_size": (256, YAML, "critic.ppo_mini_batch_size"),
    "critic.ppo_epochs": (1, YAML, "critic.ppo_epochs"),
    "critic.ppo_max_token_len": (32768, YAML, "critic.ppo_max_token_len_per_gpu"),
    "critic.cliprange_value": (0.5, YAML, "critic.cliprange_value"),
    "critic.grad_clip": (1.0, YAML, "critic.grad_clip"),
    "critic.optim.lr": (1e-5, V2, "critic.optim.lr"),
    "critic.optim.lr_warmup_steps_ratio": (0.015, V2, "critic.optim.lr_warmup_steps_ratio"),
    "critic.optim.lr_scheduler_type": ("constant", YAML, "critic.optim.warmup_style"),
    "critic.optim.betas": ([0.9, 0.999], CODE, "verl/workers/fsdp_workers.py"),
    "critic.optim.weight_decay": (0.01, CODE, "verl/workers/fsdp_workers.py"),
    "trainer.critic_warmup": (0, V2, "trainer.critic_warmup"),
}
GRPO: dict[str, tuple[Any, str, str]] = {
    "rollout.n": (5, V2, f"{_ROLLOUT}.n_agent"),
    "algorithm.use_kl_in_reward": (False, V2, f"{_ACTOR}.use_kl_loss"),
    "actor.ppo_mini_batch_size": (64, OURS, "256 episodes; see test_groups_make_eight_…"),
    "actor.use_kl_loss": (True, V2, f"{_ACTOR}.use_kl_loss"),
    "actor.kl_loss_coef": (0.001, V2, f"{_ACTOR}.kl_loss_coef"),
    "actor.kl_loss_type": ("k3", V2, f"{_ACTOR}.kl_loss_type: low_var_kl"),
}
OWN: dict[str, dict[str, dict[str, tuple[Any, str, str]]]] = {
    "search-r1-v0.2": {"": SHARED, "ppo": PPO, "grpo": GRPO},
    "search-r1-v0.3": {
        "": {
            "model.path": ("Qwen/Qwen2.5-3B", V3, "BASE_MODEL"),
            "reward.weights.format": (1.0, V3, "verl.trainer.main_ppo_format"),
            "reward.format.structure_score": (0.2, V3, "reward_model.structure_format_score"),
            "reward.format.final_format_score": (0.1, V3, "reward_model.final_format_score"),
            "reward.format.retrieval_score": (0.0, V3, "reward_model.retrieval_score"),
        },
        "grpo": {"actor.optim.lr": (5e-7, V3, f"{_ACTOR}.optim.lr")},
    },
    "search-r1-32b": {
        "": {
            "model.path": ("Qwen/Qwen2.5-32B", BIG, "BASE_MODEL"),
            "actor.optim.lr": (2e-7, BIG, f"{_ACTOR}.optim.lr"),
            "cluster.nnodes": (4, BIG, "N_NODES"),
            "cluster.address": ("auto", BIG, "ray job submit"),
            "cluster.tensor_model_parallel_size": (2, BIG, f"{_ROLLOUT}.tensor_model_parallel_size"),
            "cluster.gpu_memory_utilization": (0.5, BIG, f"{_ROLLOUT}.gpu_memory_utilization"),
            "cluster.param_offload": (False, BIG, f"{_ACTOR}.fsdp_config.param_offload"),
        },
        "ppo": {
            "actor.ppo_max_token_len": (8192, BIG, f"{_ACTOR}.ppo_micro_batch_size: an episode a GPU"),
            "critic.ppo_max_token_len": (8192, BIG, "critic.ppo_micro_batch_size: an episode a GPU"),
            "trainer.val_before_train": (True, BIG, "+trainer.val_before_train"),
            "cluster.optimizer_offload": (True, BIG, f"{_ACTOR}.fsdp_config.optimizer_offload"),
        },
        "grpo": {
            "trainer.val_before_train": (False, BIG, "+trainer.val_before_train"),
            "cluster.optimizer_offload": (False, BIG, f"{_ACTOR}.fsdp_config.optimizer_offload"),
        },
    },
    "search-r1-llama": {
        "": {
            "model.path": ("meta-llama/Llama-3.2-3B", TOP, "BASE_MODEL"),
            "data.train_files": (["data/nq_search/train.parquet"], TOP, "DATA_DIR"),
            "data.val_files": (["data/nq_search/validation.parquet"], OURS, "theirs is test.parquet"),
            "rollout.max_turns": (2, TOP, "max_turns"),
            "rollout.top_p": (1.0, OURS, "theirs is YAML's 0.95"),
            "trainer.test_freq": (50, TOP, "trainer.test_freq"),
        },
    },
}
MODELS = [
    ("search-r1-v0.2", "Qwen/Qwen2.5-3B"),
    ("search-r1-v0.2", "Qwen/Qwen2.5-3B-Instruct"),
    ("search-r1-v0.2", "Qwen/Qwen2.5-7B"),
    ("search-r1-v0.2", "Qwen/Qwen2.5-7B-Instruct"),
    ("search-r1-v0.2", "meta-llama/Llama-3.2-3B"),
    ("search-r1-v0.3", "Qwen/Qwen2.5-3B"),
    ("search-r1-v0.3", "Qwen/Qwen2.5-7B-Instruct"),
    ("search-r1-v0.3", "meta-llama/Llama-3.2-3B-Instruct"),
    ("search-r1-32b", "Qwen/Qwen2.5-32B"),
    ("search-r1-llama", "meta-llama/Llama-3.2-3B"),
]


def expected(preset: str, algo: str) -> dict[str, Any]:
    """Every key that the table has a value for, with the value that acts: a preset lies above its base."""
    parts = [OWN[name].get(part, {}) for name in ("search-r1-v0.2", preset) for part in ("", algo)]
    found = {key: said[0] for part in parts for key, said in part.items()}
    if preset == "search-r1-v0.3":
        del found["reward.weights.em"]  # a mapping of weights replaces the one below it
    return found


def values(preset: str, algo: str) -> dict[str, Any]:
    return {key: value for key, value, _ in describe(load_config(preset, algo=algo))}


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("preset", NAMES)
def test_preset_is_what_was_published(preset, algo):
    found, table = values(preset, algo), expected(preset, algo)
    assert {key: found.get(key) for key in table} == table


@pytest.mark.parametrize("preset", NAMES)
def test_every_value_of_a_preset_is_in_the_table(preset):
    """Nothing is in a preset that nobody published, and nothing of the table is left to the defaults."""
    layer = read_layer(PRESETS / f"{preset}.yaml", f"preset {preset}")
    for algo, entries in {"": layer.settings, **layer.per_algorithm}.items():
        assert keys_of(entries) == set(OWN[preset].get(algo, {})), algo


def keys_of(entries: list[Setting]) -> set[str]:
    """The dotted keys, a mapping of weights opened."""
    return {
        ".".join((*entry.path, *more))
        for entry in entries
        for more in (tuple((name,) for name in entry.value) if isinstance(entry.value, dict) else ((),))
    }


@pytest.mark.parametrize("preset", NAMES)
def test_every_value_has_its_source_beside_it(preset):
    lines = (PRESETS / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        if re.match(r"\s*\w+: \S", line) and not line.startswith("extends:"):
            assert "  # " in line or above.strip().startswith("#"), line


def test_groups_make_eight_optimiser_steps_where_the_script_made_ten():
    """512 × 5 episodes in mini-batches of 256; of the divisors of 512 no other comes as near to either."""
    config = load_config("search-r1-v0.2", algo="grpo").config
    size, questions, n = config.actor.ppo_mini_batch_size, config.data.train_batch_size, config.rollout.n
    divisors = [number for number in range(1, questions + 1) if questions % number == 0]
    assert questions * n / 256 == 10
    assert questions // size == 8
    assert size == min(divisors, key=lambda number: abs(questions / number - 10))
    assert size == min(divisors, key=lambda number: abs(number * n - 256))


@pytest.mark.parametrize("preset", NAMES)
def test_ppo_makes_two_optimiser_steps_as_published(preset):
    config = load_config(preset, algo="ppo").config
    assert config.data.train_batch_size // config.actor.ppo_mini_batch_size == 2
    assert config.data.train_batch_size // config.critic.ppo_mini_batch_size == 2


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("preset", NAMES)
def test_mini_batches_divide_over_every_worker(preset, algo):
    config = load_config(preset, algo=algo).config
    workers = config.cluster.nnodes * (config.cluster.n_gpus_per_node or 1)
    assert config.actor.ppo_mini_batch_size * config.rollout.n % workers == 0
    assert config.data.train_batch_size * config.rollout.n % workers == 0


@pytest.mark.parametrize(("preset", "model"), MODELS)
def test_the_longest_episode_fits_the_model(preset, model):
    config = load_config(preset, algo="grpo", flags={"model.path": model}).config
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest <= PUBLISHED[model]["max_position_embeddings"]


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
    ],
)
def test_shape_of_a_published_model_has_its_number_of_parameters(model, parameters):
    """The numbers are those of the safetensors that the makers publish."""
    assert shape_of(load_config("one-gpu").config, model, needs_critic=False).parameters == parameters
    differs = PUBLISHED[model].items() ^ PUBLISHED[f"{model}-Instruct"].items()
    assert {key for key, _ in differs} <= {"max_position_embeddings"}


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr("srl.train.threads.usable_cores", lambda: 1)
    monkeypatch.setenv("SRL_WORKSPACE", str(tmp_path / "workspace"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("preset", "model"), [MODELS[0], MODELS[4], MODELS[-1]])
def test_dry_run_needs_neither_weights_nor_data_and_says_what_is_missing(preset, model):
    arguments = ["--preset", preset, "--algo", "grpo", "--model", model, "--dry-run"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert f"{model} (not downloaded yet)" in result.stdout
    assert "train.parquet: no such file (data.train_files); `srl data prepare" in result.stdout


@pytest.mark.usefixtures("quick")
def test_run_without_the_questions_says_how_they_are_made():
    base = str(Path(PRESETS) / "base")
    result = CliRunner().invoke(app, ["--preset", "search-r1-v0.2", "--model", base])
    assert "data/nq_hotpotqa_train/train.parquet: no such file (data.train_files)" in str(result.exception)
