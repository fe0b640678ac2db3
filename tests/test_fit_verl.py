"""What a run on verl takes, by what is counted: bytes by hand, and verl's own code measured."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.training import Said
from tests.training import config as small
from tests.verl_configs import job, made
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from srl.config import Config, load_config
from srl.errors import UserError
from srl.train.dry_run import planned_job
from srl.train.fit import (
    SERVER,
    VERL_LOGIT,
    Generation,
    Layout,
    Part,
    checkpoint_bytes,
    footprint,
    generation,
    logits_bytes,
    machine_memory,
    pass_parts,
    pass_tokens,
    total,
)
from srl.train.model_size import Shape, shape_of
from srl.train.verl import launch
from srl.train.verl.config_check import compose
from srl.workspace import Workspace

QWEN_7B = 7_615_616_512
EIGHT = Layout("fsdp", workers=8)
VOCABULARY = 20_000


def seven_b(*given: str, critic: bool = True) -> tuple[Config, Shape]:
    config = made("model.path=Qwen/Qwen2.5-7B", "model.dtype=bfloat16", "model.device=cpu", *given)
    return config, shape_of(config, "Qwen/Qwen2.5-7B", needs_critic=critic)


def bytes_of(memory: list[Part], name: str) -> tuple[int, int]:
    found = [part for part in memory if part.name == name]
    return sum(part.rollout for part in found), sum(part.update for part in found)


def test_training_state_is_shared_among_the_workers_in_float32():
    config, shape = seven_b()
    memory = footprint(shape, config, EIGHT)
    assert shape.parameters == QWEN_7B
    assert bytes_of(memory, "policy weights") == (QWEN_7B * 4 // 8, QWEN_7B * 4 // 8)
    assert bytes_of(memory, "policy optimiser") == (QWEN_7B * 8 // 8, QWEN_7B * 8 // 8)
    assert bytes_of(memory, "critic weights")[1] == -(-shape.critic * 4 // 8)
    assert bytes_of(memory, "gradients") == (0, QWEN_7B * 4 // 8)


def test_twice_the_workers_hold_half_each():
    config, shape = seven_b()
    sixteen = Layout("fsdp", workers=16, nodes=2)
    few, many = footprint(shape, config, EIGHT), footprint(shape, config, sixteen)
    assert bytes_of(many, "policy optimiser")[1] == bytes_of(few, "policy optimiser")[1] // 2


def test_states_are_shared_within_the_group_that_fsdp_shards_over():
    config, shape = seven_b()
    groups = footprint(shape, config, Layout("fsdp", workers=16, shard_group=8))
    for name in ("policy weights", "policy optimiser", "gradients"):
        assert bytes_of(groups, name) == bytes_of(footprint(shape, config, EIGHT), name)


def test_offload_frees_the_gpu_while_the_policy_generates_and_only_then():
    config, shape = seven_b("cluster.param_offload=true", "cluster.optimizer_offload=true")
    freed = footprint(shape, config, EIGHT)
    kept = footprint(shape, seven_b()[0], EIGHT)
    assert total(freed, "rollout") == 0
    assert total(freed, "update") == total(kept, "update")
    machine = {part.name: part.update for part in machine_memory(shape, config, EIGHT)}
    assert machine["offloaded weights"] == (QWEN_7B + shape.critic) * 4
    assert machine["offloaded optimiser"] == (QWEN_7B + shape.critic) * 8


def test_adapter_alone_has_gradients_and_moments():
    config, shape = seven_b("model.lora_rank=8", "algorithm.name=grpo", critic=False)
    memory = footprint(shape, config, EIGHT)
    assert bytes_of(memory, "policy optimiser")[1] == -(-shape.adapter * 8 // 8)
    assert bytes_of(memory, "policy weights")[1] == QWEN_7B * 4 // 8
    assert bytes_of(memory, "adapter weights")[1] == -(-shape.adapter * 4 // 8)


@pytest.mark.parametrize(("engine", "rank", "held"), [("vllm", 8, 8), ("vllm", 0, 0), ("sglang", 8, 0)])
def test_weights_under_an_adapter_lie_in_the_machines_memory_while_vllm_sleeps(engine, rank, held):
    config, shape = seven_b(f"model.lora_rank={rank}", f"cluster.rollout={engine}", critic=False)
    parts = [part for part in machine_memory(shape, config, EIGHT) if part.name == "sleeping weights"]
    assert sum(part.rollout for part in parts) == 0
    assert sum(part.update for part in parts) == held * QWEN_7B * 2


def test_reference_lies_in_the_machines_memory_not_on_the_gpus():
    config, shape = seven_b("algorithm.use_kl_in_reward=true")
    assert shape.reference == QWEN_7B
    assert not [part for part in footprint(shape, config, EIGHT) if "reference" in part.name]
    on_two = {
        part.name: part.update for part in machine_memory(shape, config, Layout("fsdp", workers=16, nodes=2))
    }
    assert on_two["reference weights"] == QWEN_7B * 4 // 2


def test_all_workers_read_a_model_whose_head_is_its_embedding():
    tied = made("model.path=Qwen/Qwen2.5-3B", "model.dtype=bfloat16", "model.device=cpu")
    small = shape_of(tied, "Qwen/Qwen2.5-3B", needs_critic=False)
    config, large = seven_b(critic=False)
    read = {part.name: part.rollout for part in machine_memory(small, tied, EIGHT)}["loading"]
    assert read == 8 * small.parameters * 4
    assert {part.name: part.rollout for part in machine_memory(large, config, EIGHT)}[
        "loading"
    ] == QWEN_7B * 4


def test_checkpoint_has_weights_and_moments_of_both_networks():
    _, shape = seven_b()
    assert checkpoint_bytes(shape, EIGHT) == (QWEN_7B + shape.critic) * (4 + 8)


def test_pass_has_no_more_tokens_than_a_workers_rows():
    lengths = ("data.max_prompt_length=100", "data.max_response_length=100")
    small = made("actor.ppo_mini_batch_size=16", "rollout.n=2", "actor.ppo_max_token_len=9000", *lengths)
    assert pass_tokens(small, EIGHT, small.actor) == 16 * 2 // 8 * 200
    limited = made("actor.ppo_mini_batch_size=64", "rollout.n=8", "actor.ppo_max_token_len=9000", *lengths)
    assert pass_tokens(limited, EIGHT, limited.actor) == 9000


@pytest.mark.parametrize("layout", [EIGHT, Layout("local")], ids=["verl", "local"])
def test_update_counts_the_network_whose_pass_takes_more(layout):
    """A critic with a longer pass than the policy's, whose logits it lacks, may still take more."""
    config, shape = seven_b(
        "critic.ppo_max_token_len=900000", "critic.ppo_mini_batch_size=512", "data.train_batch_size=512",
        "actor.ppo_max_token_len=1000", "model.gradient_checkpointing=true",
    )  # fmt: skip
    tokens = pass_tokens(config, layout, config.critic)
    assert tokens > 10 * pass_tokens(config, layout, config.actor)
    found = bytes_of(footprint(shape, config, layout), "activations")[1]
    assert found == bytes_of(pass_parts(shape, config, layout, config.critic), "activations")[1]


