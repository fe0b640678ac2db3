"""What verl does before and after each of our patches: `python verl_probe.py FOLDER`, a process of its own.

The patches are applied one after the other, and each has a probe that runs before and after it. FOLDER
holds a run: `model` with a dropout rate, `config.yaml` with a warm-up, and room for `answer.json`.
Not imported by a test, since verl brings a package `tests` that hides ours.
"""

import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

LR = 0.1
LENGTHS = ((5, 6), (7, 9), (4, 3), (6, 8))
"""Prompt and response of each row."""


def worker(
    folder: Path, kind: str = "language_model", forward_only: bool = False, dropout: bool = False
) -> Any:
    """verl's worker for one network, initialised; the model has dropout only if `dropout` is true."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    from srl.train.verl.job import model_config
    from srl.train.verl.translate import without_dropout

    changed = {} if dropout else without_dropout(model_config(str(folder / "model")))
    single = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineConfig(
        strategy="fsdp2", mixed_precision=single, use_torch_compile=False, forward_only=forward_only,
        use_dynamic_bsz=True, max_token_len_per_gpu=64, infer_max_token_len_per_gpu=64,
    )  # fmt: skip
    optimiser = FSDPOptimizerConfig(lr=LR, lr_warmup_steps=2, total_training_steps=10)
    model = HFModelConfig(
        path=str(folder / "model"), load_tokenizer=False, use_remove_padding=False,
        override_config={"attn_implementation": "sdpa", **changed},
    )  # fmt: skip
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type=kind, model_config=model, engine_config=engine, checkpoint_config=CheckpointConfig(),
            optimizer_config=None if forward_only else optimiser,
        )
    )  # fmt: skip
    made.reset()
    return made


def batch(counted: int) -> Any:
    """Four rows, of which the first `counted` have tokens that count."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 40, (sum(lengths),), generator=generator) for lengths in LENGTHS]
    answers = [torch.ones(length, dtype=torch.long) * (n < counted) for n, (_, length) in enumerate(LENGTHS)]
    numbers = [torch.ones(length) for _, length in LENGTHS]
    columns = {
        "input_ids": ids, "position_ids": [torch.arange(len(row)) for row in ids],
        "prompts": [row[:start] for row, (start, _) in zip(ids, LENGTHS, strict=True)],
        "responses": [row[start:] for row, (start, _) in zip(ids, LENGTHS, strict=True)],
        "response_mask": answers, "loss_mask": answers, "advantages": numbers,
        "old_log_probs": [-3 * row for row in numbers],
    }  # fmt: skip
    nested = {
        name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()
    }
    data = TensorDict(nested, batch_size=len(LENGTHS))
    tensordict_utils.assign_non_tensor(
        data, temperature=1.0, calculate_entropy=False, global_batch_size=4, mini_batch_size=4, epochs=1,
        seed=1, dataloader_kwargs={"shuffle": False}, global_token_num=[len(row) for row in ids],
    )  # fmt: skip
    return data


def use_loss(made: Any, mode: str) -> None:
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    config = FSDPActorConfig(
        rollout_n=1,
        strategy="fsdp2",
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
    )
    made.set_loss_fn(partial(ppo_loss, config=config))


def critic_head_starts_at_zero(folder: Path) -> float:
    """The largest number in the critic's head."""
    from transformers import AutoConfig
    from verl.utils import model

    config = AutoConfig.from_pretrained(folder / "model", attn_implementation="sdpa", num_labels=1)
    critic = model.load_valuehead_model(folder / "model", torch.float32, config, False)
    return float(critic.score.weight.abs().max())


def trl_is_not_used(folder: Path) -> str:
    """The class that verl made of the model."""
    return type(worker(folder).engine.module).__name__


def dropout(folder: Path, ours: bool = False) -> list[float]:
    """All dropout rates of policy and critic in training; `ours` is as a run configures the model."""
    kinds = ("language_model", "value_model")
    networks = [worker(folder, kind, dropout=not ours).engine.module.train() for kind in kinds]
    rates = {float(network.model.layers[0].self_attn.attention_dropout) for network in networks}
    parts = [part for network in networks for part in network.modules()]
    return sorted(rates | {float(part.p) for part in parts if isinstance(part, torch.nn.Dropout)})


