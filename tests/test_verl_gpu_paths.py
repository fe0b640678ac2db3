"""What a run on verl is told on a GPU and on no CPU: the objects that verl makes of the configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.verl_configs import BASE, GPU, job, made

from srl.config import load_config
from srl.train.verl.config_check import compose

pytestmark = [pytest.mark.slow, pytest.mark.must_run]
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


def test_bucket_of_shared_memory_holds_the_largest_weight(tmp_path):
    """verl ends a run at a weight that is larger, unless a GPU can hand it over by itself."""
    sizes = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    composed = compose(made("cluster.rollout=vllm", f"model.path={tmp_path}"), job())
    bucket = composed.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
    assert 151_936 * 896 * 4 <= bucket * 2**20 < 1.01 * 151_936 * 896 * 4
