"""The learning rate of the local backend for verl's optimisers: it changes with every optimiser step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from srl.config import Config
from srl.train.learning_rate import Network, rate_factor
from srl.train.verl.translate import verl_scheduler_type
from srl.update.optimiser import at_its_step

VERL_ONLY = {"min_lr_ratio": (None, 0.0), "num_cycles": (None, 0.5)}
"""verl's settings that the local backend lacks, with the values that leave them unset."""


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


def our_schedule(config: Config, engine: Any, optimiser: Optimizer) -> Schedule | None:
    """The schedule of the local backend for an optimiser of verl's `engine`.

    verl's own configuration gives its kind, warm-up and length, since the section `verl` may set them. None
    where that section asks for what only verl's schedules have.
    """
    asked = engine.optimizer_config
    if any(getattr(asked, name) not in unset for name, unset in VERL_ONLY.items()):
        return None
    network: Network = "critic" if engine.model_config.model_type == "value_model" else "actor"
    kind, steps = getattr(config, network).optim.lr_scheduler_type, asked.total_training_steps
    warmup = max(0, asked.lr_warmup_steps or 0) or int(asked.lr_warmup_steps_ratio * steps)
    if asked.lr_scheduler_type != verl_scheduler_type(kind):
        kind = asked.lr_scheduler_type
    factor = rate_factor(config, network, kind=kind, warmup=warmup, total=steps)
    return Schedule(optimiser, factor)