def local_learning_rate(folder: Path) -> list[float]:
    """The learning rates of the first four updates, in units of that after the warm-up."""
    made, found = worker(folder), []
    use_loss(made, "token-mean")
    made.engine.optimizer.register_step_pre_hook(lambda one, *_: found.append(one.param_groups[0]["lr"] / LR))
    for _ in range(4):
        made.train_mini_batch(batch(4))
    return found


def sequence_means_skip_masked_rows(folder: Path) -> float:
    """The loss of three rows that are in, by the loss of the same three where no other is in the batch."""
    from verl.utils import tensordict_utils

    made = worker(folder)
    use_loss(made, "seq-mean-token-mean")
    whole, three = batch(3), tensordict_utils.index_select_tensor_dict(batch(3), torch.arange(3))
    losses = []
    for data, size in ((whole, 4), (three, 3)):
        tensordict_utils.assign_non_tensor(data, global_batch_size=size, mini_batch_size=size)
        made.engine.optimizer_step = lambda: 0.0
        losses.append(float(made.train_mini_batch(data)["metrics"]["loss"][0]))
    return losses[0] / losses[1]


def empty_mini_batch_is_skipped(folder: Path) -> dict[str, bool]:
    """Whether a mini-batch of failed rows moves the weights or gives a number that is none."""
    found = {}
    for mode in ("token-mean", "seq-mean-token-mean"):
        made = worker(folder)
        use_loss(made, mode)
        for _ in range(2):
            made.train_mini_batch(batch(4))
        before = weights(made)
        metrics = made.train_mini_batch(batch(0))["metrics"]
        numbers = [float(value) for values in metrics.values() for value in values]
        found[mode] = not all(map(math.isfinite, numbers)) or bool((weights(made) - before).any())
    return found


def weights(made: Any) -> torch.Tensor:
    return torch.cat([weight.full_tensor().detach().flatten() for weight in made.engine.module.parameters()])


def process_group_has_one_backend(folder: Path) -> str:
    """The backend of the process group."""
    from verl.utils.distributed import initialize_global_process_group_ray

    initialize_global_process_group_ray()
    return str(torch.distributed.get_backend())


def reference_is_not_offloaded(folder: Path) -> int:
    """How many of the reference's tensors are where no forward pass can use them."""
    made = worker(folder, forward_only=True)
    return sum(weight.device.type != "cpu" for weight in made.engine.module.parameters())


def tried(probe: Any, folder: Path) -> Any:
    """What the probe finds, or the error that it ends with."""
    try:
        return probe(folder)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def platform_of(folder: Path) -> list[str]:
    """The device of verl's platform, and the engines that it has for it."""
    from verl.plugin.platform import get_platform
    from verl.workers.engine.base import EngineRegistry

    name = get_platform().device_name
    kinds = ("language_model", "value_model")
    return [name, *[EngineRegistry.get_engine_cls(kind, "fsdp2").__name__ for kind in kinds]]


def main(folder: Path) -> None:
    from srl.train.verl import patches
    from srl.train.verl import without_gpu as more

    answer = {}
    answer["platform"] = [tried(platform_of, folder), (more.install(), tried(platform_of, folder))[1]]
    known = {patch.name: patch for patch in (*patches.PATCHES, *more.PATCHES)}
    first = ["process_group_has_one_backend", "trl_is_not_used"]
    for name in dict.fromkeys([*first, *known]):
        probe = globals()[name]
        before = tried(probe, folder)
        known[name].apply()
        answer[name] = [before, tried(probe, folder)]
    answer["dropout"] = [tried(dropout, folder), tried(partial(dropout, ours=True), folder)]
    answer["again"] = idempotent(patches, more)
    (folder / "answer.json").write_text(json.dumps(answer, indent=1))


def idempotent(patches: Any, more: Any) -> bool:
    """Whether a second time changes nothing."""
    from verl.workers.engine import fsdp
    from verl.workers.engine.base import BaseEngine

    def state() -> tuple[Any, ...]:
        names = ("_build_lr_scheduler", "lr_scheduler_step")
        return BaseEngine.train_batch, *(getattr(fsdp.FSDPEngine, name) for name in names)

    before = state()
    more.install()
    patches.apply(cpu=True)
    return state() == before


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    main(Path(sys.argv[1]))
