"""What verl does otherwise than a run of ours needs, changed in place: a function for each change.

Each says which lines of verl it is about, what goes wrong there, and where it is needed. A test shows
the symptom without the patch, so it fails when verl has caught up and the patch can go. `apply` runs
once in every process that trains, before verl's workers are imported. All of them may run twice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from srl.config import load_saved
from srl.errors import UserError
from srl.train.verl.job import RUN_VARIABLE
from srl.train.verl.schedule import Schedule, our_schedule
from srl.update.forward import disable_dropout

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PretrainedConfig, PreTrainedModel

TESTED = ("0.9.1",)
"""Versions of verl whose lines the patches were written against."""
UNTESTED_VARIABLE = "SRL_VERL_UNTESTED"
PATCHED = "_srl_patch"
"""The attribute that marks a function of ours in verl's place."""


def apply(cpu: bool) -> tuple[str, ...]:
    """Applies the patches that this verl needs, on a machine with or without an accelerator; their names."""
    check_version()
    wanted = EVERYWHERE + (WITHOUT_ACCELERATOR if cpu else ())
    for patch in wanted:
        patch()
    return tuple(patch.__name__ for patch in wanted)


def check_version() -> None:
    """A verl that the patches were not tested with is refused, unless the user says to go on."""
    import verl

    if verl.__version__ not in TESTED and os.environ.get(UNTESTED_VARIABLE) != "1":
        raise UserError(
            f"verl {verl.__version__} is installed, and --backend verl was tested with "
            f"{', '.join(TESTED)}; type: pip install verl=={TESTED[-1]}, or set {UNTESTED_VARIABLE}=1 to try"
        )


def critic_is_a_trunk_with_a_zero_head() -> None:
    """verl/utils/model.py, `load_valuehead_model`: needed everywhere.

    It asks for flash-attention 2 whatever the configuration says. Where that is missing it looks for
    trl and raises "not a value head model". Where it is there, the head starts at random numbers.
    """
    from verl.utils import model

    _replace(model, "load_valuehead_model", load_critic)


