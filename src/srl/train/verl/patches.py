"""Changes of verl in place, and a table of what breaks without each: `PATCHES`.

docs/verl-patches.md is written from the tables here and in `without_gpu.py`. `apply` runs once in a process
that trains, before verl's workers are imported; all of `PATCHES` may be applied twice.
tests/test_verl_patches.py shows the symptom of each without the patch: a failure there means that verl has
fixed it. `SCOPED_PATCHES` are changes that other modules make for the time of a call, or to a single object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from srl.config import Config
from srl.errors import UserError
from srl.train.learning_rate import Network, rate_factor
from srl.train.verl.job import RUN_VARIABLE, device_support, this_config
from srl.update.optimiser import at_its_step

if TYPE_CHECKING:
    from tensordict import TensorDict
    from transformers import PretrainedConfig, PreTrainedModel

TESTED = ("0.9.1",)
"""Versions of verl that the patches were written against."""
UNTESTED_VARIABLE = "SRL_VERL_UNTESTED"
PATCHED = "_srl_patch"
"""The attribute that marks a function of ours in verl's place."""
LOOKED_AT = "0.10.0.dev of 2026-08-22"
"""The newest verl whose source was read to fill in `Patch.fixed_in`."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A change of verl: the function that makes it, the place in verl, and what breaks without it."""

    apply: Any
    """The function; or its name below `srl.train.verl`, where it makes the change for the time of a call."""
    where: str
    without: str
    fixed_in: str = "none so far"
    """The first release of verl that does not need it."""

    @property
    def name(self) -> str:
        return self.apply if isinstance(self.apply, str) else str(self.apply.__name__)


def apply(cpu: bool) -> None:
    """Apply the patches for a machine with a GPU, or without one."""
    check_version()
    support = device_support(cpu)
    for patch in (*PATCHES, *(support.PATCHES if support else ())):
        patch.apply()


def check_version() -> None:
    """Raises UserError for a verl that the patches were not tested with, unless a variable allows it."""
    import verl

    if verl.__version__ not in TESTED and os.environ.get(UNTESTED_VARIABLE) != "1":
        raise UserError(
            f"verl {verl.__version__} is installed, and --backend verl was tested with "
            f"{', '.join(TESTED)}; type: pip install verl=={TESTED[-1]}, or set {UNTESTED_VARIABLE}=1 to try"
        )


def critic_head_starts_at_zero() -> None:
    """Load the critic with the configured attention, under a value head of zeros."""
    from verl.utils import model

    replace(model, "load_valuehead_model", load_critic)


