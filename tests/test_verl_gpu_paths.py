"""What a run on verl does on a GPU and on no CPU: the composed configuration, sleep and wake, the buckets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.training import config
from tests.verl_configs import BASE, GPU, job, made

from srl.config import load_config, save_config
from srl.train.verl.config_check import compose

pytestmark = [pytest.mark.slow, pytest.mark.must_run, pytest.mark.timeout(600)]
pytest.importorskip("verl")

PRESETS = sorted(path.stem for path in BASE.parent.glob("*.yaml"))
NOT_ON_VERL = ("no-mask",)
SECTIONS = ("model", "actor", "ref", "rollout", "rollout.checkpoint_engine")
"""What the worker makes objects of, in `actor_rollout_ref`."""


@pytest.mark.parametrize(
    ("preset", "rank", "engine"),
    [
        *((name, 0, "vllm") for name in PRESETS if name not in NOT_ON_VERL),
        ("tiny", 16, "vllm"),
        ("tiny", 16, "sglang"),
        ("tiny", 0, "sglang"),
    ],
)
def test_verl_makes_its_objects_of_every_preset_as_on_gpus(preset, rank, engine):
    from omegaconf import OmegaConf, open_dict
    from verl.utils.config import omega_conf_to_dataclass

    sets = [f"cluster.rollout={engine}", f"model.lora_rank={rank}", f"model.path={BASE}",
            "cluster.address=auto"]  # fmt: skip
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


@pytest.fixture(scope="module", params=[0, 8], ids=["weights", "adapter"])
def steps(request, tmp_path_factory):
    """What vLLM is asked in three steps on a GPU, and what arrives; in the third it loses the weights."""
    folder: Path = tmp_path_factory.mktemp("steps")
    given = {"model.path": str(BASE), "model.lora_rank": request.param, "cluster.rollout": "vllm",
             "trainer.total_training_steps": 3, "trainer.test_freq": 1}  # fmt: skip
    save_config(folder, config(folder, "grpo", **given))
    names = {"SRL_VERL_RUN": str(folder), "RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "VERL_PLATFORM": "cpu",
             "VERL_USE_EXTERNAL_PLUGINS": "none"}  # fmt: skip
    program = Path(__file__).with_name("verl_gpu_steps.py")
    said = subprocess.run(
        [sys.executable, "-W", "ignore", program, folder], env=os.environ | names, cwd=folder,
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    return bool(request.param), json.loads((folder / "answer.json").read_text())


def test_weights_come_before_the_cache_and_no_turn_while_the_engine_sleeps(steps):
    """And the run ends where vLLM does not hold what was sent: nothing is sampled after it."""
    lora, answer = steps
    turns = "generate with the adapter" if lora else "generate"
    new = [f"sleep {1 if lora else 2}", "wake weights", "update", "check", "wake kv_cache", turns]
    assert answer["story"] == 3 * new + new[:4]
    assert "o_proj" in answer["lost"]


def test_weights_arrive_whole_across_the_bounds_of_buckets(steps):
    """The buckets hold 2^18 numbers of four bytes; the trainer fills every weight with its step."""
    _, answer = steps
    bucket = 2**18
    sizes = {
        "first": (200_000, "float32"), "fills the bucket": (bucket - 200_000, "float32"),
        "odd": (3, "bfloat16"), "aligned": (5, "float32"), "a bucket": (bucket, "float32"),
        "half a bucket": (bucket, "bfloat16"), "another half": (bucket, "bfloat16"), "last": (1, "float32"),
    }  # fmt: skip
    assert answer["got"] == [[name, size, f"torch.{dtype}", [3.0]] for name, (size, dtype) in sizes.items()]


def test_bucket_of_shared_memory_holds_the_largest_weight(steps, tmp_path):
    """verl ends a run at a weight that is larger, unless a GPU can hand it over by itself."""
    assert steps[1]["too_large"], "verl sends larger ones now: our size of a bucket can go"
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864})
    )
    composed = compose(made("cluster.rollout=vllm", f"model.path={tmp_path}"), job())
    bucket = composed.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
    assert 151_936 * 896 * 4 <= bucket * 2**20 < 1.01 * 151_936 * 896 * 4
