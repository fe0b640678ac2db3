"""The learning rate of the local backend for verl's optimisers: it changes with every optimiser step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from srl.config import Config
from srl.train.learning_rate import Network, rate_factor
from srl.update.optimiser import at_its_step


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