def load_critic(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """The network saved at `local_path` with a value head: zeros, unless a head is saved there too.

    A new head has no bias, as in `srl.update.critic.Critic`. The attention implementation is the
    configuration's. Raises UserError if transformers cannot make one of this kind of model.
    """
    from transformers import AutoModelForTokenClassification

    try:
        critic, report = AutoModelForTokenClassification.from_pretrained(
            local_path, config=model_config, dtype=torch_dtype, trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(
            f"{local_path} cannot be a critic: transformers has no token classification for "
            f"{model_config.model_type!r}; choose an algorithm without a critic, or another model"
        ) from error
    name, head = value_head(critic)
    if f"{name}.weight" in report["missing_keys"]:
        nn.init.zeros_(head.weight)
    if f"{name}.bias" in report["missing_keys"]:
        head.register_parameter("bias", None)
    return critic


def value_head(critic: nn.Module) -> tuple[str, nn.Linear]:
    """The layer that gives one value per token, and its name."""
    for name, module in critic.named_children():
        if isinstance(module, nn.Linear) and module.out_features == 1:
            return name, module
    raise UserError(f"{type(critic).__name__} has no layer that gives one value per token")


def trl_is_not_used() -> None:
    """Have verl find no trl, whose model with a value head no run of ours uses."""
    from verl.utils import import_utils

    replace(import_utils, "is_trl_available", lambda: False)


def local_learning_rate() -> None:
    """Use the schedule of local training. Outside a run of ours nothing changes."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    build, step = FSDPEngine._build_lr_scheduler, FSDPEngine.lr_scheduler_step
    if getattr(build, PATCHED, False):
        return

    def build_lr_scheduler(self: Any, optimizer: Optimizer) -> Any:
        if RUN_VARIABLE in os.environ:
            return our_schedule(this_config(), self, optimizer)
        return build(self, optimizer)

    def lr_scheduler_step(self: Any) -> float:
        return self.lr_scheduler.used if isinstance(self.lr_scheduler, Schedule) else step(self)

    setattr(build_lr_scheduler, PATCHED, True)
    put(FSDPEngine, "_build_lr_scheduler", build_lr_scheduler)
    put(FSDPEngine, "lr_scheduler_step", lr_scheduler_step)


class Schedule(LambdaLR):
    """Moves with each step of its optimiser, and with nothing else. `used` is the rate of the last step."""

    def __init__(self, optimiser: Optimizer, factor: Any) -> None:
        super().__init__(optimiser, factor)
        self.used = float(self.get_last_lr()[0])
        optimiser.register_step_post_hook(self._follow)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved step, at the rate of this schedule, which may have another length."""
        super().load_state_dict(state_dict)
        at_its_step(self)
        self.used = float(self.get_last_lr()[0])

    def _follow(self, *_: Any) -> None:
        self.used = float(self.get_last_lr()[0])
        self.step()


def our_schedule(config: Config, engine: Any, optimiser: Optimizer) -> Schedule:
    """The schedule of the local backend for an optimiser of verl's `engine`, which says its length."""
    network: Network = "critic" if engine.model_config.model_type == "value_model" else "actor"
    steps = engine.optimizer_config.total_training_steps
    return Schedule(optimiser, rate_factor(config, network, total=steps))


def sequence_means_skip_masked_rows() -> None:
    """Divide the `seq-mean-*` losses by the number of rows that have a token in the loss."""

    def count(engine: Any, data: TensorDict, loss_function: Callable[..., Any], *, original: Any) -> Any:
        from verl.utils import tensordict_utils

        tensordict_utils.assign_non_tensor(data, global_batch_size=max(_rows_in_the_loss(engine, data), 1))
        return original(engine, data, loss_function)

    _wrap_train_batch("sequence_means_skip_masked_rows", count)


def empty_mini_batch_is_skipped() -> None:
    """Skip the update of a mini-batch without a token in the loss."""

    def skip(engine: Any, data: TensorDict, loss_function: Callable[..., Any], *, original: Any) -> Any:
        if _rows_in_the_loss(engine, data):
            return original(engine, data, loss_function)
        return {"model_output": {}, "loss": [0.0], "metrics": {"grad_norm": 0.0}}

    _wrap_train_batch("empty_mini_batch_is_skipped", skip)


def _rows_in_the_loss(engine: Any, data: TensorDict) -> int:
    """Rows with a token in the loss, in the mini-batch of all workers."""
    from verl.utils.device import get_device_id

    rows = sum(bool((row != 0).any()) for row in data["loss_mask"].unbind())
    count = torch.tensor(rows, device=get_device_id())
    torch.distributed.all_reduce(count, group=engine.get_data_parallel_group())
    return int(count)


def _wrap_train_batch(name: str, around: Callable[..., Any]) -> None:
    """Wrap the update of one mini-batch by `around`, in every engine, once."""
    from verl.workers.engine.base import BaseEngine

    original = BaseEngine.train_batch
    if name in getattr(original, PATCHED, ()):
        return

    def train_batch(self: Any, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        return around(self, data, loss_function, original=original)

    setattr(train_batch, PATCHED, (*getattr(original, PATCHED, ()), name))
    put(BaseEngine, "train_batch", train_batch)


def put(owner: Any, name: str, replacement: Any) -> None:
    """Replace an attribute of verl's."""
    setattr(owner, name, replacement)


def replace(module: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of verl's, also in modules of verl that have imported it by name."""
    original = getattr(module, name)
    modules = [candidate for path, candidate in list(sys.modules.items()) if path.split(".")[0] == "verl"]
    for candidate in modules:
        if vars(candidate).get(name) is original:
            setattr(candidate, name, replacement)


PATCHES = (
    Patch(
        critic_head_starts_at_zero,
        "utils/model.py, load_valuehead_model",
        "It requires flash-attention 2 whatever is configured. Without flash-attn a run with a critic ends "
        'with "not a value head model"; with it, the value head starts at random numbers.',
    ),
    Patch(
        trl_is_not_used,
        "models/transformers/monkey_patch.py, apply_monkey_patch",
        "If trl is installed, workers fail with \"cannot import name 'AutoModelForCausalLMWithValueHead'\": "
        "trl has removed that class (trl 1.16.0 has it neither in trl nor in trl.experimental.ppo).",
    ),
    Patch(
        local_learning_rate,
        "workers/engine/fsdp/transformer_impl.py, FSDPEngine._build_lr_scheduler",
        "Warm-up starts at a rate of 0, so the first step learns nothing; the rate changes once per training "
        "step, not per optimiser step; there is no linear decay.",
    ),
    Patch(
        sequence_means_skip_masked_rows,
        "trainer/ppo/core_algos.py, agg_loss",
        "The seq-mean-* modes divide by the configured mini-batch size. Rows whose search failed, and rows "
        "that fill up the batch, count there and shrink the loss of all others.",
    ),
    Patch(
        empty_mini_batch_is_skipped,
        "workers/engine/base.py, BaseEngine.train_batch",
        "A mini-batch whose searches all failed has no token: token-mean gives NaN; other modes give zero "
        "gradients, with which AdamW still moves the weights by momentum and weight decay.",
    ),
)
"""The patches of every run, in the order in which they are applied."""

SCOPED_PATCHES = (
    Patch(
        "trainer.SearchTrainer._setup",
        "trainer/ppo/v1/trainer_base.py, RayWorkerGroup, while the workers are started",
        "The port at which the workers meet is one that the system gives to outgoing connections. One of "
        "Ray's takes it now and then before the workers listen, and the run ends with EADDRINUSE.",
    ),
)
"""The changes that are made and undone during a run, or that concern one object."""
