"""What an algorithm plugin returns, and what its estimator returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Advantages(NamedTuple):
    """Both are 0 where the mask is 0 and on rows with `valid` 0.

    `returns` is what a critic learns; without a critic it is what the advantage was made from.
    """

    advantages: Tensor  # (B, T)
    returns: Tensor  # (B, T)


@dataclass(frozen=True)
class Algorithm:
    """An estimator with the settings it is meant to run with.

    The estimator is a pure function, called with keywords only:

        estimator(token_level_rewards=(B, T), response_mask=(B, T), group_ids=(B,), valid=(B,),
                  values=(B, T) or None, group_size=n, gamma=1.0, lam=1.0, **options) -> Advantages

    `group_ids` says which rows answer the same question and `group_size` how many were asked for.
    `defaults` maps dotted config keys to values, e.g. `{"actor.use_kl_loss": True}`; what a user
    sets wins over them.
    """

    name: str
    estimator: Callable[..., Advantages]
    needs_critic: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)
