"""Checkpoints as verl writes them: `python verl_shards.py MODEL OUT`, two processes, no GPU and no Ray.

`MODEL` is a model directory. Under `OUT` come `fsdp2`, `fsdp`, `copies` (each process holds all of it),
`adapter` (LoRA), and as oracles `merged` (of `fsdp2`, by verl's own tool) and `adapter.safetensors`
(the adapter's weights merged by peft).
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

WORLD = 2


def work(rank: int, source: str, out: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=WORLD)
    line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    copies = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("ddp", "fsdp"))
    save(divided(load(source), line), source, out / "fsdp2")
    save(flat(load(source), line), source, out / "fsdp")
    save(divided(load(source).bfloat16(), copies), source, out / "copies")
    adapted = with_adapter(load(source))
    if rank == 0:
        keep_merged(adapted, out / "adapter.safetensors")
    save(divided(adapted, line), source, out / "adapter")
    dist.barrier()
    dist.destroy_process_group()


def load(source: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype="float32")


def divided(model: Any, mesh: Any) -> Any:
    """By FSDP2, layer for layer, as verl divides it."""
    from torch.distributed.fsdp import fully_shard

    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in plain.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def flat(model: Any, mesh: Any) -> Any:
    """By the first FSDP."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))


def with_adapter(model: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=12, target_modules="all-linear", init_lora_weights=False
    )
    return get_peft_model(model, config)


def keep_merged(adapted: Any, file: Path) -> None:
    from safetensors.torch import save_file

    state = copy.deepcopy(adapted).merge_and_unload().state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, file)


def save(model: Any, source: str, folder: Path) -> None:
    """Through verl's own checkpoint manager, with the optimiser and the tokenizer beside the weights."""
    import torch
    from transformers import AutoTokenizer
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    steady = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1.0)
    words = AutoTokenizer.from_pretrained(source)
    FSDPCheckpointManager(model, optimiser, steady, words).save_checkpoint(str(folder), global_step=1)


def merge(folder: Path, out: Path) -> None:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    described = str(folder / "huggingface")
    config = ModelMergerConfig(
        operation="merge", backend="fsdp", local_dir=str(folder), target_dir=str(out),
        hf_model_config_path=described,
    )  # fmt: skip
    FSDPModelMerger(config).merge_and_save()


def main(source: str, out: Path) -> None:
    import torch

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    torch.multiprocessing.spawn(work, args=(source, out), nprocs=WORLD)
    merge(out / "fsdp2", out / "merged")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