def load_critic(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """The trunk saved at `local_path` under a value head: zeros, unless a head is saved there too.

    A new head has no bias, as in `srl.update.critic.Critic`. The configuration's own attention
    implementation stands.
    """
    from transformers import AutoModelForTokenClassification

    try:
        critic, report = AutoModelForTokenClassification.from_pretrained(
            local_path, config=model_config, dtype=torch_dtype, trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(
            f"no critic can be made of {local_path}: transformers has no token classification for "
            f"{model_config.model_type!r}; choose an algorithm without a critic, or another model"
        ) from error
    name, head = value_head(critic)
    if f"{name}.weight" in report["missing_keys"]:
        nn.init.zeros_(head.weight)
    if f"{name}.bias" in report["missing_keys"]:
        head.register_parameter("bias", None)
    return critic


def value_head(critic: nn.Module) -> tuple[str, nn.Linear]:
    """The layer outside the trunk that makes one number a token, and its name."""
    for name, module in critic.named_children():
        if isinstance(module, nn.Linear) and module.out_features == 1:
            return name, module
    raise UserError(f"{type(critic).__name__} has no layer that gives one value a token")


def trl_is_left_alone() -> None:
    """verl/models/transformers/monkey_patch.py, `apply_monkey_patch`: needed everywhere.

    Where trl is installed, verl changes its model with a value head, which no run of ours uses. trl has
    moved that class since, and every engine ends with "cannot import name".
    """
    from verl.utils import import_utils

    _replace(import_utils, "is_trl_available", no_trl)


def no_trl() -> bool:
    """No model of trl's is in use."""
    return False


def networks_have_no_dropout() -> None:
    """verl/workers/engine/fsdp/transformer_impl.py, `FSDPEngine._build_module`: needed everywhere.

    A policy whose configuration names a dropout rate is updated with it, while its old log-probs are
    computed without: the first ratio is not 1.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    original = FSDPEngine._build_module
    if getattr(original, PATCHED, False):
        return

    def build_module(self: Any) -> nn.Module:
        module: nn.Module = original(self)
        disable_dropout(module)
        return module

    setattr(build_module, PATCHED, True)
    _put(FSDPEngine, "_build_module", build_module)


def learning_rate_is_ours() -> None:
    """verl/workers/engine/fsdp/transformer_impl.py, `FSDPEngine._build_lr_scheduler`: needed everywhere.

    verl warms up from 0, so that the first training step learns nothing, moves the rate once a training
    step and knows no linear decay. Outside a run of ours, nothing is changed.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    build, step = FSDPEngine._build_lr_scheduler, FSDPEngine.lr_scheduler_step
    if getattr(build, PATCHED, False):
        return

    def build_lr_scheduler(self: Any, optimizer: torch.optim.Optimizer) -> Any:
        run = os.environ.get(RUN_VARIABLE)
        ours = our_schedule(load_saved(Path(run)), self, optimizer) if run else None
        return build(self, optimizer) if ours is None else ours

    def lr_scheduler_step(self: Any) -> float:
        return self.lr_scheduler.used if isinstance(self.lr_scheduler, Schedule) else step(self)

    setattr(build_lr_scheduler, PATCHED, True)
    _put(FSDPEngine, "_build_lr_scheduler", build_lr_scheduler)
    _put(FSDPEngine, "lr_scheduler_step", lr_scheduler_step)


def sequence_means_count_rows_that_are_in() -> None:
    """verl/trainer/ppo/core_algos.py, `agg_loss`: needed everywhere.

    The `seq-mean-*` modes divide by the configured size of the mini-batch. Rows whose search failed
    and rows that only fill up the batch are in that number, and shrink the loss of all others.
    """

    def count(engine: Any, data: TensorDict, loss_function: Callable[..., Any], *, original: Any) -> Any:
        from verl.utils import tensordict_utils

        tensordict_utils.assign_non_tensor(data, global_batch_size=max(_rows_that_are_in(engine, data), 1))
        return original(engine, data, loss_function)

    _wrap_train_batch("sequence_means_count_rows_that_are_in", count)


def mini_batch_without_tokens_teaches_nothing() -> None:
    """verl/workers/engine/base.py, `BaseEngine.train_batch`: needed everywhere.

    A mini-batch whose searches all failed has no token to divide by: `token-mean` gives NaN, and the
    other modes a gradient of zeros, with which AdamW still moves the weights by momentum and decay.
    """

    def skip(engine: Any, data: TensorDict, loss_function: Callable[..., Any], *, original: Any) -> Any:
        if _rows_that_are_in(engine, data):
            return original(engine, data, loss_function)
        return {"model_output": {}, "loss": [0.0], "metrics": {"grad_norm": 0.0}}

    _wrap_train_batch("mini_batch_without_tokens_teaches_nothing", skip)


def _rows_that_are_in(engine: Any, data: TensorDict) -> int:
    """Rows of all workers' mini-batch with a token that counts, by the mask that verl counts tokens with."""
    from verl.utils.device import get_device_id

    rows = sum(bool((row != 0).any()) for row in data["loss_mask"].unbind())
    count = torch.tensor(rows, device=get_device_id())
    torch.distributed.all_reduce(count, group=engine.get_data_parallel_group())
    return int(count)


def _wrap_train_batch(name: str, around: Callable[..., Any]) -> None:
    """Puts `around` before the update of one mini-batch, in every engine, once."""
    from verl.workers.engine.base import BaseEngine

    original = BaseEngine.train_batch
    if name in getattr(original, PATCHED, ()):
        return

    def train_batch(self: Any, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        return around(self, data, loss_function, original=original)

    setattr(train_batch, PATCHED, (*getattr(original, PATCHED, ()), name))
    _put(BaseEngine, "train_batch", train_batch)


def process_group_names_a_device_once() -> None:
    """verl/utils/distributed.py, `initialize_global_process_group_ray`: needed without an accelerator.

    It joins a backend for the CPU with one for the device. Where they are the same device torch
    refuses the doubled name: "Duplicate device type cpu in backend string".
    """
    from verl.utils import distributed

    _replace(distributed, "initialize_global_process_group_ray", join_process_group)


def join_process_group(timeout_second: float | None = None, backend: str | None = None) -> None:
    """The process group of a run without an accelerator, over gloo; nothing where there is one."""
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        backend=backend or "cpu:gloo",
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        timeout=None if timeout_second is None else timedelta(seconds=timeout_second),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )


def reference_stays_in_ordinary_memory() -> None:
    """verl/workers/engine/fsdp/transformer_impl.py, `_build_fsdp_module`: needed without an accelerator.

    The reference of FSDP2 is offloaded to pinned memory. There is nothing to offload from, and pinning
    raises "Cannot access accelerator device when none is available".
    """
    from verl.workers.engine.fsdp import transformer_impl

    _put(transformer_impl, "CPUOffloadPolicy", no_offload)


def no_offload(pin_memory: bool = True) -> None:
    """The policy of weights that stay where they are."""


def _put(owner: Any, name: str, ours: Any) -> None:
    """`ours` in place of what verl has there."""
    setattr(owner, name, ours)


def _replace(module: Any, name: str, ours: Callable[..., Any]) -> None:
    """`ours` for verl's function, also in those of verl's modules that imported it by name."""
    theirs = getattr(module, name)
    loaded = [known for path, known in list(sys.modules.items()) if path.split(".")[0] == "verl"]
    for known in loaded:
        if vars(known).get(name) is theirs:
            setattr(known, name, ours)


EVERYWHERE: tuple[Callable[[], None], ...] = (
    critic_is_a_trunk_with_a_zero_head,
    trl_is_left_alone,
    networks_have_no_dropout,
    learning_rate_is_ours,
    sequence_means_count_rows_that_are_in,
    mini_batch_without_tokens_teaches_nothing,
)
WITHOUT_ACCELERATOR: tuple[Callable[[], None], ...] = (
    process_group_names_a_device_once,
    reference_stays_in_ordinary_memory,
)