def test_generation_holds_as_many_whole_episodes_as_its_keys_and_values_allow():
    making = Generation(weights=100, token=2, own=50)
    assert making.episodes(250, tokens=10) == 5
    assert making.episodes(100, tokens=10) == 0
    config, shape = seven_b(critic=False)
    found = generation(shape, config, EIGHT)
    assert found.weights == QWEN_7B * 2
    assert found.token == 2 * 28 * 4 * 128 * 2
    assert found.own >= SERVER


def test_copy_on_several_gpus_has_its_part_on_each_and_a_key_head_at_least():
    config, shape = seven_b(critic=False)
    on_two = generation(shape, config, Layout("fsdp", workers=8, copy_gpus=2))
    assert (on_two.weights, on_two.token) == (QWEN_7B, 2 * 28 * 2 * 128 * 2)
    assert generation(shape, config, Layout("fsdp", workers=8, copy_gpus=8)).token == 2 * 28 * 1 * 128 * 2


def test_machine_without_a_gpu_holds_every_workers_part_and_the_copies():
    config, shape = seven_b("rollout.max_num_seqs=2", "model.dtype=float32", critic=False)
    memory = footprint(shape, config, Layout("fsdp", workers=2, cpu=True))
    assert bytes_of(memory, "policy weights")[1] == QWEN_7B * 4
    assert bytes_of(memory, "engine weights") == (2 * QWEN_7B * 4, 2 * QWEN_7B * 4)


