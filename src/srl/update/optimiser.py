"""AdamW with warm-up, schedule and gradient clipping, for the actor, the critic and SFT."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.weak import WeakTensorKeyDictionary

from srl.models.load import return_free_memory

TRIMMED = 10**7
"""Weights of a model on a CPU from which on memory that passes have freed goes back to the system after a
step. Kept, it is cut up: training of 135 million weights then holds twice what it needs."""
_HOOKS = WeakTensorKeyDictionary()
"""The hook on each parameter that has a float32 copy: that of the newest optimiser over it."""
Schedule = Literal["constant", "linear", "cosine"]


def schedule(kind: Schedule, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate at optimiser step k, counted from 0.

    Linear warm-up over `warmup_steps`; then constant, or a decay to 0 at `total_steps`, linear or along half
    a cosine (Loshchilov and Hutter 2017, equation 5).
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        if kind == "linear":
            return 1.0 - progress
        return (1.0 + math.cos(math.pi * progress)) / 2 if kind == "cosine" else 1.0

    return factor


def at_its_step(scheduler: LambdaLR) -> None:
    """Set the optimiser's learning rate to the schedule's current one, in place of the saved one."""
    factors = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * factor(scheduler.last_epoch) for base, factor in factors]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


class Optimiser:
    """AdamW over the trainable parameters; one `step` for each accumulated gradient.

    Weights of less than 32 bits are updated through a float32 copy: an RL update is often smaller than the
    resolution of bfloat16. Their gradients are accumulated in float32 too, each as soon as a backward pass
    has it, so that those of lower precision are never held all at once. The step itself allocates nothing.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        eps: float = 1e-8,
        grad_clip: float = 1.0,
        schedule: Callable[[int], float] = lambda step: 1.0,
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [_master(parameter) for parameter in self.parameters]
        self.grad_clip = grad_clip
        self.begun = 0
        """How many steps were begun here. Between two counts no weight has changed."""
        self.adamw = torch.optim.AdamW(
            self.masters, lr=lr, betas=betas, weight_decay=weight_decay, eps=eps, fused=True
        )
        for master in self.masters:
            self.adamw.state[master] = _new_state(master)
        self.scheduler = LambdaLR(self.adamw, schedule)
        on_host = all(parameter.device.type == "cpu" for parameter in self.parameters)
        self._trims = on_host and sum(parameter.numel() for parameter in self.parameters) > TRIMMED
        for parameter, master in self._copies():
            if parameter in _HOOKS:  # of an optimiser that this one replaces
                _HOOKS[parameter].remove()
            _HOOKS[parameter] = parameter.register_post_accumulate_grad_hook(_passed_on_to(master))

    @property
    def lr(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def step(self) -> float:
        """Clip, update and zero the gradients; the gradient's norm before clipping.

        The update is skipped if the norm is not finite, and the learning rate stays, as in verl.
        """
        self.begun += 1
        for parameter, master in self._copies():
            _pass_on(parameter, master)
        norm = nn.utils.clip_grad_norm_(self.masters, self.grad_clip)
        if bool(torch.isfinite(norm)):
            self.adamw.step()
            with torch.no_grad():
                for parameter, master in self._copies():
                    parameter.copy_(master)
            self.scheduler.step()
        self.adamw.zero_grad(set_to_none=True)
        if self._trims:
            return_free_memory()
        return float(norm)

    def set_lr(self, lr: float) -> None:
        """Continue the schedule with another learning rate, which `state_dict` keeps."""
        self.scheduler.base_lrs = [lr for _ in self.scheduler.base_lrs]
        at_its_step(self.scheduler)

    def _copies(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that have a float32 copy, each with its copy."""
        pairs = zip(self.parameters, self.masters, strict=True)
        return [(parameter, master) for parameter, master in pairs if master is not parameter]

    def state_dict(self) -> dict[str, Any]:
        masters = [master.detach() for _, master in self._copies()]
        states = {"adamw": self.adamw.state_dict(), "scheduler": self.scheduler.state_dict()}
        return {**states, "masters": masters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy `state` in place, from any device. Raises ValueError if it is of another model."""
        count, own_count = len(state["adamw"]["param_groups"][0]["params"]), len(self.masters)
        if count != own_count:
            raise ValueError(f"its optimiser has {count} weights, and this run's has {own_count}")
        if len(state["masters"]) != len(self._copies()):
            raise ValueError("its weights have another precision (model.dtype) than this run's")
        for number, saved in state["adamw"]["state"].items():
            moments = self.adamw.state[self.masters[number]]
            for name, value in saved.items():
                _copy(value, moments[name])
        for (_, master), value in zip(self._copies(), state["masters"], strict=True):
            _copy(value, master)
        self.scheduler.load_state_dict(state["scheduler"])
        at_its_step(self.scheduler)


def _master(parameter: nn.Parameter) -> Tensor:
    """The parameter, or a float32 copy where it has fewer bits."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_(True)


def _new_state(master: Tensor) -> dict[str, Tensor]:
    """AdamW's state of a weight before its first step; held from the start, so that memory is not cut up."""
    moments = {name: torch.zeros_like(master, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=master.device), **moments}


def _passed_on_to(master: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to that of its copy, as long as the optimiser exists."""
    reference = weakref.ref(master)

    def hook(parameter: Tensor) -> None:
        if (copy := reference()) is not None:
            _pass_on(parameter, copy)

    return hook


def _pass_on(parameter: Tensor, master: Tensor) -> None:
    """Add the parameter's gradient to that of its float32 copy, and free it."""
    if parameter.grad is None:
        return
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def _copy(saved: Tensor, own: Tensor) -> None:
    """Copy a saved tensor in place. Raises ValueError if shapes differ."""
    if saved.shape != own.shape:
        raise ValueError(f"its optimiser: expected shape {tuple(own.shape)}, found {tuple(saved.shape)}")
    with torch.no_grad():
        own.copy_(saved)