class AsAutocast(TorchFunctionMode):
    """Casts to float32 where CUDA's autocast does: softmax, log-softmax and sums of bfloat16."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in {"softmax", "log_softmax", "sum", "logsumexp"} and args[0].dtype == torch.bfloat16:
            args = (args[0].float(), *args[1:])
        return function(*args, **(kwargs or {}))


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside lived on at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_nested:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.peak = max(self.peak, sum(self.sizes.values()))
            weakref.finalize(storage, self.sizes.pop, key, None)


def peak_of_logits(dtype: torch.dtype, packed: bool, entropy: bool, temperature: float) -> float:
    """Bytes a logit that verl's own code lives on, from hidden states through the backward pass."""
    import verl.utils.torch_functional as verl_functional
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    rows, length = 4, 60
    ids = [torch.randint(0, VOCABULARY, (length,)) for _ in range(rows)]
    nested = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    batch = TensorDict({"input_ids": nested}, batch_size=rows)
    tensordict_utils.assign_non_tensor(
        batch, use_remove_padding=packed, calculate_entropy=entropy, use_fused_kernels=False
    )
    numbers = SimpleNamespace(
        entropy_checkpointing=False, entropy_from_logits_with_chunking=False, ulysses_sequence_parallel_size=1
    )
    engine = SimpleNamespace(
        engine_config=numbers, compute_entropy_from_logits=verl_functional.entropy_from_logits,
        _gather_and_unpad_packed=lambda tensor, size: tensor,
    )  # fmt: skip
    given = {
        "temperature_is_one": temperature == 1.0, "pad_size": 0,
        "input_ids_rmpad_rolled": torch.roll(nested.values(), -1, 0),
        "temperature_rmpad": torch.full((rows * length,), temperature),
        "temperature": torch.full((rows,), temperature),
    }  # fmt: skip
    shape = (1, rows * length) if packed else (rows, length)
    hidden = torch.randn(*shape, 4, dtype=dtype)
    head = torch.randn(VOCABULARY, 4, dtype=dtype, requires_grad=True)
    with Live() as live, AsAutocast():
        output = SimpleNamespace(logits=hidden @ head.T)
        found: Any = FSDPEngineWithLMHead.prepare_model_outputs(engine, output, given, batch, None)
        del output
        loss = found["log_probs"].values().sum()
        if entropy:
            loss = loss - 0.1 * found["entropy"].values().sum()
        loss.backward()
    return live.peak / (rows * length * VOCABULARY)


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("entropy", [True, False], ids=["entropy", "log-probs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_verls_own_code_take_no_more_than_is_planned(dtype, entropy, packed):
    pytest.importorskip("verl")
    planned = VERL_LOGIT[dtype.itemsize][entropy]
    for temperature in (1.0, 0.7):
        assert peak_of_logits(dtype, packed, entropy, temperature) <= 1.02 * planned


@pytest.mark.slow
@pytest.mark.must_run
@pytest.mark.parametrize(("dtype", "entropy"), [(torch.bfloat16, True), (torch.float32, False)])
def test_bound_of_the_logits_is_tight_where_rows_are_padded(dtype, entropy):
    pytest.importorskip("verl")
    planned = VERL_LOGIT[dtype.itemsize][entropy]
    assert peak_of_logits(dtype, False, entropy, 0.7) > 0.9 * planned


def test_fused_kernels_of_flash_attention_take_less():
    config, shape = seven_b("actor.entropy_coeff=0.001")
    fused = config.with_settings({"model.attn_implementation": "flash_attention_2"})
    assert logits_bytes(shape, fused, EIGHT, 1) == 4 * 2 * shape.vocabulary
    assert logits_bytes(shape, fused, EIGHT, 1) < logits_bytes(shape, config, EIGHT, 1)


def test_every_process_that_opens_the_index_for_itself_is_said_on_one_machine_too(tmp_path):
    said = Said()
    launch.prepare(small(tmp_path, "grpo"), "grpo", Workspace(tmp_path / "ws"), said)
    assert "each process that runs episodes opens the index for itself" in said.text


def test_without_verl_one_line_says_what_to_install(monkeypatch):
    from srl.train.verl import translate

    monkeypatch.setattr(translate, "find_spec", lambda name: None)
    translate._read_defaults.cache_clear()
    with pytest.raises(UserError, match=r"\[verl\]'"):
        compose(load_config("tiny").config, job())


def test_plan_is_for_gpus_where_the_configuration_counts_them():
    assert planned_job(made("cluster.n_gpus_per_node=8")).gpus_per_node == 8
    assert planned_job(made("cluster.n_gpus_per_node=8")).cpu is False
    assert planned_job(made("cluster.address=auto")).cpu is False
    assert planned_job(made("cluster.n_gpus_per_node=3", "model.device=cpu")).cpu is True
